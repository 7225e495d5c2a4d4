"""GRPO on denoising steps: a clipped ratio of each SDE step's density, group-relative advantages.

Serves Flow-GRPO (arXiv:2505.05470), Flow-GRPO-Fast, DanceGRPO (arXiv:2505.07818), MixGRPO and
MixGRPO-Flash (arXiv:2507.21802), BranchGRPO (arXiv:2509.06040), TreeGRPO (arXiv:2512.08153),
TempFlow-GRPO (arXiv:2508.04324), Granular-GRPO (arXiv:2510.01982), GRPO-Guard (arXiv:2510.22319),
Pref-GRPO (arXiv:2508.20751), DDPO (arXiv:2305.13301) and DPOK (arXiv:2305.16381): they differ in
plan, SDE, credit, ratio and statistics. A closed-form KL to a reference is optional. Each has a
page in docs/algorithms, which says how it differs from its paper and code.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from flowrl.algorithms.common import base, transitions
from flowrl.algorithms.common.step_weight import step_weight
from flowrl.algorithms.common.transition_config import FORKING, TransitionConfig
from flowrl.types import Advantages, Columns, LossOutput, Rollout, Transition


class GRPOConfig(TransitionConfig):
    ratio: Literal["ppo", "log", "guard", "sequence"] = Field(
        "ppo",
        description=(
            "How old and new policy are compared: the ratio of each step; its logarithm; RatioNorm"
            " (GRPO-Guard); one ratio per sample from the mean log-ratio of its steps (GSPO)."
        ),
    )
    clip: tuple[PositiveFloat, PositiveFloat] = Field(
        (1e-4, 1e-4),
        description=(
            "The ratio is clipped to 1 - first .. 1 + second; with ratio=log the logarithm to"
            " -first .. second."
        ),
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Largest ratio that counts where advantages are negative (dual-clip PPO).",
    )
    step_weight: Literal["none", "noise", "inverse_step"] = Field(
        "none",
        description=(
            "Weight of a step: its std over the mean of all (TempFlow-GRPO), or 1 over its length"
            " (GRPO-Guard)."
        ),
    )

    @model_validator(mode="after")
    def check_ratio(self) -> GRPOConfig:
        if self.ratio == "sequence" and self.plan in FORKING:
            raise ValueError(
                f"algorithm.ratio=sequence is one ratio a sample, and samples of plan={self.plan}"
                " share steps; use ratio=ppo"
            )
        if self.ratio == "guard" and (self.tree.correlation is not None or self.sde == "cps"):
            raise ValueError(
                "algorithm.ratio=guard reads each step's own noise; it works without"
                " tree.correlation and not with sde=cps"
            )
        return self


class GRPO(transitions.TransitionMethod):
    Config = GRPOConfig
    config: GRPOConfig

    def __init__(self, config: GRPOConfig):
        super().__init__(config)
        self.couples = "sample" if config.ratio == "sequence" else "row"
        self.clip_size = min(config.clip)

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        rows = super().columns(rollout, advantages, seed=seed, iteration=iteration)
        data, how = dict(rows.data), self.config.step_weight
        if how != "none":
            data["scale"] = step_weight(how, rollout, rows)
        # the old policy's own value is 0, but for rounding in low precision
        if self.config.ratio == "guard":
            data["normed"] = torch.zeros_like(rows.log_prob)
        if self.couples == "sample":
            data["unit"] = rows.sample
        return Columns(data)

    def more_scores(
        self, rollout: Rollout, batch: Columns, step: Transition, y: Tensor
    ) -> dict[str, Tensor]:
        """GRPO-Guard's log-ratio: normed (n,) = mean(noise * (mean - old mean)) over latent dims.

        That is std * (log p - log p_old + |d|^2 / 2D) with d = (mean - old mean) / std. The old
        mean is the stored state minus the noise that made it.
        """
        if self.config.ratio != "guard":
            return {}
        noise = transitions.own_noise(batch, y)
        return {"normed": (noise * (step.mean - y + step.std * noise)).flatten(1).mean(1)}

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        """Sum over rows of weight * (max(-A ratio, -A clipped ratio) + kl_weight * KL).

        A row is a denoising step, n of them. scores, (n,) each: log_prob of the stored step under
        the policy; normed with ratio=guard; kl with a weight. batch, (n,) each: log_prob under the
        policy that sampled; adv; weight; unit, the sample of a row, with ratio=sequence.
        """
        c, (low, high) = self.config, self.config.clip

        # Ratio of the new policy to the old one: one a step, or one for all steps of a sample.
        step_log_ratio = log_ratio = scores["log_prob"] - batch.log_prob  # (n,)
        if c.ratio == "guard":
            log_ratio = scores["normed"] - batch.normed
        if c.ratio == "sequence":
            log_ratio = base.mean_of_unit(log_ratio, batch.host("unit"))

        # Clip: beyond its range no gradient pushes the ratio further.
        if c.ratio == "log":
            ratio, clipped = log_ratio, log_ratio.clamp(-low, high)
        else:
            ratio = log_ratio.exp()  # (n,)
            clipped = ratio.clamp(1 - low, 1 + high)
        term, stopped = base.clipped_surrogate(ratio, clipped, batch.adv)  # (n,), (n,) 0 or 1
        if c.dual_clip is not None:  # a step that became likely must not be punished without end
            bound = -batch.adv * (math.log(c.dual_clip) if c.ratio == "log" else c.dual_clip)
            past = (batch.adv < 0) & (term > bound)
            term, stopped = torch.where(past, bound, term), torch.where(past, 1.0, stopped)
        if c.step_weight != "none":
            term = term * batch.scale

        # KL to the reference, outside the clip: it has a gradient also where the clip stops the
        # ratio.
        metrics = {
            "policy/clip_fraction": stopped,
            "policy/log_ratio": log_ratio.abs(),
            "policy/approx_kl": step_log_ratio.square() / 2,
        }
        if c.kl_weight:
            term = base.plus_kl(term, scores, metrics, c.kl_weight)
        return base.summed(term, metrics, batch)


ALGORITHM = GRPO
