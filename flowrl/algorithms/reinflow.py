"""ReinFlow (arXiv:2505.22094): the noise of each sampling step is learned beside the velocity.

    x' ~ N(x + (s' - s) v(x, s), diag std(s, prompt)^2)      every step, the last one too

std comes from a small network, bounded, one number a channel. The likelihood of a trajectory is
then exact with as few as one step, and GRPO's clipped ratio trains both networks. Evaluation is the
ODE and leaves the noise out. entropy_clip: entropy-ratio clipping (arXiv:2512.05591).

docs/algorithms/reinflow.md says how it differs from the paper and its code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from torch import Tensor

from flowrl.algorithms import grpo
from flowrl.algorithms.common import base, transitions
from flowrl.algorithms.common.transition_config import is_learned, known_sde
from flowrl.runtime.rule import read_with
from flowrl.types import Advantages, Columns, LossOutput, Plan, Rollout, Transition


class ReinFlowConfig(grpo.GRPOConfig):
    learns_noise: ClassVar[bool] = True

    sde: Annotated[str, AfterValidator(known_sde)] = Field(
        "learned", description="The SDE step: learned, or one of your own that takes a learned std."
    )
    noise: tuple[PositiveFloat, PositiveFloat] = Field(
        (0.1, 0.24),
        description="Smallest and largest standard deviation of a step, in units of the latents.",
    )
    hold: NonNegativeInt | None = Field(
        None, description="Iterations before the upper bound falls; none: it stays."
    )
    fall: Annotated[PositiveInt, read_with("algorithm.hold")] = Field(
        100, description="Iterations in which the upper bound falls, along a cosine."
    )
    floor: Annotated[float, read_with("algorithm.hold")] = Field(
        0.7, ge=0, le=1, description="Share of the range of the noise that is left after the fall."
    )
    entropy_weight: NonNegativeFloat = Field(
        0.0, description="Weight with which the loss raises the entropy of the steps; 0: none."
    )
    entropy_clip: tuple[PositiveFloat, PositiveFloat] | None = Field(
        None,
        description=(
            "Rows whose std is outside 1 - first .. 1 + second times the old std give no gradient;"
            " none: all rows give one."
        ),
    )

    @model_validator(mode="after")
    def check_noise(self) -> ReinFlowConfig:
        least, most = self.noise
        if least >= most:
            raise ValueError(
                f"algorithm.noise={list(self.noise)} should be the least and then the most standard"
                " deviation of a step, such as [0.1, 0.24]"
            )
        if not is_learned(self.sde):
            raise ValueError(
                f"algorithm.sde={self.sde} has noise of a fixed size, whose entropy nothing can"
                " change; reinflow trains it: use sde=learned, or another method, as flow_grpo"
            )
        if self.ratio == "guard" or self.step_weight == "noise":
            option = "ratio=guard" if self.ratio == "guard" else "step_weight=noise"
            raise ValueError(
                f"algorithm.{option} reads the size of a step's noise off the schedule, and here"
                " it is learned; leave it out"
            )
        if self.entropy_clip is not None and self.tree.correlation is not None:
            raise ValueError(
                "algorithm.entropy_clip reads each step's own noise, which tree.correlation mixes"
                " with its siblings'; leave one of the two out"
            )
        return self


@dataclass(slots=True)
class Bounded:
    """The sampler's settings that a plan reads, with the learned noise's bound in place of eta."""

    eta: float  # upper bound of the noise of a step, in units of the latents
    init_noise: Any  # see sampler.init_noise


class ReinFlow(grpo.GRPO):
    Config = ReinFlowConfig
    config: ReinFlowConfig

    @property
    def heads(self) -> dict[str, dict[str, Any]]:
        return {"step_noise": {"least": self.config.noise[0]}}

    def plan(self, sigmas: Tensor, *, sampler: base.Sampler, iteration: int, seed: int) -> Plan:
        own = Bounded(self.most(iteration), sampler.init_noise)
        return super().plan(sigmas, sampler=own, iteration=iteration, seed=seed)

    def most(self, iteration: int) -> float:
        """Upper bound of the noise in an iteration: held, then along a cosine to its floor."""
        c, (least, most) = self.config, self.config.noise
        if c.hold is None:
            return most
        end = least + c.floor * (most - least)
        done = min(1.0, max(0, iteration - c.hold) / c.fall)
        return end + (most - end) * 0.5 * (1 + math.cos(math.pi * done))

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        """Add log_std (n,) of the rollout, with entropy_clip. It follows from the stored log-prob
        and the noise that made the step: log p = -mean(noise^2) / 2 - log_std - log(2 pi) / 2."""
        rows = super().columns(rollout, advantages, seed=seed, iteration=iteration)
        if self.config.entropy_clip is None:
            return rows
        noise = transitions.own_noise(rows, rollout.at(rows.dst)).square().flatten(1).mean(1)
        log_std = -rows.log_prob - 0.5 * noise - 0.5 * math.log(2 * math.pi)
        return Columns({**rows.data, "log_std": log_std})

    def more_scores(
        self, rollout: Rollout, batch: Columns, step: Transition, y: Tensor
    ) -> dict[str, Tensor]:
        """log_std (n,): mean of log std over latent dims, a step's entropy but for a constant."""
        return {"log_std": step.std.log().expand_as(y).flatten(1).mean(1)}

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        """GRPO's loss, in which rows beyond entropy_clip have a value and no gradient."""
        c, log_prob, log_std = self.config, scores["log_prob"], scores["log_std"]
        metrics = {"policy/step_std": log_std.exp()}
        if c.entropy_clip is not None:
            low, high = c.entropy_clip
            ratio = (log_std - batch.log_std).exp().detach()
            dropped = (ratio < 1 - low) | (ratio > 1 + high)
            log_prob = torch.where(dropped, log_prob.detach(), log_prob)
            metrics["policy/entropy_clipped"] = dropped.float()
        policy = super().loss({**scores, "log_prob": log_prob}, batch)
        bonus = base.summed(-c.entropy_weight * log_std, metrics, batch)
        return LossOutput(loss=policy.loss + bonus.loss, metrics=policy.metrics | bonus.metrics)


ALGORITHM = ReinFlow
