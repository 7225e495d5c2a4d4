"""The records of a draw: where samples come from, and what was drawn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from torch import Tensor

from flowrl.config.schema import Config
from flowrl.data import conditions
from flowrl.data.prompts import Prompts
from flowrl.data.scored_dataset import Dataset
from flowrl.policy import Cond, Policy
from flowrl.rewards import RewardSet
from flowrl.rollouts.choose import Chooser
from flowrl.rollouts.gradient_scorer import GradientScorer
from flowrl.rollouts.latent_cache import LatentCache
from flowrl.rollouts.replay_buffer import ReplayBuffer
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.processes.world import World
from flowrl.types import Plan, PromptBatch, Rewards, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of a run's samples and of their scores."""

    cfg: Config  # every setting of the run
    world: World  # the processes that share the prompts of an iteration
    ledger: Ledger  # ledger in which time, network calls and memory are booked
    prompts: Prompts  # all prompts to train on
    chooser: Chooser  # chooses the prompts that an iteration sees
    dataset: Dataset | None  # a scored folder that takes the place of samples; None: they are drawn
    references: bool  # whether prompts name images that join their groups
    policy: Policy  # the model that samples and is trained
    view: str  # view of the policy's weights that samples: "default" or "old"
    guidance: float | str  # guidance of the samples: "pipeline", "none" or a number
    autocast: Callable[[], AbstractContextManager[object]]  # the context in which networks run
    rewards: RewardSet  # rewards that score samples; in an iteration, those that give advantages
    buffer: ReplayBuffer | None  # old samples that are trained again; None without replay.size
    # iteration -> plan of the prompts that are helped by more steps; None: no prompt is
    helped_plan: Callable[[int], Plan] | None = None
    # column of the prompts whose texts replace their own in sampling; None: no column does
    column: str | None = None
    # (source, iteration, number for each prompt, plan) -> media to train beside samples, see
    # data_stream.py; None: there are none
    draw_media: Callable[[Source, int, int, Plan], Rollout] | None = None
    latents: LatentCache | None = None  # encoded media on disk; None: they are not kept
    # rewards with mode=grad that count in an iteration; None: there are none
    climbed: RewardSet | None = None

    def at(self, iteration: int) -> Source:
        """This source with the weights and thresholds that rewards have in an iteration."""
        now = self.rewards.at(iteration)
        return replace(
            self, rewards=now.credited(), climbed=now.climbed() if now.climbers else None
        )

    def encode(self, batch: PromptBatch) -> Cond:
        """Encode prompts again, for a rollout that was put together; booked with the rollouts."""
        with self.ledger.phase("rollout"), self.autocast():
            return self.policy.encode(batch.text, conditions.of(batch.meta))

    def with_helpful_texts(self, batch: PromptBatch) -> PromptBatch:
        """Prompts with the texts of `column`, or their own where it is empty."""
        assert self.column is not None
        pairs = zip(batch.text, batch.meta, strict=True)
        return replace(batch, text=[meta.get(self.column) or text for text, meta in pairs])

    def reward_of(self, batch: PromptBatch) -> GradientScorer:
        """The reward of samples of these prompts as a function whose gradient can be climbed."""
        climbed = self.rewards if self.climbed is None else self.climbed
        return GradientScorer(policy=self.policy, rewards=climbed, batch=batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The samples of an iteration on this process, with their rewards."""

    batch: PromptBatch  # the P prompts of this process
    rollout: Rollout  # B samples in P groups, and the states that led to them
    rewards: Rewards  # (B,) scores of the samples
    # media of the first samples, at least SHOWN of them; empty for samples from files
    shown: Tensor
    # (P,) fp32 reward that a good sample of each prompt exceeds (draw.mode=balance), by which
    # trained samples are chosen
    threshold: Tensor | None = None
