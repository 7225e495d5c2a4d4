"""A reward that another process computes: the client of `flowrl serve`.

The server may hold packages that this environment cannot, a GPU of its own, or the only copy of a
large network. It states scale, needs and reads of what it serves, so a run is checked against them
before it starts. Scores are those that the same call gives there.

A server that is away (refused connections, timeouts, answers 5xx) is asked again for `wait`
seconds; then the run stops, resumable, with RewardUnavailable. No sample is lost or counted as
failed by it. With a journal, scores that were received are not asked for again. A reward that broke
its contract there is a RewardBug here, at once.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import httpx
import pydantic
import torch
from torch import Tensor

from flowrl.rewards.core import reward as core_reward
from flowrl.rewards.core.reward import RewardBug, RewardUnavailable
from flowrl.rewards.server import wire
from flowrl.rewards.server.journal import Journal, keys
from flowrl.runtime.registry import did_you_mean
from flowrl.types import MediaContext

logger = logging.getLogger("flowrl")
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds between attempts; doubled each time
GLANCE = 0.1  # seconds: how often a request under way looks whether the call has ended
MOST_REPLY = 2**24  # bytes: 16 kB for each of the most samples of a request
# how a server's sentence about a reward that broke its contract begins, as _detail gives it
BUG = ": RewardBug: "
HEADERS = {
    "Content-Type": "application/json",
    "Accept-Encoding": "identity",
}  # a compressed reply could be any size


class Settings(core_reward.Settings):
    url: str = pydantic.Field(description="Address of the server, as http://127.0.0.1:8321.")
    reward: str | None = pydantic.Field(
        None, description="Which of the rewards served; null: their weighted total."
    )
    token_env: str | None = pydantic.Field(
        None, description="Environment variable that holds the server's token; null: it wants none."
    )
    pixels: Literal["exact", "bytes"] = pydantic.Field(
        "exact",
        description=(
            "exact: as they are; bytes: rounded to what a saved PNG holds, several times smaller."
        ),
    )
    batch: int = pydantic.Field(
        8,
        ge=1,
        description="Most samples in one request; whole groups where the reward compares a group.",
    )
    concurrency: int = pydantic.Field(4, ge=1, description="Requests under way at once.")
    timeout: float = pydantic.Field(
        600.0, gt=0, description="Seconds that one request may take, to the last byte of its reply."
    )
    wait: float = pydantic.Field(
        300.0,
        ge=0,
        description="Seconds to keep trying a server that is away before the run stops.",
    )
    journal: str | None = pydantic.Field(
        None, description="File that keeps the scores received, so that a resumed run has them."
    )

    @pydantic.field_validator("url")
    @classmethod
    def check_url(cls, value: str) -> str:
        return wire.address(value, "http://HOST:PORT")


class Refused(Exception):
    """The server answers, and asking again would not help."""


class Ended(Exception):
    """The call that asked has ended: another request gave up, or the caller did."""


class Remote(core_reward.Reward):
    """Asks a reward server; scale, needs, reads, reads_prompt and video are the server's.

    journal: a Journal of the scores, from the setting or of the run. problem: why samples of the
    last call failed.
    """

    Settings = Settings
    name = "remote"
    scale = "as the server's reward states it"

    def __init__(self, settings: Any):
        super().__init__(settings)
        s = self.settings
        self.http = httpx.Client(
            headers=_authorization(s.token_env),
            timeout=httpx.Timeout(s.timeout, connect=min(s.timeout, 10)),
            limits=httpx.Limits(
                max_connections=None
            ),  # one that was given up may hold its connection a little longer
            trust_env=not wire.is_loopback(
                httpx.URL(s.url).host
            ),  # a proxy of the environment cannot reach this machine's own address
        )
        self.journal = Journal(s.journal) if s.journal else None
        self.problem: str | None = None
        self.away, self.remembers = False, True
        try:
            self.about = self._read(
                wire.About, self._ask("GET", "/version", None, threading.Event())
            )
            served = self._chosen()
        except Refused as error:
            raise ValueError(f"reward.remote.url={s.url}: {error}") from None
        self.scale, self.reads_prompt, self.video = served.scale, served.reads_prompt, served.video
        self.needs, self.reads, self.rounds = (
            frozenset(served.needs),
            frozenset(served.reads),
            served.rounds or s.pixels == "bytes",
        )

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        pixels, columns = media.detach().cpu(), wire.columns_of(context, self.needs)
        scores: list[float | None] = [None] * len(prompts)
        names: list[str] = []
        if self.journal is not None:
            names = keys(
                f"{self.about.version} {self.settings.reward} {self.settings.pixels}",
                pixels,
                prompts,
                columns,
            )
            scores = [self.journal.get(name) if self.remembers else None for name in names]
        errors: dict[int, str] = {}

        def fetch(rows: list[int], over: threading.Event) -> None:
            answer = self._score(
                pixels[rows],
                [prompts[i] for i in rows],
                {n: _take(c, rows) for n, c in columns.items()},
                over,
            )
            found = {
                i: value for i, value in zip(rows, answer.scores, strict=True) if value is not None
            }
            errors.update({i: said for i, said in zip(rows, answer.errors, strict=True) if said})
            for i, value in found.items():
                scores[i] = value
            if self.journal is not None:
                self.journal.add({names[i]: value for i, value in found.items()})

        _side_by_side(fetch, self._batches(scores, columns, pixels), self.settings.concurrency)
        self.problem = f"sample {min(errors)}: {errors[min(errors)]}" if errors else None
        return torch.tensor(
            [math.nan if value is None else value for value in scores],
            dtype=torch.float32,
            device=media.device,
        )

    def begin(self, run: Path) -> None:
        """Without a journal of one's own, the run's: a resumed iteration does not ask, and pay,
        again."""
        self.journal = self.journal or Journal(run / "scores.jsonl")

    def uncached(self) -> AbstractContextManager[None]:
        """Within it every score is the server's, though the journal may hold one; what comes is
        kept."""
        return core_reward.forgetful(self)

    def _batches(
        self, scores: list[float | None], columns: Mapping[str, Any], pixels: Tensor
    ) -> list[list[int]]:
        """Rows of each request: those without a score, or the groups that hold one."""
        units = [[i] for i, score in enumerate(scores) if score is None]
        if "group" in columns:
            group = columns["group"].tolist()
            open_groups = dict.fromkeys(group[i] for (i,) in units)
            units = [[i for i, g in enumerate(group) if g == chosen] for chosen in open_groups]
        tensors = [pixels, *(column for name, column in columns.items() if name in wire.TENSORS)]
        room = int(
            self.about.max_mb * 1e6 / (1.4 * sum(t[0].nbytes for t in tensors))
        )  # base64 is 4/3, and the texts
        most = max(1, min(self.settings.batch, self.about.max_samples, room))
        batches: list[list[int]] = []
        for unit in units:
            if batches and len(batches[-1]) + len(unit) <= most:
                batches[-1] += unit
            else:
                batches.append(list(unit))
        return batches

    def _score(
        self, media: Tensor, prompts: list[str], columns: Mapping[str, Any], over: threading.Event
    ) -> wire.Answer:
        question = {
            "id": secrets.token_hex(8),
            "prompts": prompts,
            "media": wire.pack_media(media, rounds=self.rounds),
        }
        question |= {name: _packed(name, column) for name, column in columns.items()}
        if self.settings.reward is not None:
            question["reward"] = self.settings.reward
        try:
            answer = self._read(
                wire.Answer, self._ask("POST", "/score", json.dumps(question), over)
            )
            if answer.id != question["id"] or {len(answer.scores), len(answer.errors)} != {
                len(prompts)
            }:
                raise Refused(
                    f"it answered another request than the one it was asked ({len(answer.scores)}"
                    f" scores for {len(prompts)})"
                )
            if answer.version != self.about.version:
                raise Refused(
                    "it now serves other rewards or settings than when this run started; serve the"
                    " same again"
                )
        except Refused as error:
            over.set()
            raise RewardUnavailable(
                f"the reward server {self.settings.url} cannot be used: {error}; {self._resume()}"
            ) from None
        return answer

    def _ask(
        self, method: str, path: str, body: str | None, over: threading.Event
    ) -> httpx.Response:
        """An answer below 500, however often it takes within `wait` seconds of the first failure;
        over: the call has ended."""
        began, pause = None, FIRST_PAUSE
        while True:
            try:
                response = self._once(method, path, body, over)
                if (
                    response.status_code < 500 and response.status_code != 408
                ):  # 408: the request came too slowly
                    self._back()
                    return response
                said = _detail(response)
                if response.status_code == 500 and said.startswith(BUG):
                    over.set()
                    raise RewardBug(
                        f"the reward that {self.settings.url} serves has a fault:"
                        f" {said.removeprefix(BUG)}"
                    )
                problem = f"it answered {response.status_code}{said}"
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            now = time.monotonic()
            began = now if began is None else began
            left = began + self.settings.wait - now
            if over.is_set():
                raise Ended
            if left <= 0:
                over.set()
                raise RewardUnavailable(
                    f"the reward server {self.settings.url} does not answer ({problem}; tried for"
                    f" {self.settings.wait:g} s): {self._resume()}"
                )
            self._gone(problem)
            over.wait(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _once(
        self, method: str, path: str, body: str | None, over: threading.Event
    ) -> httpx.Response:
        """One try, left alone after `timeout` seconds in all (httpx limits each read, and a reply
        may drip) or when the call has ended."""
        reply: Future[httpx.Response] = Future()
        until = time.monotonic() + self.settings.timeout

        def exchange() -> None:
            try:
                reply.set_result(self._exchange(method, path, body, until))
            except Exception as error:  # belongs to who waits
                reply.set_exception(error)

        threading.Thread(target=exchange, name="remote request", daemon=True).start()
        while not over.is_set():
            left = until - time.monotonic()
            if left <= 0:
                raise httpx.ReadTimeout(
                    f"no reply within timeout={self.settings.timeout:g} seconds"
                )
            wait([reply], min(GLANCE, left))
            if reply.done():
                return reply.result()
        raise Ended

    def _exchange(self, method: str, path: str, body: str | None, until: float) -> httpx.Response:
        content = bytearray()
        with self.http.stream(
            method, self.settings.url + path, content=body, headers=HEADERS
        ) as response:
            for part in response.iter_raw():
                content += part
                if len(content) > MOST_REPLY:
                    raise Refused(
                        f"its reply has more than {MOST_REPLY / 2**20:g} MiB, which no flowrl"
                        " server sends"
                    )
                if time.monotonic() > until:
                    raise httpx.ReadTimeout("the reply drips")
        return httpx.Response(response.status_code, content=bytes(content))

    def _read(self, record: type[pydantic.BaseModel], response: httpx.Response) -> Any:
        """The record that an answer holds; anything else -> Refused, or ValueError for what was
        wrong with the samples."""
        status = response.status_code
        if status in (401, 403):
            named = self.settings.token_env
            raise Refused(
                "it wants another token"
                if named
                else "it wants a token; name the variable that holds it in token_env"
            )
        if status == 422:
            raise ValueError(f"the reward server refused a request{_detail(response)}")
        if status != 200:
            raise Refused(f"it answered {status}{_detail(response) or '; is it a flowrl server?'}")
        try:
            return record.model_validate_json(response.content)
        except pydantic.ValidationError:
            raise Refused(
                f"it answered what no flowrl server of protocol {wire.PROTOCOL} does:"
                f" {response.text[:60]!r}"
            ) from None

    def _chosen(self) -> wire.Served:
        if self.about.protocol != wire.PROTOCOL:
            raise Refused(
                f"it speaks protocol {self.about.protocol}, this client {wire.PROTOCOL}; install"
                " one version of flowrl on both"
            )
        label = self.settings.reward
        if label is None:
            return self.about.total
        if label not in self.about.rewards:
            raise Refused(f'it does not serve "{label}"{did_you_mean(label, self.about.rewards)}')
        return self.about.rewards[label]

    def _gone(self, problem: str) -> None:
        if not self.away:
            self.away = True
            logger.warning(
                f"the reward server {self.settings.url} does not answer ({problem}); trying again"
                f" for {self.settings.wait:g} s"
            )

    def _back(self) -> None:
        if self.away:
            self.away = False
            logger.warning(f"the reward server {self.settings.url} answers again")

    def _resume(self) -> str:
        if not hasattr(self, "about"):
            return "start it with `flowrl serve REWARD`, or correct reward.remote.url"
        return (
            "start it with `flowrl serve`, then resume the run with `flowrl train --resume RUN`; no"
            " sample was counted as failed"
        )


def _side_by_side(
    fetch: Callable[[list[int], threading.Event], None], batches: list[list[int]], most: int
) -> None:
    """fetch(rows, over) for all, `most` at once. An exception in this thread, as of a signal, waits
    for none of them.

    over: set by a fetch that gives up for all; the others then end with Ended.
    """
    over = threading.Event()
    if len(batches) < 2:
        for rows in batches:
            fetch(rows, over)
        return

    def job(rows: list[int]) -> None:
        try:
            if not over.is_set():
                fetch(rows, over)
        except Ended:  # the reason is another's
            pass

    pool = ThreadPoolExecutor(min(most, len(batches)), thread_name_prefix="remote")
    try:
        futures = [pool.submit(job, rows) for rows in batches]
        wait(futures)
        for future in futures:
            future.result()
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _authorization(variable: str | None) -> dict[str, str]:
    return {} if variable is None else {"Authorization": f"Bearer {wire.token_of(variable)}"}


def _packed(name: str, column: Any) -> Any:
    """A column of some samples as JSON takes it."""
    if name == "meta":
        for row in column:
            wire.meta_text(row)
        return column
    return column.tolist() if name == "group" else wire.pack(column)


def _take(column: Any, rows: list[int]) -> Any:
    return column[rows] if isinstance(column, Tensor) else [column[i] for i in rows]


def _detail(response: httpx.Response) -> str:
    """ ": the server's own sentence", if there is one."""
    try:
        return f": {response.json()['detail']}"
    except (ValueError, KeyError, TypeError):
        return ""


REWARD = Remote
