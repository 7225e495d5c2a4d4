"""Asking a vision-language model behind an OpenAI-compatible server (vLLM, sglang, llama.cpp, a
cloud): one client for all judges.

* Tried again, with exponential pauses: a server that is busy or broken (408, 429, 5xx, no
  connection, a timeout, a reply that is no chat completion, or a huge one). A Retry-After that asks
  for more is honoured.
* Stops at once, because no retry would help: a refused key (401, 403), an unknown model or path
  (404), a spent token budget.
* Fails alone: a request that the server finds too large (413) or wrong (400, 422), and a reply that
  cannot be read.

A failed question is NaN, never 0. If the server answers none of the questions of a call,
RewardUnavailable ends the run, resumable; answers that cannot be read, however many, are failed
samples.
Pictures travel as PNG in data URLs: the judge sees the pixels of a saved picture (most references
send JPEG of quality 75 or 95).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import pydantic
from PIL import Image

from flowrl.rewards.core.reward import RewardUnavailable, forgetful
from flowrl.rewards.core.reward import Settings as Base
from flowrl.rewards.judge.completion import Reply, detail, read_reply, retry_after
from flowrl.rewards.judge.replies import Unreadable
from flowrl.rewards.server import wire

logger = logging.getLogger("flowrl")
T = TypeVar("T")
Message = dict[str, Any]
LONGEST_PAUSE = 300.0  # seconds: a server that asks for more is taken to be gone
LARGEST = (
    64 * 2**20
)  # bytes of a reply: thousands of tokens with 20 log-probabilities each are fewer


class Settings(Base):
    base_url: str = pydantic.Field(
        "http://127.0.0.1:8000/v1",
        description="Where the server's API begins; it usually ends in /v1.",
    )
    model: str = pydantic.Field(description="The model's name on that server.")
    api_key_env: str | None = pydantic.Field(
        None, description="Environment variable that holds the API key; null: none is sent."
    )
    timeout: float = pydantic.Field(180.0, gt=0, description="Seconds to wait for one reply.")
    retries: int = pydantic.Field(
        5, ge=0, description="Further tries of a question that the server did not answer."
    )
    backoff: float = pydantic.Field(
        1.0, gt=0, description="Seconds before the first further try; doubled each time."
    )
    concurrency: int = pydantic.Field(8, ge=1, description="Questions under way at once.")
    temperature: float = pydantic.Field(
        0.0, ge=0, description="Sampling temperature of the replies."
    )
    max_tokens: int = pydantic.Field(4096, ge=1, description="Longest reply, in tokens.")
    seed: int | None = pydantic.Field(
        None, description="Seed of the replies, where the server takes one; null: none is sent."
    )
    token_budget: int | None = pydantic.Field(
        None,
        ge=1,
        description=(
            "Most tokens, questions and replies together, that this reward may use in this process;"
            " then the run stops."
        ),
    )
    cache: int = pydantic.Field(
        1024,
        ge=0,
        description="Replies kept, so that the same question is not asked twice; 0: always ask.",
    )
    side: int | None = pydantic.Field(
        None,
        ge=16,
        description="Pictures with a longer side are reduced to it; null: sent as they are.",
    )
    extra: dict[str, Any] = pydantic.Field(
        default_factory=dict, description="More fields of the request; null removes one of ours."
    )
    log: str | None = pydantic.Field(
        None, description="A .jsonl file to which every question, reply and value is added."
    )

    @pydantic.field_validator("base_url")
    @classmethod
    def check_url(cls, value: str) -> str:
        return wire.address(value, "http://HOST:PORT/v1")


class Failed(Exception):
    """One question has no usable reply; the message says why."""


class Unanswered(Failed):
    """The server gave no reply, however often it was asked."""


class Stopped(Failed):
    """The call that asked has ended."""


class Ask(Protocol):
    def __call__(self, messages: list[Message]) -> Reply: ...


@dataclass(slots=True)
class Exchange:
    """One question and its reply, for the log and the cache."""

    key: str
    question: str
    reply: Reply


class Judge:
    """A model behind a server. Safe to use from several threads.

    used: tokens so far. fields: what every request of this judge adds, as logprobs. remembers:
    whether kept replies are used.
    """

    def __init__(self, settings: Settings, *, reward: str, fields: Mapping[str, Any] | None = None):
        self.settings, self.reward, self.fields = settings, reward, dict(fields or {})
        self.used, self.remembers = 0, True
        self.kept: OrderedDict[str, Reply] = OrderedDict()
        self.lock = threading.Lock()
        self.log = _log_file(settings.log, reward)
        self.key_sent = bool(settings.api_key_env)
        headers = {"Authorization": f"Bearer {_api_key(settings, reward)}"} if self.key_sent else {}
        self.client = httpx.Client(
            headers=headers,
            timeout=settings.timeout,
            limits=httpx.Limits(max_connections=None),
            trust_env=not wire.is_loopback(
                httpx.URL(settings.base_url).host
            ),  # no proxy leads to this machine's own ports
        )

    def ask_all(
        self, questions: Sequence[list[Message]], read: Callable[[Reply], T]
    ) -> list[T | Failed]:
        """Ask all questions, `concurrency` at a time -> what `read` makes of each reply, or why
        there is none, in the order asked."""

        def job(question: list[Message], ask: Ask) -> T:
            return read(ask(question))

        return self.run([partial(job, question) for question in questions])

    def uncached(self) -> AbstractContextManager[None]:
        """Within it every question is asked."""
        return forgetful(self)

    def run(self, jobs: Sequence[Callable[[Ask], T]]) -> list[T | Failed]:
        """Run dialogues side by side; a job gets `ask` and returns its value. What a job raises as
        Failed or Unreadable is its result."""
        if not jobs:
            return []
        stop = threading.Event()
        talks: list[list[Exchange]] = [[] for _ in jobs]
        pool = ThreadPoolExecutor(
            min(self.settings.concurrency, len(jobs)), thread_name_prefix="judge"
        )
        try:
            futures = [
                pool.submit(self._outcome, job, talk, stop)
                for job, talk in zip(jobs, talks, strict=True)
            ]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()  # an exception of one ends all
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
        outcomes = [future.result() for future in futures]
        self._report(outcomes)
        return outcomes

    def _outcome(
        self, job: Callable[[Ask], T], talk: list[Exchange], stop: threading.Event
    ) -> T | Failed:
        """What a job returns, written to the log as soon as it is there: replies are paid for, also
        those of a call that another ends."""
        try:
            outcome = self._value(job, talk, stop)
        except Exception as error:  # the call ends with it
            if talk:
                self._write(talk, Failed(f"{type(error).__name__}: {error}"))
            raise
        self._write(talk, outcome)
        return outcome

    def _value(
        self, job: Callable[[Ask], T], talk: list[Exchange], stop: threading.Event
    ) -> T | Failed:
        try:
            value = job(partial(self._ask, talk=talk, stop=stop))
        except Failed as error:
            return error
        except Unreadable as error:
            cut = (
                f" (the reply was cut at max_tokens={self.settings.max_tokens})"
                if talk and talk[-1].reply.cut
                else ""
            )
            return Failed(f"{error}{cut}")
        with self.lock:  # what could not be read is asked again next time
            self.kept.update((exchange.key, exchange.reply) for exchange in talk)
            while len(self.kept) > self.settings.cache:
                self.kept.popitem(last=False)
        return value

    def _report(self, outcomes: Sequence[Any]) -> None:
        """Warn of failures; if the server answered nothing at all, RewardUnavailable."""
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        if len(failures) == len(outcomes) and all(
            isinstance(failure, Unanswered) for failure in failures
        ):
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

    def _body(self, messages: list[Message]) -> dict[str, Any]:
        s = self.settings
        own = {
            "model": s.model,
            "messages": messages,
            "temperature": s.temperature,
            "max_tokens": s.max_tokens,
            "seed": s.seed,
        }
        return {
            key: value
            for key, value in {**own, **self.fields, **s.extra}.items()
            if value is not None
        }

    def _tried(self, body: str, stop: threading.Event) -> Reply:
        reason, pause = "", self.settings.backoff
        for attempt in range(self.settings.retries + 1):
            if stop.is_set():
                raise Stopped("another question ended the call")
            self._check_budget()
            answer = self._once(body)
            if isinstance(answer, Reply):
                self._count(answer)
                return answer
            reason, asked = answer
            if asked is not None and asked > LONGEST_PAUSE:
                raise Unanswered(f"{reason}, and asks to wait {asked:.0f} seconds")
            if attempt < self.settings.retries:
                stop.wait(min(max(pause, asked or 0.0), LONGEST_PAUSE))
                pause *= 2
        raise Unanswered(f"{reason} ({self.settings.retries + 1} tries)")

    def _once(self, body: str) -> Reply | tuple[str, float | None]:
        """One request: a reply, or why to try again and after how many seconds the server wants
        that (None: it does not say)."""
        try:
            response = self._fetch("POST", "/chat/completions", body)
        except httpx.TimeoutException:
            return f"no answer within timeout={self.settings.timeout:g} seconds", None
        except httpx.LocalProtocolError:  # its words may hold a header
            return "LocalProtocolError", None
        except httpx.RequestError as error:
            return f"{type(error).__name__}: {error}", None
        if response.status_code in (408, 429) or response.status_code >= 500:
            return f"it answers {response.status_code} {detail(response)}".rstrip(), retry_after(
                response
            )
        if response.status_code != 200:
            self._refused(response, body)
        try:
            return read_reply(response.json())
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return (
                f"it answers 200 with something that is no chat completion: {response.text[:80]!r}",
                None,
            )

    def _fetch(self, method: str, path: str, body: str | None = None) -> httpx.Response:
        """The whole answer to a request; one that is too long or takes too long ->
        httpx.RequestError."""
        deadline, content = time.monotonic() + self.settings.timeout, bytearray()
        url, kind = self.settings.base_url + path, {"Content-Type": "application/json"}
        with self.client.stream(method, url, content=body, headers=kind) as answer:
            for piece in answer.iter_bytes():
                content += piece
                if len(content) > LARGEST:
                    raise httpx.ReadError(f"its answer is longer than {LARGEST:,} bytes")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("")
        headers = {
            name: answer.headers[name]
            for name in ("Content-Type", "Retry-After")
            if name in answer.headers
        }
        return httpx.Response(answer.status_code, headers=headers, content=bytes(content))

    def _refused(self, response: httpx.Response, body: str) -> None:
        """Raise what a status means that is neither success nor worth another try."""
        s, status, words = self.settings, response.status_code, detail(response)
        where = f"reward {self.reward}: the server at {s.base_url}"
        if status in (401, 403):
            key = (
                f"the API key in the environment variable {s.api_key_env}"
                if self.key_sent
                else "a request without an API key"
            )
            cure = (
                "put a valid key there"
                if self.key_sent
                else f"name the variable that holds it in reward.{self.reward}.api_key_env"
            )
            raise RewardUnavailable(f"{where} refuses {key} ({status}); {cure}")
        if status == 404:
            raise RewardUnavailable(f"{where} {self._unknown()}")
        if status == 413:
            size, pictures = len(body) / 2**20, body.count('"image_url": {')
            raise Failed(
                f"the server finds a request of {size:.1f} MiB with {pictures} pictures too large"
                f" (413); send smaller pictures (reward.{self.reward}.side=512) or raise its limit"
            )
        if status in (400, 422):
            raise Failed(
                f"the server refuses the request ({status}): {words or 'it does not say why'}"
            )
        raise RewardUnavailable(
            f"{where} answers {status}, which no OpenAI-compatible server does; check"
            f" reward.{self.reward}.base_url"
        )

    def _unknown(self) -> str:
        """What a 404 means, by asking which models there are."""
        try:
            listed = self._fetch("GET", "/models").json()["data"]
            names = ", ".join(str(model["id"]) for model in listed)
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
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
        """One line of the log for each exchange of a dialogue; value and error stand in the
        last."""
        if self.log is None or (isinstance(outcome, Stopped) and not talk):
            return
        error = str(outcome) if isinstance(outcome, Failed) else None
        rows: list[dict[str, Any]] = [
            {"question": e.question, "reply": e.reply.text} for e in talk
        ] or [{"question": None, "reply": None}]
        lines = []
        for turn, row in enumerate(rows):
            end = (
                {"value": None if error else outcome, "error": error}
                if row is rows[-1]
                else {"value": None, "error": None}
            )
            lines.append(
                json.dumps({"reward": self.reward, "turn": turn, **row, **end}, ensure_ascii=False)
            )
        with self.lock, self.log.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))


# --- messages


def picture(image: Image.Image, side: int | None = None) -> dict[str, Any]:
    """A picture as a part of a message: PNG in a data URL, its longer side at most `side`."""
    if side is not None and max(image.size) > side:
        image = image.resize(
            [max(1, round(n * side / max(image.size))) for n in image.size],
            Image.Resampling.BICUBIC,
        )
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{wire.png(image)}"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def said(message: Message) -> str:
    """The words of a message, <image> where a picture stands."""
    content = message["content"]
    return (
        content
        if isinstance(content, str)
        else "".join(part.get("text", "<image>") for part in content)
    )


# --- start-up


def _api_key(settings: Settings, reward: str) -> str:
    key = os.environ.get(settings.api_key_env or "", "").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        what = (
            "holds spaces, line breaks or characters outside ASCII, so it is no API key"
            if key
            else "holds no API key"
        )
        raise ValueError(
            f"reward.{reward}.api_key_env={settings.api_key_env}: the environment variable"
            f" {settings.api_key_env} {what}; put it there (null sends none)"
        )
    return key


def _log_file(path: str | None, reward: str) -> Path | None:
    if path is None:
        return None
    file = Path(path).expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise ValueError(f"reward.{reward}.log={path} cannot be written: {error}") from error
    return file
