"""Leaves become media, and media become scores, chunk by chunk."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from flowrl.policy import Policy
from flowrl.rewards import RewardSet, concat, score
from flowrl.rollouts.roll_out import SHOWN
from flowrl.rollouts.velocity import media_of
from flowrl.runtime.ledger import Ledger
from flowrl.types import MediaContext, PromptBatch, Rewards, Rollout


def decode_into(
    scorer: Scorer,
    policy: Policy,
    rollout: Rollout,
    batch: PromptBatch,
    *,
    decode: int,
    ledger: Ledger,
) -> Tensor:
    """Decode all leaves and hand them to the scorer, which drops them, chunk by chunk -> the first
    chunks, SHOWN samples or more."""
    first: list[Tensor] = []
    for rows, media in media_of(
        policy, rollout.leaves, rollout.state_sigma[rollout.leaf], decode=decode, ledger=ledger
    ):
        scorer.add(media, batch, rollout.group[rows])
        first += [media.cpu()] if sum(map(len, first)) < SHOWN else []
    scorer.finish_groups()
    return torch.cat(first)


class Scorer:
    """Scores decoded media in the order they come: at once, or with overlap in a thread of its own,
    while the caller samples on.

    A reward that compares the members of a group sees whole groups: media come group by group, and
    those of an unfinished one wait. Results are the same with and without overlap; time/reward is
    what the caller waited, time/reward_hidden what it did not.
    """

    AHEAD = 2  # chunks that may wait for the thread: bounds memory

    def __init__(self, rewards: RewardSet, ledger: Ledger, *, overlap: bool = False) -> None:
        self.rewards, self.ledger = rewards, ledger
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="reward") if overlap else None
        self.whole_groups = "group" in rewards.needs
        self.waiting: tuple[Tensor, PromptBatch, Tensor] | None = None
        self.parts: list[Rewards] = []
        self.pending: deque[Future[tuple[Rewards, float]]] = deque()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)

    def add(self, media: Tensor, batch: PromptBatch, group: Tensor) -> None:
        """media of samples whose prompts are rows `group` of batch; not the same batch as before:
        after `finish_groups`."""
        if self.waiting is not None:
            media, group = torch.cat([self.waiting[0], media]), torch.cat([self.waiting[2], group])
            self.waiting = None
        ready = (
            int((group == group[-1]).nonzero()[0]) if self.whole_groups else len(group)
        )  # the newest group may go on
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
        """All of them, in order."""
        while self.pending:
            self._collect()
        return concat(self.parts)

    def _start(self, media: Tensor, batch: PromptBatch, group: Tensor) -> None:
        members = group.tolist()
        texts = [batch.text[g] for g in members]
        context = MediaContext(meta=[batch.meta[g] for g in members], group=group)
        if self.pool is None:
            with self.ledger.phase("reward"), self.ledger.work("reward"):
                self.parts.append(score(media, texts, self.rewards, context))
            return
        while len(self.pending) >= self.AHEAD:
            self._collect()
        self.pending.append(self.pool.submit(_timed, media, texts, self.rewards, context))

    def _collect(self) -> None:
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
