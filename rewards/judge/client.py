"""The client of all judges: it asks a vision-language model behind an OpenAI-compatible server.

The server may be vLLM, sglang, llama.cpp or a cloud.

* A question is asked again, after exponential pauses, if the server is busy or broken (408, 429,
  5xx, no connection, a timeout, a reply that is not a chat completion, or a huge one). A
  Retry-After that asks for more is honoured.
* The run stops at once where no retry would help: a refused key (401, 403), an unknown model or
path
  (404), a spent token budget.
* A question fails alone if the server finds the request too large (413) or wrong (400, 422), or if
  the reply cannot be read.

A failed question is NaN, never 0. If the server answers none of the questions of a call,
RewardUnavailable ends the run, resumable; answers that cannot be read, however many, are failed
samples.
Pictures travel as PNG in data URLs: the judge sees the pixels of a saved picture (most references
send JPEG of quality 75 or 95).
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import httpx
import pydantic
from PIL import Image

from flowrl.data.media import encoded
from flowrl.rewards.core.failures import RewardUnavailable
from flowrl.rewards.core.reward import forgetful
from flowrl.rewards.core.settings import Settings as Base
from flowrl.rewards.judge.completion import Reply, detail, read_reply
from flowrl.rewards.judge.replies import UnreadableReply
from flowrl.rewards.server.addresses import address, fits_a_header
from flowrl.rewards.server.http_client import (
    AT_START,
    Again,
    Client,
    Ended,
    TooLong,
    busy,
    ending,
    persist,
    retry_after,
)
from flowrl.runtime.paths import located
from flowrl.runtime.store import lines

logger = logging.getLogger("flowrl")
T = TypeVar("T")
Message = dict[str, Any]
# seconds before the first further try, which double each time; a server that asks for a longer
# pause than the longest counts as gone
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
# replies that a judge keeps, so that the parts of a score are read without asking again
KEPT = 1024
# most bytes of a reply: thousands of tokens with 20 log-probabilities each take fewer
LARGEST = 64 * 2**20


class Settings(Base):
    base_url: str = pydantic.Field(
        "http://127.0.0.1:8000/v1",
        description="Address at which the server's API begins; it usually ends in /v1.",
    )
    model: str = pydantic.Field(description="The model's name on that server.")
    api_key_env: str | None = pydantic.Field(
        None, description="Environment variable that holds the API key; null: none is sent."
    )
    timeout: float = pydantic.Field(180.0, gt=0, description="Seconds to wait for one reply.")
    retries: int = pydantic.Field(
        5, ge=0, description="Further tries of a question that the server did not answer."
    )
    concurrency: int = pydantic.Field(8, ge=1, description="Most questions under way at once.")
    temperature: float = pydantic.Field(
        0.0, ge=0, description="Sampling temperature of the replies."
    )
    max_tokens: int = pydantic.Field(4096, ge=1, description="Most tokens of a reply.")
    token_budget: int | None = pydantic.Field(
        None,
        ge=1,
        description=(
            "Most tokens, questions and replies together, that this reward may use in this process;"
            " then the run stops."
        ),
    )
    side: int | None = pydantic.Field(
        None,
        ge=16,
        description=(
            "Longest side of a picture that is sent, in px; larger ones are reduced; null:"
            " pictures are sent as they are."
        ),
    )
    extra: dict[str, Any] = pydantic.Field(
        default_factory=dict,
        description="More fields of the request, as seed; null removes one of ours.",
    )
    log: str | None = pydantic.Field(
        None, description="A .jsonl file to which every question, reply and value is added."
    )

    @pydantic.field_validator("base_url")
    @classmethod
    def check_url(cls, value: str) -> str:
        return address(value, "http://HOST:PORT/v1")


class NoReply(Exception):
    """One question has no usable reply; the message says why.

    kind: one of flowrl.rewards.core.failures.KINDS.
    """

    kind = "server"


class Unanswered(NoReply):
    """The server gave no reply, however often it was asked."""


class Misread(NoReply):
    """The reply could not be read."""

    kind = "reply"


class Stopped(NoReply):
    """Another question ended the call."""


class Ask(Protocol):
    def __call__(self, messages: list[Message]) -> Reply: ...


@dataclass(slots=True)
class Exchange:
    """One question and its reply, for the log and the cache."""

    key: str  # sha256 of the request, by which the cache finds the reply
    question: str  # question as the log shows it
    reply: Reply  # the judge's reply


class JudgeClient:
    """A model behind a server; several threads may use it at once.

    used: tokens so far. fields: fields that every request of this judge adds, such as logprobs.
    remembers: whether kept replies are used.
    """

    def __init__(self, settings: Settings, *, reward: str, fields: Mapping[str, Any] | None = None):
        self.settings, self.reward, self.fields = settings, reward, dict(fields or {})
        self.used, self.remembers = 0, True
        self.kept: OrderedDict[str, Reply] = OrderedDict()
        self.lock = threading.Lock()
        self.log = _log_file(settings.log, reward)
        self.key_sent = bool(settings.api_key_env)
        self.http = Client(
            settings.base_url,
            timeout=settings.timeout,
            largest=LARGEST,
            token=_api_key(settings, reward) if self.key_sent else None,
        )

    def ask_all(
        self, questions: Sequence[list[Message]], read: Callable[[Reply], T]
    ) -> list[T | NoReply]:
        """Ask all questions, `concurrency` at a time, and read the replies, in the order asked.

        The result holds the value that `read` makes of each reply, or why there is none.
        """

        def job(question: list[Message], ask: Ask) -> T:
            return read(ask(question))

        return self.run([partial(job, question) for question in questions])

    def uncached(self) -> AbstractContextManager[None]:
        """Inside this context every question is asked, and no kept reply is used."""
        return forgetful(self)

    def run(self, jobs: Sequence[Callable[[Ask], T]]) -> list[T | NoReply]:
        """Run dialogues side by side; a job gets `ask` and returns its value.

        A NoReply or UnreadableReply that a job raises is its result.
        """
        if not jobs:
            return []
        stop = threading.Event()
        workers = min(self.settings.concurrency, len(jobs))
        pool = ThreadPoolExecutor(workers, thread_name_prefix="judge")
        try:
            futures = [pool.submit(self._outcome, job, stop) for job in jobs]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()  # an exception of one job ends all
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
        outcomes = [future.result() for future in futures]
        self._report(outcomes)
        return outcomes

    def _outcome(self, job: Callable[[Ask], T], stop: threading.Event) -> T | NoReply:
        """The result of a job, which is written to the log as soon as it is there.

        Replies are paid for, also those of a call that another job ends.
        """
        talk: list[Exchange] = []
        try:
            outcome = self._value(job, talk, stop)
        # the call ends with this error, and its replies are logged first
        except Exception as error:
            if talk:
                self._write(talk, NoReply(f"{type(error).__name__}: {error}"))
            raise
        self._write(talk, outcome)
        return outcome

    def _value(
        self, job: Callable[[Ask], T], talk: list[Exchange], stop: threading.Event
    ) -> T | NoReply:
        """The value of a job, or why it has none; its exchanges go into `talk`."""
        try:
            value = job(partial(self._ask, talk=talk, stop=stop))
        except NoReply as error:
            return error
        except UnreadableReply as error:
            return Misread(f"{error}{self._cut(talk)}")
        with self.lock:  # only readable replies are kept: others are asked for again
            self.kept.update((exchange.key, exchange.reply) for exchange in talk)
            while len(self.kept) > KEPT:
                self.kept.popitem(last=False)
        return value

    def _cut(self, talk: list[Exchange]) -> str:
        if not talk or not talk[-1].reply.cut:
            return ""
        return f" (the reply was cut at max_tokens={self.settings.max_tokens})"

    def _report(self, outcomes: Sequence[Any]) -> None:
        """Warn of failures; raise RewardUnavailable if the server answered nothing at all."""
        failures = [outcome for outcome in outcomes if isinstance(outcome, NoReply)]
        if all(isinstance(outcome, Unanswered) for outcome in outcomes):
            raise RewardUnavailable(
                f"reward {self.reward}: the server at {self.settings.base_url} answered none of"
                f" {len(outcomes)} questions: {failures[0]}"
            )
        if failures:
            logger.warning(
                f"{self.reward}: {len(failures)} of {len(outcomes)} questions failed; first:"
                f" {failures[0]}"
            )

    # --- one question

    def _ask(
        self, messages: list[Message], *, talk: list[Exchange], stop: threading.Event
    ) -> Reply:
        body = json.dumps(self._body(messages))
        key = hashlib.sha256(body.encode()).hexdigest()
        with self.lock:
            reply = self.kept.get(key) if self.remembers else None
        if reply is None:
            reply = self._tried(body, stop)
        talk.append(Exchange(key, said(messages[-1]), reply))
        return reply

    def greet(self) -> None:
        """Ask the server for anything: where nothing answers when a run starts, no question would
        be answered; RewardUnavailable."""
        try:
            with ending(AT_START) as over, suppress(TooLong):
                self.http.fetch("GET", "/models", over=over)
        except Again as failure:
            raise RewardUnavailable(
                f"the judge of {self.reward} at {self.http.url} does not answer ({failure}); start"
                f" its server, or correct reward.{self.reward}.base_url"
            ) from None

    def _body(self, messages: list[Message]) -> dict[str, Any]:
        s = self.settings
        own = {
            "model": s.model,
            "messages": messages,
            "temperature": s.temperature,
            "max_tokens": s.max_tokens,
        }
        body = {**own, **self.fields, **s.extra}
        return {key: value for key, value in body.items() if value is not None}

    def _tried(self, body: str, stop: threading.Event) -> Reply:
        """The reply to a request, however often the settings let it be tried."""
        tries, pauses = self.settings.retries + 1, (FIRST_PAUSE, LONGEST_PAUSE)
        try:
            return persist(partial(self._once, body), stop, pauses=pauses, tries=tries)
        except Again as failure:
            raise Unanswered(f"{failure} ({tries} tries)") from None
        except Ended:
            raise Stopped("another question ended the call") from None

    def _once(self, body: str) -> Reply:
        self._check_budget()
        response = self.http.fetch("POST", "/chat/completions", body)
        if busy(response.status_code):
            reason = f"it answers {response.status_code} {detail(response)}".rstrip()
            after = retry_after(response)
            if after > LONGEST_PAUSE:
                raise Unanswered(f"{reason}, and asks to wait {after:.0f} seconds")
            raise Again(reason, after)
        if response.status_code != 200:
            self._refused(response, body)
        try:
            reply = read_reply(response.json())
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise Again(
                "it answers 200 with something that is not a chat completion:"
                f" {response.text[:80]!r}"
            ) from None
        self._count(reply)
        return reply

    def _refused(self, response: httpx.Response, body: str) -> NoReturn:
        """Raise the error for a status that is neither success nor worth another try."""
        status, where = response.status_code, f"reward {self.reward}: the server at {self.http.url}"
        if status in (401, 403):
            raise RewardUnavailable(f"{where} refuses {self._wrong_key(status)}")
        if status == 404:
            raise RewardUnavailable(f"{where} {self._unknown()}")
        if status == 413:
            raise NoReply(self._too_large(body))
        if status in (400, 422):
            words = detail(response) or "it does not say why"
            raise NoReply(f"the server refuses the request ({status}): {words}")
        raise RewardUnavailable(
            f"{where} answers {status}, which no OpenAI-compatible server does; check"
            f" reward.{self.reward}.base_url"
        )

    def _wrong_key(self, status: int) -> str:
        """Say which key a server refuses, and what to do; never the key itself."""
        variable = self.settings.api_key_env
        if self.key_sent:
            return (
                f"the API key in the environment variable {variable} ({status}); put a valid key"
                " there"
            )
        return (
            f"a request without an API key ({status}); name the variable that holds it in"
            f" reward.{self.reward}.api_key_env"
        )

    def _too_large(self, body: str) -> str:
        size, pictures = len(body) / 2**20, body.count('"image_url": {')
        return (
            f"the server finds a request of {size:.1f} MiB with {pictures} pictures too large"
            f" (413); send smaller pictures (reward.{self.reward}.side=512) or raise its limit"
        )

    def _unknown(self) -> str:
        """Say what a 404 means, after asking the server for its models."""
        try:
            listed = self.http.fetch("GET", "/models").json()["data"]
            names = ", ".join(str(model["id"]) for model in listed)
        except (Again, ValueError, KeyError, TypeError):
            return (
                f"has no OpenAI-compatible API there (404); reward.{self.reward}.base_url usually"
                " ends in /v1"
            )
        return (
            f"has no model {self.settings.model} (404); set reward.{self.reward}.model to one that"
            f" it serves: {names}"
        )

    # --- the budget and the log

    def _check_budget(self) -> None:
        budget = self.settings.token_budget
        if budget is not None and self.used >= budget:
            raise RewardUnavailable(
                f"reward {self.reward} has used {self.used} tokens, and token_budget={budget};"
                f" raise reward.{self.reward}.token_budget to go on, or leave the reward out"
            )

    def _count(self, reply: Reply) -> None:
        if reply.tokens is None and self.settings.token_budget is not None:
            raise RewardUnavailable(
                f"reward {self.reward}: the server at {self.settings.base_url} does not say how"
                f" many tokens a reply used, so token_budget={self.settings.token_budget} cannot be"
                " kept; leave token_budget out"
            )
        with self.lock:
            self.used += reply.tokens or 0

    def _write(self, talk: list[Exchange], outcome: Any) -> None:
        """Write a line of the log for each exchange of a dialogue; the last has the value or
        error."""
        if self.log is None or (isinstance(outcome, Stopped) and not talk):
            return
        turns: list[dict[str, Any]] = [
            {"question": one.question, "reply": one.reply.text} for one in talk
        ]
        rows = [
            {"reward": self.reward, "turn": number, **turn, "value": None, "error": None}
            for number, turn in enumerate(turns or [{"question": None, "reply": None}])
        ]
        rows[-1] |= {"error": str(outcome)} if isinstance(outcome, NoReply) else {"value": outcome}
        with self.lock:
            lines.append(self.log, rows, ensure_ascii=False)


# --- messages


def picture(image: Image.Image, side: int | None = None) -> dict[str, Any]:
    """A picture as a part of a message: PNG in a data URL, its longer side at most `side`."""
    if side is not None and max(image.size) > side:
        image = image.resize(
            [max(1, round(n * side / max(image.size))) for n in image.size],
            Image.Resampling.BICUBIC,
        )
    data = base64.b64encode(encoded(image, compress_level=1)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def said(message: Message) -> str:
    """The words of a message, with <image> in the place of each picture."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "<image>") for part in content)


# --- start-up


def _api_key(settings: Settings, reward: str) -> str:
    key = os.environ.get(settings.api_key_env or "", "").strip()
    if not key or not fits_a_header(key):
        odd = "holds spaces, line breaks or characters outside ASCII, so it is not an API key"
        what = odd if key else "holds no API key"
        raise ValueError(
            f"reward.{reward}.api_key_env={settings.api_key_env}: the environment variable"
            f" {settings.api_key_env} {what}; put it there (null sends none)"
        )
    return key


def _log_file(path: str | None, reward: str) -> Path | None:
    if path is None:
        return None
    file = located(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except OSError as error:
        raise ValueError(f"reward.{reward}.log={path} cannot be written: {error}") from error
    return file
