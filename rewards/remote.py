"""A reward that another process computes: the client of `flowrl serve`.

The server may hold packages that this environment cannot, a GPU of its own, or the only copy of a
large network. It states scale, needs and reads of what it serves, so a run is checked against them
before it starts. Scores are those that the same call gives there.

A server that is away (refused connections, timeouts, answers of 408, 429, 500 and above) is asked
again for `wait` seconds; then the run stops, resumable, with RewardUnavailable. The least busy one
of several servers is asked, and one that is away is passed over. No sample is lost by that, or
counted as failed. With a journal, scores that were received are not asked for again. A reward that
broke its contract there is a RewardBug here, at once.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import pydantic
import torch
from torch import Tensor

from flowrl.rewards.core import reward as core_reward
from flowrl.rewards.core.failures import Problem, RewardBug, RewardUnavailable
from flowrl.rewards.core.reward import forgetful
from flowrl.rewards.core.settings import Settings as Base
from flowrl.rewards.server import wire
from flowrl.rewards.server.addresses import address, token_of
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
from flowrl.rewards.server.journal import ScoreJournal, keys
from flowrl.rewards.server.pool import Place, Pool
from flowrl.runtime.registry import did_you_mean
from flowrl.runtime.text import printable
from flowrl.types import MediaContext

logger = logging.getLogger("flowrl")
R = TypeVar("R", bound=pydantic.BaseModel)
PAUSES = 0.1, 10.0  # seconds between tries: the first and the longest
MOST_REPLY = 2**24  # most bytes of a reply: 16 kB for each sample of the largest request
MOST_REFUSAL = 2**16  # most bytes of an answer that holds a sentence
MOST_SCALE = 2000  # most characters of a reward's scale
# beginning of a server's sentence about a reward that broke its contract, as _detail gives it
BUG = ": RewardBug: "


class Settings(Base):
    url: str | list[str] = pydantic.Field(
        description=(
            "Address of the server, as http://127.0.0.1:8321; env:NAME takes it from an"
            " environment variable, where it may hold a password. A list names servers of the same"
            " rewards, among which requests are balanced."
        )
    )
    reward: str | None = pydantic.Field(
        None, description="Which of the rewards served; null: their weighted total."
    )
    token_env: str | None = pydantic.Field(
        None, description="Environment variable that holds the server's token; null: it wants none."
    )
    pixels: Literal["exact", "bytes"] = pydantic.Field(
        "exact",
        description=(
            "How pixels are sent: as they are (exact), or rounded to the bytes of a saved PNG, a"
            " quarter of the size (bytes)."
        ),
    )
    batch: int = pydantic.Field(
        8,
        ge=1,
        description="Most samples in one request; whole groups where the reward compares a group.",
    )
    concurrency: int = pydantic.Field(4, ge=1, description="Most requests under way at once.")
    timeout: float = pydantic.Field(
        600.0, gt=0, description="Seconds that one request may take, to the last byte of its reply."
    )
    wait: float = pydantic.Field(
        300.0,
        ge=0,
        description=(
            "Seconds to keep trying a server that is away before the run stops; a start tries for 4"
            " at most."
        ),
    )
    journal: str | None = pydantic.Field(
        None, description="File that keeps the scores received, so that a resumed run has them."
    )

    @pydantic.field_validator("url")
    @classmethod
    def check_url(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, str):
            return address(value, "http://HOST:PORT")
        if len(set(value)) < max(1, len(value)):
            raise ValueError("write each address once")
        return [address(one, "http://HOST:PORT") for one in value]


class RequestRefused(Exception):
    """The server answers, and asking again would not help."""


@dataclass(kw_only=True, slots=True)
class PendingSamples:
    """The B samples of one call, with the scores and errors that are known so far."""

    media: Tensor  # (B, 3, H, W) or (B, F, 3, H, W), on CPU
    prompts: list[str]  # B prompts
    columns: dict[str, Any]  # columns that the reward needs
    keys: list[str]  # B keys in the journal; empty without a journal
    scores: list[float | None]  # B scores, None where the sample has none yet
    errors: dict[int, str] = field(default_factory=dict)  # sample -> why it failed
    # set when the call ends: no more requests are sent, and nothing is waited for
    over: threading.Event = field(default_factory=threading.Event)


class Remote(core_reward.Reward):
    """Asks a reward server; scale, needs, reads, reads_prompt and video are the server's.

    journal: a ScoreJournal, from the setting or the run's own. problem: why samples of the last
    call failed.
    """

    Settings = Settings
    name = "remote"
    networks = False
    scale = "as the server's reward states it"

    def __init__(self, settings: Any):
        super().__init__(settings)
        url = self.settings.url
        urls = [url] if isinstance(url, str) else url
        self.servers = Pool([self._client(url) for url in urls])
        self.journal = ScoreJournal(self.settings.journal) if self.settings.journal else None
        self.problem: str | None = None
        self.remembers = True
        try:
            abouts = [self._version(place) for place in self.servers.places]
            self.about = abouts[0].model_copy(
                update={
                    "max_mb": min(about.max_mb for about in abouts),
                    "max_samples": min(about.max_samples for about in abouts),
                }
            )
            self._adopt(self._chosen())
        except RequestRefused as error:
            raise ValueError(f"reward.remote.url={self.servers.where}: {error}") from None
        for place, about in zip(self.servers.places, abouts, strict=True):
            if about.version != self.about.version:
                raise ValueError(
                    f"reward.remote.url: {place.client.url} serves other rewards or settings than"
                    f" {self.servers.places[0].client.url}; serve the same on all of them"
                )

    def _client(self, url: str) -> Client:
        s = self.settings
        token = None if s.token_env is None else token_of(s.token_env)
        return Client(url, timeout=s.timeout, largest=MOST_REPLY, token=token, connect=10)

    def _version(self, place: Place) -> wire.About:
        """The description that a server gives of itself. A start asks for it, and does not wait as
        a run does."""
        try:
            with ending(AT_START) as over:
                answer = self._ask("GET", "/version", None, over, place)
        except Again as failure:
            raise self._unavailable(place.client.url, failure, AT_START) from None
        return self._read(wire.About, answer)

    def _adopt(self, served: wire.Served) -> None:
        """Take over the attributes that the server states for its reward."""
        self.scale = printable(served.scale, MOST_SCALE)
        self.reads_prompt, self.video = served.reads_prompt, served.video
        self.needs, self.reads = frozenset(served.needs), frozenset(served.reads)
        self.rounds = served.rounds or self.settings.pixels == "bytes"

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        call = self._begun(media.detach().cpu(), prompts, context)
        fetch = partial(self._fetch, call)
        _side_by_side(fetch, self._batches(call), self.settings.concurrency, call.over)
        first = min(call.errors, default=None)
        said = None if first is None else f"sample {first}: {call.errors[first]}"
        self.problem = Problem(said, {"error": len(call.errors)}) if said else None
        scores = [math.nan if score is None else score for score in call.scores]
        return torch.tensor(scores, dtype=torch.float32, device=media.device)

    def _begun(
        self, media: Tensor, prompts: list[str], context: MediaContext | None
    ) -> PendingSamples:
        """A call's samples, with the scores that the journal holds."""
        columns = wire.columns_of(context, self.needs)
        names: list[str] = []
        scores: list[float | None] = [None] * len(prompts)
        if self.journal is not None:
            s = self.settings
            names = keys(f"{self.about.version} {s.reward} {s.pixels}", media, prompts, columns)
            if self.remembers:
                scores = [self.journal.get(name) for name in names]
        return PendingSamples(
            media=media, prompts=prompts, columns=columns, keys=names, scores=scores
        )

    def _fetch(self, call: PendingSamples, rows: list[int]) -> None:
        """Ask for the scores of these rows and keep the answers."""
        answer = self._score(call, rows)
        scored = zip(rows, answer.scores, strict=True)
        found = {row: score for row, score in scored if score is not None}
        for row, score in found.items():
            call.scores[row] = score
        said = zip(rows, answer.errors, strict=True)
        call.errors.update({row: printable(error) for row, error in said if error})
        if self.journal is not None:
            self.journal.add({call.keys[row]: score for row, score in found.items()})

    def begin(self, run: Path) -> None:
        """Use the run's journal where none is set, so that a resumed iteration does not pay
        again."""
        self.journal = self.journal or ScoreJournal(run / "scores.jsonl")

    def uncached(self) -> AbstractContextManager[None]:
        """Inside this context every score is asked for, also where the journal holds one."""
        return forgetful(self)

    def _batches(self, call: PendingSamples) -> list[list[int]]:
        """Rows of each request: rows without a score, or the groups that have such rows."""
        units = [[row] for row, score in enumerate(call.scores) if score is None]
        if "group" in call.columns:
            group = call.columns["group"].tolist()
            open_groups = dict.fromkeys(group[row] for (row,) in units)
            units = [[i for i, g in enumerate(group) if g == chosen] for chosen in open_groups]
        most = self._most(call)
        batches: list[list[int]] = []
        for unit in units:
            if batches and len(batches[-1]) + len(unit) <= most:
                batches[-1] += unit
            else:
                batches.append(list(unit))
        return batches

    def _most(self, call: PendingSamples) -> int:
        """Most samples of one request, by the settings and by the server's limits."""
        columns = [column for name, column in call.columns.items() if name in wire.TENSORS]
        sample = sum(tensor[0].nbytes for tensor in (call.media, *columns))
        room = int(self.about.max_mb * 1e6 / (1.1 * sample))  # a tenth is left for the texts
        return max(1, min(self.settings.batch, self.about.max_samples, room))

    def _score(self, call: PendingSamples, rows: list[int]) -> wire.Answer:
        """The server's answer for these rows; one that cannot be used ends the call."""
        request = self._request(call, rows)
        tensors = {"media": wire.as_bytes(call.media[rows], rounds=self.rounds)}
        for name in call.columns.keys() & wire.TENSORS:
            tensors[name] = call.columns[name][rows]
        try:
            response = self._ask("POST", "/score", wire.pack(request, tensors), call.over)
            answer = self._read(wire.Answer, response)
            self._check(answer, request)
        except RequestRefused as error:
            call.over.set()
            raise RewardUnavailable(
                f"the reward server {self.servers.where} cannot be used: {error}; {self._resume()}"
            ) from None
        return answer

    def _request(self, call: PendingSamples, rows: list[int]) -> dict[str, Any]:
        """The JSON of a request for these rows."""
        request: dict[str, Any] = {
            "id": secrets.token_hex(8),
            "prompts": [call.prompts[row] for row in rows],
        }
        if "meta" in call.columns:
            request["meta"] = [call.columns["meta"][row] for row in rows]
            for meta in request["meta"]:
                wire.meta_text(meta)  # raises ValueError for values that JSON cannot hold
        if "group" in call.columns:
            request["group"] = call.columns["group"][rows].tolist()
        if self.settings.reward is not None:
            request["reward"] = self.settings.reward
        return request

    def _check(self, answer: wire.Answer, request: Mapping[str, Any]) -> None:
        """An answer to another request, or of another server -> RequestRefused."""
        expected, counts = len(request["prompts"]), {len(answer.scores), len(answer.errors)}
        if answer.id != request["id"] or counts != {expected}:
            raise RequestRefused(
                "it answered another request than the one it was asked"
                f" ({len(answer.scores)} scores for {expected})"
            )
        if answer.version != self.about.version:
            raise RequestRefused(
                "it now serves other rewards or settings than when this run started; serve the"
                " same again"
            )

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        over: threading.Event,
        place: Place | None = None,
    ) -> httpx.Response:
        """Ask until there is an answer, for `wait` seconds from the first failure on.

        over: set when the call ends; then Ended is raised. place: the server; None: any.
        """

        # Servers that were asked so far; `failed` names the last one.
        tried: list[Place] = []

        def once() -> httpx.Response:
            with self.servers.least_busy() if place is None else nullcontext(place) as chosen:
                tried.append(chosen)
                return self._once(chosen, method, path, body, over)

        def failed(failure: Again) -> None:
            self._gone(tried[-1], failure)

        try:
            return persist(once, over, pauses=PAUSES, seconds=self.patience, failed=failed)
        except Again as failure:
            if over.is_set():
                raise Ended from None
            over.set()
            where = self.servers.where if place is None else place.client.url
            raise self._unavailable(where, failure, self.patience) from None

    @property
    def patience(self) -> float:
        """Seconds to keep trying a server that is away."""
        wait = self.settings.wait
        return wait if hasattr(self, "about") else min(wait, AT_START / 2)

    def _unavailable(self, where: str, failure: Again, seconds: float) -> RewardUnavailable:
        return RewardUnavailable(
            f"the reward server {where} does not answer ({failure}; tried for {seconds:g} s):"
            f" {self._resume()}"
        )

    def _once(
        self, place: Place, method: str, path: str, body: bytes | None, over: threading.Event
    ) -> httpx.Response:
        try:
            response = place.client.fetch(method, path, body, over)
        except TooLong as failure:
            raise RequestRefused(f"{failure}, which no flowrl server sends") from None
        except Again:
            self.servers.pass_over(place)
            raise
        if not busy(response.status_code):
            if self.servers.answered(place):
                logger.warning(f"the reward server {place.client.url} answers again")
            return response
        said = _detail(response)
        if response.status_code == 500 and said.startswith(BUG):
            over.set()
            raise RewardBug(
                f"the reward that {place.client.url} serves has a fault: {said.removeprefix(BUG)}"
            )
        after = retry_after(response)
        self.servers.pass_over(place, after)
        others = len(self.servers.places) > 1
        raise Again(f"it answered {response.status_code}{said}", 0.0 if others else after)

    def _read(self, record: type[R], response: httpx.Response) -> R:
        """The record that an answer holds; anything else -> RequestRefused.

        A fault of the samples is a ValueError.
        """
        status = response.status_code
        if status in (401, 403):
            missing = "it wants a token; name the variable that holds it in token_env"
            raise RequestRefused("it wants another token" if self.settings.token_env else missing)
        if status == 422:
            raise ValueError(f"the reward server refused a request{_detail(response)}")
        if status != 200:
            raise RequestRefused(
                f"it answered {status}{_detail(response) or '; is it a flowrl server?'}"
            )
        try:
            return record.model_validate_json(response.content)
        except pydantic.ValidationError:
            raise RequestRefused(
                f"it answered what no flowrl server of protocol {wire.PROTOCOL} does:"
                f" {response.text[:60]!r}"
            ) from None

    def _chosen(self) -> wire.Served:
        if self.about.protocol != wire.PROTOCOL:
            raise RequestRefused(
                f"it speaks protocol {self.about.protocol}, this client {wire.PROTOCOL}; install"
                " one version of flowrl on both"
            )
        label = self.settings.reward
        if label is None:
            return self.about.total
        if label not in self.about.rewards:
            raise RequestRefused(
                f'it does not serve "{label}"{did_you_mean(label, self.about.rewards)}'
            )
        return self.about.rewards[label]

    def _gone(self, place: Place, failure: Again) -> None:
        if place.away:
            return
        place.away = True
        others = len(self.servers.places) > 1
        meanwhile = "; others are asked meanwhile, and it again" if others else "; trying again"
        logger.warning(
            f"the reward server {place.client.url} does not answer ({failure}){meanwhile}"
            f" for {self.patience:g} s"
        )

    def _resume(self) -> str:
        if not hasattr(self, "about"):
            return "start it with `flowrl serve REWARD`, or correct reward.remote.url"
        return "start it with `flowrl serve`, then resume the run; no sample was counted as failed"


def _side_by_side(
    fetch: Callable[[list[int]], None], batches: list[list[int]], most: int, over: threading.Event
) -> None:
    """Call fetch(rows) for all batches, `most` at once.

    over: set by a fetch that gives up for all; the others then end with Ended. An exception in this
    thread, such as that of a signal, waits for none of them.
    """
    if len(batches) < 2:
        for rows in batches:
            fetch(rows)
        return

    def job(rows: list[int]) -> None:
        # after `over` another fetch has raised the reason
        with suppress(Ended):
            if not over.is_set():
                fetch(rows)

    pool = ThreadPoolExecutor(min(most, len(batches)), thread_name_prefix="remote")
    try:
        futures = [pool.submit(job, rows) for rows in batches]
        wait(futures)
        for future in futures:
            future.result()
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _detail(response: httpx.Response) -> str:
    """The server's own sentence after ": ", if it sent one."""
    if len(response.content) > MOST_REFUSAL:
        return ""
    try:
        return f": {printable(response.json()['detail'])}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


REWARD = Remote
