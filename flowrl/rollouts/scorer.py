"""Leaves become media, and media become rewards, chunk by chunk: no iteration holds all its media."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from flowrl.policy import Policy
from flowrl.rewards import RewardSet, concat, score
from flowrl.runtime.ledger import Ledger
from flowrl.types import MediaContext, PromptBatch, Rewards, Rollout

SHOWN = 8  # samples whose media are kept, for the log


def decode_into(
    scorer: Scorer, policy: Policy, rollout: Rollout, batch: PromptBatch, *, decode: int
) -> Tensor:
    """Decode all leaves into the scorer -> media of the first chunks, SHOWN samples or more."""
    first: list[Tensor] = []
    sigma = rollout.state_sigma[rollout.leaf]
    chunks = media_of(policy, rollout.leaves, sigma, decode=decode, ledger=scorer.ledger)
    for rows, media in chunks:
        scorer.add(media, batch, rollout.group[rows])
        if sum(map(len, first)) < SHOWN:
            first.append(media.cpu())
    scorer.finish_groups()
    return torch.cat(first)


@torch.no_grad()
def media_of(
    policy: Policy, x: Tensor, sigma: Tensor, *, decode: int, ledger: Ledger
) -> Iterator[tuple[slice, Tensor]]:
    """Final states x (B, *L), all at one sigma (B,), decoded in chunks -> (rows, media)."""
    assert bool((sigma == sigma[0]).all())
    for i in range(0, len(x), decode):
        rows = slice(i, min(i + decode, len(x)))
        with ledger.phase("decode"), ledger.work("vae"):
            media = policy.decode(x[rows], float(sigma[0]))
        yield rows, media


class Scorer:
    """Scores media in the order they come: at once, or with overlap in a thread of its own.

    A reward that compares the members of a group sees whole groups: media come group by group, and
    those of an unfinished group wait. Scores are the same with and without overlap; time/reward is
    what the caller waited, time/reward_hidden what it did not.
    """

    AHEAD = 2  # chunks that may wait for the thread: bounds memory

    def __init__(self, rewards: RewardSet, ledger: Ledger, *, overlap: bool = False) -> None:
        self.rewards, self.ledger = rewards, ledger
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="reward") if overlap else None
        self.whole_groups = "group" in rewards.needs
        self.waiting: tuple[Tensor, PromptBatch, Tensor] | None = None
        self.parts: list[Rewards] = []
        self.pending: deque[Future[tuple[Rewards, float]]] = deque()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *error: object) -> None:
        if self.thread is not None:
            self.thread.shutdown(wait=True, cancel_futures=True)

    def add(self, media: Tensor, batch: PromptBatch, group: Tensor) -> None:
        """Media of samples whose prompts are rows `group` of batch.

        Call `finish_groups` before the first media of another batch.
        """
        if self.waiting is not None:
            media = torch.cat([self.waiting[0], media])
            group = torch.cat([self.waiting[2], group])
            self.waiting = None
        ready = len(group)
        if self.whole_groups:  # the newest group may go on
            ready = int((group == group[-1]).nonzero()[0])
        if ready < len(group):
            self.waiting = (media[ready:], batch, group[ready:])
        if ready:
            self._start(media[:ready], batch, group[:ready])

    def finish_groups(self) -> None:
        """No more members of the last group will come."""
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            self._start(*waiting)

    def scores(self) -> Rewards:
        """Rewards of all media, in order."""
        while self.pending:
            self._take_finished()
        return concat(self.parts)

    def _start(self, media: Tensor, batch: PromptBatch, group: Tensor) -> None:
        members = group.tolist()
        texts = [batch.text[g] for g in members]
        context = MediaContext(meta=[batch.meta[g] for g in members], group=group)
        if self.thread is None:
            with self.ledger.phase("reward"), self.ledger.work("reward"):
                self.parts.append(score(media, texts, self.rewards, context))
            return
        while len(self.pending) >= self.AHEAD:
            self._take_finished()
        self.pending.append(self.thread.submit(_timed, media, texts, self.rewards, context))

    def _take_finished(self) -> None:
        """Wait for the oldest chunk; what the thread took beyond the wait is booked as hidden."""
        began = time.perf_counter()
        with self.ledger.phase("reward"), self.ledger.work("reward"):
            rewards, seconds = self.pending.popleft().result()
        self.ledger.add_time("reward_hidden", max(0.0, seconds - (time.perf_counter() - began)))
        self.parts.append(rewards)


def _timed(
    media: Tensor, texts: list[str], rewards: RewardSet, context: MediaContext
) -> tuple[Rewards, float]:
    began = time.perf_counter()
    return score(media, texts, rewards, context), time.perf_counter() - began
