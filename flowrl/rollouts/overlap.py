"""Scoring in a thread of its own, while the caller samples on (batch.overlap).

Scores are those of the plain scorer. time/reward is the time that the caller waited for them, and
time/reward_hidden the time of scoring that passed while the caller sampled.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from flowrl.rewards import RewardSet
from flowrl.rewards.core.score import check_media, score_with
from flowrl.rollouts.scorer import Scorer
from flowrl.runtime.ledger import Ledger
from flowrl.types import MediaContext, Rewards


class OverlappedScorer(Scorer):
    """A Scorer whose rewards run beside the caller."""

    AHEAD = 2  # most chunks that wait for the thread, which bounds memory

    def __init__(self, rewards: RewardSet, ledger: Ledger) -> None:
        super().__init__(rewards, ledger)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="reward")
        self.pending: deque[Future[tuple[Rewards, float]]] = deque()

    def score(self, media: Tensor, texts: list[str], context: MediaContext) -> None:
        while len(self.pending) >= self.AHEAD:
            self.take_finished()
        self.pending.append(self.thread.submit(_timed, media, texts, self.rewards, context))

    def scores(self) -> Rewards:
        while self.pending:
            self.take_finished()
        return super().scores()

    def take_finished(self) -> None:
        """Wait for the oldest chunk, and book the rest of its time in the thread as hidden."""
        began = time.perf_counter()
        with self.ledger.phase("reward"), self.ledger.work("reward"):
            rewards, seconds = self.pending.popleft().result()
        self.ledger.add_time("reward_hidden", max(0.0, seconds - (time.perf_counter() - began)))
        self.parts.append(rewards)

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)  # after a success the thread is idle


def _timed(
    media: Tensor, texts: list[str], rewards: RewardSet, context: MediaContext
) -> tuple[Rewards, float]:
    """Score media -> (their rewards, the seconds that it took)."""
    began = time.perf_counter()
    scored = score_with(rewards, check_media(media, texts), texts, context)
    return scored, time.perf_counter() - began
