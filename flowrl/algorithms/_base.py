"""What the training loop asks of an algorithm, which owns no loop, no optimizer and no state: all is a function of its arguments.

A plugin is a module of this package with `ALGORITHM`, a subclass of Algorithm ("_" starts the names of shared parts). One iteration:

    plan = algorithm.plan(sigmas, ...)                     which edges are walked, which are trained
    leaf = algorithm.leaf_advantages(rewards, group)       rewards of the whole iteration, over all processes
    advantages = algorithm.advantages(rollout, leaf)       credit of each leaf and each transition
    rows = algorithm.columns(rollout, advantages, ...)     what is trained: one row per term of the loss
    scores = algorithm.score(policy, rollout, rows)        differentiable numbers (n,): the only part that calls the network
    loss = algorithm.loss(scores, rows)                    pure; summed over rows
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from flowrl.types import Advantages, Columns, LossOutput, Plan, Rewards, Rollout


class Options(BaseModel):
    """Base of every algorithm's Config: unknown keys are errors, values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Sampler(Protocol):
    """The part of the sampler's settings that shapes a plan."""

    eta: float
    init_noise: Literal["sample", "group", "batch"]


class Algorithm:
    """One instance a run; holds its config and nothing else."""

    Config: ClassVar[type[Options]] = Options
    needs: frozenset[str] = frozenset()  # of "log_prob" | "leaves" | "reference" | "old"
    couples: ClassVar[Literal["row", "sample", "group"]] = "row"  # what one term of the loss joins
    rollout_view: ClassVar[Literal["default", "old"]] = "default"  # which weights sample
    guidance: ClassVar[Literal["none"] | None] = None  # of the rollout; None: the sampler's setting

    def __init__(self, config: Any):
        self.config = config

    def plan(self, sigmas: Tensor, *, sampler: Sampler, iteration: int, seed: int) -> Plan:
        """Sampling plan of an iteration: sigmas (T+1,) fp64, descending."""
        raise NotImplementedError

    def check(self, plan: Plan) -> None:
        """ValueError, saying which setting to change, when the plan cannot serve."""

    def rows_per_copy(self, plan: Plan) -> int:
        """Rows of the loss that one copy of the plan gives at most; told to the user before a run."""
        return int(plan.trained.sum())

    def leaf_advantages(self, rewards: Rewards, group: Tensor) -> Tensor:
        """(B,) fp32 from the rewards and groups of the whole iteration, over all processes."""
        raise NotImplementedError

    def advantages(self, rollout: Rollout, leaf: Tensor) -> Advantages:
        """Credit of this process's leaves and transitions from its leaf advantages (B,)."""
        return Advantages(leaf=leaf)

    def columns(self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int) -> Columns:
        """Rows with a signal; at least "prompt" (n,), row of cond, and "weight" (n,) fp32."""
        raise NotImplementedError

    def network_rows(self, batch: Columns) -> Tensor:
        """(n,) int64: rows of the batch with equal values share one row of the network's forward."""
        return torch.arange(len(batch), device=batch.weight.device)

    def score(self, policy: Any, rollout: Rollout, batch: Columns) -> dict[str, Tensor]:
        """Named (n,) fp32 numbers, differentiable in the policy's weights."""
        raise NotImplementedError

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        """Sum over rows of weight * term; metrics are summed likewise. The caller divides both by the weight of the update."""
        raise NotImplementedError

    def old_decay(self, step: int) -> float | None:
        """d of old <- d old + (1 - d) theta after an iteration that ended at optimizer step `step`; None: there is no old policy."""
        return None
