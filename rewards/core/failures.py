"""Kinds of failures to score a sample: an iteration's metrics reward/invalid/KIND count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

KINDS = {  # kind -> what happened
    "pixels": "their pixels are NaN or inf: the policy or its decoder gives no picture",
    "nan": "the reward returned NaN or inf",
    "error": "the reward raised an exception",
    "timeout": "the reward raised a timeout",
    "server": "a server did not answer or refused the request",
    "reply": "a judge's reply could not be read",
    "overflow": "weight times score is beyond fp32",
}
OF_SERVERS = {  # names of exceptions, and of their parents, that say that a server failed
    "ConnectionError",  # an exception of Python, and of the package requests
    "TransportError",  # an exception of httpx
    "RequestException",
    "URLError",
    "ClientError",  # an exception of aiohttp
    "APIError",  # an exception of openai
}


class RewardBug(RuntimeError):
    """A reward broke its contract (shape, dtype, device, an unknown column).

    The run stops: no retry would help.
    """


class RewardUnavailable(RuntimeError):
    """A server on which a reward relies is gone, and waiting did not help.

    The run stops, resumable: no sample is counted as failed.
    """


class Problem(str):
    """`Reward.problem` that knows kinds: how many samples of the call failed by which of KINDS."""

    kinds: Mapping[str, int]

    def __new__(cls, sentence: str, kinds: Mapping[str, int]) -> Problem:
        self = super().__new__(cls, sentence)
        self.kinds = dict(kinds)
        return self


def kind_of(error: BaseException) -> str:
    """The kind of a sample for which a reward raised `error`."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if any("Timeout" in name for name in names):
        return "timeout"
    return "server" if names & OF_SERVERS else "error"


def kinds_of(problem: str | None, failed: int) -> Counter[str]:
    """The kinds of `failed` samples that a reward gave NaN, read from its `problem`.

    A reward around another one may count other things than samples (frames, questions): then the
    most frequent kind stands for all.
    """
    kinds = Counter(problem.kinds if isinstance(problem, Problem) else {"nan": failed})
    if kinds.total() == failed:
        return +kinds
    return Counter({kinds.most_common(1)[0][0] if kinds else "nan": failed})


def explained(kinds: Mapping[str, int]) -> str:
    """The most frequent kind in words, with its number: "most: 3 x reply (...)"."""
    kind, count = Counter(kinds).most_common(1)[0]
    return f"{count} x {kind} ({KINDS[kind]})"
