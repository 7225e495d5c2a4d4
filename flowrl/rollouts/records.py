"""The records of a draw: where samples come from, and what was drawn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from torch import Tensor

from flowrl.config.schema import Config
from flowrl.data.prompts import Prompts
from flowrl.data.scored_dataset import Dataset
from flowrl.policy import Policy
from flowrl.rewards import RewardSet
from flowrl.rollouts.choose import Chooser
from flowrl.rollouts.judge import GradientScorer
from flowrl.rollouts.replay_buffer import ReplayBuffer
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.processes.world import World
from flowrl.types import Plan, PromptBatch, Rewards, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the samples of a run come from, and who scores them."""

    cfg: Config
    world: World
    ledger: Ledger
    prompts: Prompts
    chooser: Chooser  # which of them an iteration sees
    dataset: Dataset | None  # what is trained on in place of samples
    references: bool  # whether prompts name images that join their groups
    policy: Policy
    view: str  # which weights sample
    guidance: float | str
    autocast: Callable[[], AbstractContextManager[object]]
    rewards: RewardSet
    buffer: ReplayBuffer  # old samples that are trained again
    # of an iteration, for prompts that are helped by data.sampler.help.steps
    helped_plan: Callable[[int], Plan] | None = None
    column: str | None = None  # of prompts: texts that are sampled in place of their own
    climbed: RewardSet | None = None  # of an iteration: those with mode=grad, where there are any

    def at(self, iteration: int) -> Source:
        """The same, with the weights and thresholds that rewards have in an iteration."""
        now = self.rewards.at(iteration)
        return replace(
            self, rewards=now.credited(), climbed=now.climbed() if now.climbers else None
        )

    def asked(self, batch: PromptBatch) -> PromptBatch:
        """Prompts with the texts of `column`, their own where it is empty."""
        assert self.column is not None
        pairs = zip(batch.text, batch.meta, strict=True)
        return replace(batch, text=[meta.get(self.column) or own for own, meta in pairs])

    def judge(self, batch: PromptBatch) -> GradientScorer:
        """The rewards of samples of these prompts, as a function that can be climbed."""
        climbed = self.rewards if self.climbed is None else self.climbed
        return GradientScorer(policy=self.policy, rewards=climbed, batch=batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The samples of an iteration on this process, and which of them are trained."""

    batch: PromptBatch
    rollout: Rollout
    rewards: Rewards
    shown: Tensor  # media of the first samples, SHOWN of them or more; empty for those from files
    threshold: float | None = None  # draw.mode=balance: what a good sample's reward exceeds
