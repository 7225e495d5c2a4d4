"""The work of a reward server: it checks, unpacks, joins and scores requests.

One thread scores, because rewards need not be safe in several. Requests that wait together, with
media of one size and without a column "group", are scored as one batch of at most `max_batch`
samples: batch mates do not change a score, but for the last bits of a network's sums, and
max_batch=1 keeps every request to itself. A failure in one request stays in that request.

This file imports neither diffusers nor transformers, so that an environment with other versions of
them, or none, can serve.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pydantic
import torch
from torch import Tensor

from flowrl import __version__
from flowrl.rewards import RewardSet, RewardUnavailable, score
from flowrl.rewards.core.score import (
    check_columns,
    check_context,
    check_kind,
    check_media,
    given_columns,
    take,
)
from flowrl.rewards.server import wire
from flowrl.rewards.server.json_weight import weigh
from flowrl.rewards.server.room import Room
from flowrl.runtime.registry import did_you_mean
from flowrl.types import MediaContext, Rewards

JSON: pydantic.TypeAdapter[object] = pydantic.TypeAdapter(object)
# most keys of a request, or of one of its tensors; each unknown key is an error of its own
MOST_KEYS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """One request of B samples, unpacked."""

    id: str  # the client's id, which the answer repeats
    reward: str | None  # label of the reward; None: the weighted total
    media: Tensor  # (B, 3, H, W) or (B, F, 3, H, W) fp32
    prompts: list[str]  # B prompts
    context: MediaContext  # columns that came with the request
    future: Future[wire.Answer] = field(default_factory=Future)  # answer to the request

    @property
    def kind(self) -> tuple:
        """Jobs of one kind may share a batch."""
        tensors = [(name, getattr(self.context, name)) for name in wire.TENSORS]
        shapes = [
            (name, column.dtype, column.shape[1:]) for name, column in tensors if column is not None
        ]
        absent = self.context.meta is None, self.context.group is None
        return self.reward, self.media.shape[1:], *absent, *shapes

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        columns = [getattr(self.context, name) for name in wire.TENSORS]
        return sum(tensor.nbytes for tensor in (self.media, *columns) if tensor is not None)


class Service:
    """The service that the routes call: checks of size, and one thread that scores.

    max_mb: most megabytes of a request, as it comes and unpacked. All requests together keep at
    most twice as much: an eighth of max_mb for a batch that is joined from several, the rest for
    themselves (`room`). max_batch: most samples scored at once.
    """

    def __init__(
        self, rewards: RewardSet, *, max_mb: float, max_batch: int, device: str | None = None
    ):
        self.device = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.rewards = rewards.to(self.device)
        self.max_mb, self.max_batch = max_mb, max_batch
        self.about = wire.about(
            rewards.rewards,
            rewards.weights,
            flowrl=__version__,
            max_mb=max_mb,
        )
        self.limit = max_mb * 1e6
        self.joined = self.limit / 8  # most bytes of a batch of several requests
        self.room = Room(2 * self.limit - self.joined)
        # only 2 threads: each may need scratch memory, and the interpreter runs one at a time
        self.readers = ThreadPoolExecutor(2, thread_name_prefix="reading")
        self.scored = 0
        self.jobs: deque[Job] = deque()
        self.changed, self.closed = threading.Condition(), False
        self.thread = threading.Thread(target=self._work, name="scoring", daemon=True)
        self.thread.start()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.thread.join()
        self.readers.shutdown(wait=False, cancel_futures=True)

    def check_size(self, size: float, what: str) -> None:
        if size > self.limit:
            raise wire.TooLarge(
                f"a request may have {self.max_mb:g} MB, and this one has {size / 1e6:.1f} MB"
                f" {what}; send fewer samples at once, or serve with a larger --max-mb"
            )

    def weigh(self, text: bytes, file: bytes) -> int:
        """Memory that JSON and tensors take when they are read; too much -> TooLarge."""
        weight = weigh(text)
        self.check_size(weight, "of JSON in memory")
        return weight + len(file)

    def read(self, text: bytes, file: bytes, weight: int) -> wire.ScoreRequest:
        """Read the request in a body, with its sizes checked and no picture unpacked yet."""
        question = _question(text, file)
        if len(question.prompts) > wire.MAX_SAMPLES:
            raise wire.TooLarge(
                f"a request may have {wire.MAX_SAMPLES} samples, and this one has"
                f" {len(question.prompts)}; send several"
            )
        self.check_size(question.nbytes, "unpacked")
        self.check_size((weight + question.nbytes + question.scratch) / 2, "unpacked")
        return question

    def job(self, question: wire.ScoreRequest) -> Job:
        """Unpack a request and check that the rewards can take it."""
        rewards, prompts = self._chosen(question.reward), question.prompts
        context = MediaContext(**_columns(question))
        check_context(context, len(prompts))
        media = check_media(wire.unpack_media(question.media), prompts)
        check_columns(rewards, given_columns(context))
        check_kind(rewards.rewards, media, prompts)
        return Job(
            id=question.id, reward=question.reward, media=media, prompts=prompts, context=context
        )

    def submit(self, job: Job) -> Future[wire.Answer]:
        with self.changed:
            self.jobs.append(job)
            self.changed.notify()
        return job.future

    def _chosen(self, label: str | None) -> RewardSet:
        if label is None:
            return self.rewards
        if label not in self.rewards.rewards:
            raise ValueError(
                f'reward "{label}" is not served{did_you_mean(label, self.rewards.rewards)}'
            )
        return RewardSet(rewards={label: self.rewards.rewards[label]}, weights={label: 1.0})

    def _work(self) -> None:
        while batch := self._next():
            self._answer([job for job in batch if job.future.set_running_or_notify_cancel()])

    def _next(self) -> list[Job]:
        """The job that waited longest and others that can share its batch; []: closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.jobs or self.closed)
            if self.closed:
                return []
            first = self.jobs.popleft()
            batch, size = [first], len(first.prompts)
            if first.context.group is not None:
                return batch
            nbytes = first.nbytes
            for job in [job for job in self.jobs if job.kind == first.kind]:
                more = len(job.prompts), job.nbytes
                if size + more[0] <= self.max_batch and nbytes + more[1] <= self.joined:
                    self.jobs.remove(job)
                    batch.append(job)
                    size, nbytes = size + more[0], nbytes + more[1]
            return batch

    def _answer(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        try:
            answers = self._score(jobs)
        except Exception as error:  # the requests get the error, and the thread must live
            if len(jobs) == 1:
                jobs[0].future.set_exception(error)
                return
            for job in jobs:
                self._answer([job])
            return
        for job, answer in zip(jobs, answers, strict=True):
            job.future.set_result(answer)

    def _score(self, jobs: list[Job]) -> list[wire.Answer]:
        """Score jobs of one kind as one batch -> an answer for each."""
        rewards = self._chosen(jobs[0].reward)
        media = torch.cat([job.media for job in jobs])
        prompts = [prompt for job in jobs for prompt in job.prompts]
        context = _joined([job.context for job in jobs])
        whole = score(media.to(self.device), prompts, rewards, context)
        self.scored += len(prompts)
        errors = self._errors(whole, rewards, media, prompts, context)
        ends = list(itertools.accumulate(len(job.prompts) for job in jobs))
        starts = [0, *ends[:-1]]
        return [
            self._part(job, whole, errors, slice(start, end))
            for job, start, end in zip(jobs, starts, ends, strict=True)
        ]

    def _errors(
        self,
        whole: Rewards,
        rewards: RewardSet,
        media: Tensor,
        prompts: list[str],
        context: MediaContext,
    ) -> list[str | None]:
        """Why each sample failed, None where it did not: each is scored alone for its own error."""
        errors: list[str | None] = [None] * len(prompts)
        failed = whole.unscored.nonzero().flatten().tolist()
        for i in failed:
            alone = whole
            if context.group is None and len(prompts) > 1:
                sample, row = media[i : i + 1].to(self.device), take(context, torch.tensor([i]))
                try:
                    alone = score(sample, prompts[i : i + 1], rewards, row)
                except RewardUnavailable:
                    # the reward's server is there if the reward answered for another sample
                    if len(failed) == len(prompts):
                        raise
            errors[i] = "; ".join(alone.errors) or "it failed once, and not when it was tried again"
        return errors

    def _part(self, job: Job, whole: Rewards, errors: list[str | None], rows: slice) -> wire.Answer:
        """One job's rows of a batch."""
        return wire.Answer(
            id=job.id,
            version=self.about.version,
            scores=_plain(whole.total[rows]),
            parts={label: _plain(column[rows]) for label, column in whole.raw.items()},
            errors=errors[rows],
        )


def _columns(question: wire.ScoreRequest) -> dict[str, Any]:
    """The columns of a MediaContext, None for those that were not sent."""
    columns: dict[str, Any] = {"meta": question.meta}
    for name in wire.TENSORS:
        record = getattr(question, name)
        columns[name] = None if record is None else wire.unpack(record)
    columns["group"] = None if question.group is None else torch.tensor(question.group)
    return columns


def _joined(contexts: list[MediaContext]) -> MediaContext:
    """The columns of jobs of one kind, one after the other."""
    first = contexts[0]
    tensors = {
        name: torch.cat([getattr(c, name) for c in contexts])
        for name in wire.TENSORS
        if getattr(first, name) is not None
    }
    return MediaContext(
        meta=None if first.meta is None else [row for c in contexts for row in c.meta or []],
        group=first.group,
        **tensors,
    )


def _plain(column: Tensor) -> list[float | None]:
    """Numbers as JSON takes them: None for NaN."""
    return [value if value == value else None for value in column.tolist()]


def _question(text: bytes, file: bytes) -> wire.ScoreRequest:
    """Make the record of JSON and a safetensors file.

    The JSON is parsed first: a text is then held once, not for each record that it may belong to.
    """
    try:
        found = JSON.validate_json(text)
    except pydantic.ValidationError as error:
        raise ValueError(f"the body is not JSON: {error.errors()[0]['msg']}") from None
    if not isinstance(found, dict):
        raise ValueError("the body: input should be an object")
    records = [found, *(found.get(name) for name in ("media", *wire.TENSORS))]
    if any(isinstance(record, dict) and len(record) > MOST_KEYS for record in records):
        raise ValueError("the body has more keys than a request may have")
    tensors = wire.tensors_of(file) if file else {}
    try:
        return wire.ScoreRequest.model_validate(found | tensors)
    except pydantic.ValidationError as error:
        said = _sentence(error)
    raise ValueError(said)  # raised without the pydantic error, which holds the whole request


def _sentence(error: pydantic.ValidationError) -> str:
    """The first problem of a request."""
    problem = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    said = problem["msg"][:1].lower() + problem["msg"][1:]
    if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
        return f'unknown key "{place}"{did_you_mean(place, wire.ScoreRequest.model_fields)}'
    if problem["loc"] and problem["loc"][0] in ("media", *wire.TENSORS):
        return (
            f'{problem["loc"][0]} should be {{"png": [...]}}, or a tensor behind the JSON, see'
            " docs/rewards/serving.md"
        )
    return f"{place or 'the body'}: {said}"


def _device(name: str) -> torch.device:
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={name} cannot be used: {str(error).splitlines()[0]}") from None
