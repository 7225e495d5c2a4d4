"""GRPO on denoising steps: a clipped ratio of each SDE step's density, group-relative advantages,
optional closed-form KL.

Serves Flow-GRPO (arXiv:2505.05470), Flow-GRPO-Fast, DanceGRPO (arXiv:2505.07818), MixGRPO and
MixGRPO-Flash (arXiv:2507.21802), BranchGRPO (arXiv:2509.06040), TreeGRPO, TempFlow-GRPO
(arXiv:2508.04324), Granular-GRPO, GRPO-Guard (arXiv:2510.22319), DDPO (arXiv:2305.13301) and DPOK
(arXiv:2305.16381): they differ in plan, SDE, credit, ratio and statistics.

Departures from papers and reference code, beside those of _transitions.py:
* DanceGRPO: samples are not trained one by one but share forwards. keep (its best-of-N) chooses
  within each group, not over a rank's batch.
* MixGRPO: reward weights are not divided by their sum; the window never shrinks at the end of the
  schedule, and never holds the last step (the code uses l + w clipped to T - 2); the random
  schedule is seeded, hence the same on all processes; the training log-prob never resamples its
  transition.
* Flow-GRPO-Fast: one window an iteration for all processes, so that the members of a group share it
  (the code draws one per pipeline call).
* BranchGRPO: children are samples of the transition whose density the ratio uses (the code scales a
  split's noise by 4 and keeps the density of 1); a child's state is stored as it was sampled (the
  code rounds it to bf16 after its log-prob).
* TreeGRPO: the softmax of its back-up uses mean-reduced log-probs and a temperature, which the
  paper leaves open.
* Granular-GRPO: of several rewards each is z-scored over its group, added up, and the sum z-scored
  at each stride (its code z-scores each reward at each stride); its sub-grids are those of
  samplers/plan.py.
* GRPO-Guard: the correction is per sample (its code averages over the batch, which its author calls
  a bug).
* DDPO: per-prompt statistics of the iteration's group, not of a history of 16 to 32 samples. DPOK:
  the group's mean is the baseline.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from flowrl.algorithms.common import base, transitions
from flowrl.algorithms.common.transition_config import FORKING, TransitionConfig
from flowrl.samplers import sde
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
        description="Most the ratio counts where advantages are negative (dual-clip PPO).",
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
        data = (
            rows.data
            if self.config.step_weight == "none"
            else {**rows.data, "scale": self._scale(rollout, rows)}
        )
        if (
            self.config.ratio == "guard"
        ):  # of the old policy: 0, but for what the training forward makes of it in low precision
            data = {**data, "normed": torch.zeros_like(rows.log_prob)}
        return Columns({**data, "unit": rows.sample} if self.couples == "sample" else data)

    def _scale(self, rollout: Rollout, rows: Columns) -> Tensor:
        """(n,) weight of each step in the policy's term."""
        if self.config.step_weight == "inverse_step":
            return 1 / (rows.sigma - rows.sigma_next).float()
        plan = rollout.plan
        sigma, first = torch.unique(plan.sigma[plan.trained], return_inverse=True)
        edge = torch.zeros(len(sigma), dtype=torch.int64).index_put(
            (first,), torch.nonzero(plan.trained).flatten()
        )
        levels = Columns(
            {
                name: getattr(plan, name)[edge].to(rows.weight.device)
                for name in ("sigma", "sigma_next", "eta")
            }
        )
        return spreads(rollout, rows) / spreads(rollout, levels).mean()

    def more_scores(
        self, rollout: Rollout, batch: Columns, step: Transition, y: Tensor
    ) -> dict[str, Tensor]:
        """GRPO-Guard's log-ratio: normed (n,) = mean(noise * (mean - old mean)) over latent dims,
        which is std * (log p - log p_old + |d|^2 / 2D) with d = (mean - old mean) / std. The old
        mean is the stored state minus the noise that made it.
        """
        if self.config.ratio != "guard":
            return {}
        noise = transitions.own_noise(batch, y)
        return {"normed": (noise * (step.mean - y + step.std * noise)).flatten(1).mean(1)}

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        c, (low, high) = self.config, self.config.clip
        step = log_ratio = scores["log_prob"] - batch.log_prob
        if c.ratio == "guard":
            log_ratio = scores["normed"] - batch.normed
        if c.ratio == "sequence":
            log_ratio = base.mean_of_unit(log_ratio, batch.unit)
        if c.ratio == "log":
            ratio, clipped = log_ratio, log_ratio.clamp(-low, high)
        else:
            ratio = log_ratio.exp()
            clipped = ratio.clamp(1 - low, 1 + high)
        term, stopped = base.clipped_surrogate(ratio, clipped, batch.adv)
        if c.dual_clip is not None:
            bound = -batch.adv * (math.log(c.dual_clip) if c.ratio == "log" else c.dual_clip)
            past = (batch.adv < 0) & (term > bound)
            term, stopped = torch.where(past, bound, term), torch.where(past, 1.0, stopped)
        term = term * batch.scale if "scale" in batch.data else term
        metrics = {
            "policy/clip_fraction": stopped,
            "policy/log_ratio": log_ratio.abs(),
            "policy/approx_kl": step.square() / 2,
        }
        term = base.held(term, scores, metrics, c.kl_weight)
        return base.summed(term, metrics, batch)


def spreads(rollout: Rollout, steps: Columns) -> Tensor:
    """std (n,) of SDE steps: it depends on neither state nor network."""
    nothing = torch.zeros(len(steps), 1, device=steps.sigma.device)
    return sde.transition(
        rollout.plan, nothing, nothing, steps.sigma, steps.sigma_next, steps.eta
    ).std.flatten()


ALGORITHM = GRPO
