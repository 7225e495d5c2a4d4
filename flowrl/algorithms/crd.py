"""CRD, Centered Reward Distillation (arXiv:2603.14128): regress the centred implicit reward of each
sample on its centred reward.

The implicit reward is r_hat = -(m(v) / w - m(v_old) / w_old) with w = mean|v - u|, detached; the
external one is rho = A / 2c + 1/2,
c = adv_clip. Both minus their group's weighted mean, (beta r_hat - rho)^2 c / beta is the loss, or
the cross-entropy of their sigmoids.

Departures from the code (Flow-Factory's port; the authors' was not seen), beside those of
_forward.py:
* Centred within each group at each noise level; the port centres over whatever its global
  micro-batch holds.
* Rollouts are of the current policy: the port's sampling snapshot equals it for the first 75 steps
  and then lags behind.
* The old policy's decay min(0.25 + 0.005 n, 0.999) counts optimizer steps n; the port's counts
  epochs.
* The levels of a sample differ; the port's 20 come one from each of 20 equal parts of a schedule of
  10, so that they repeat.
* reference_guidance=none by default; the port distils a reference of guidance 4.5.
* temperature=none gives uniform weights; the port's 0 was meant to select signs, but its negative
  mask is always empty.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from flowrl.algorithms.common import base, forward
from flowrl.runtime.read_when import read_above
from flowrl.types import Advantages, Columns, LossOutput, Rollout


class CRDConfig(forward.ForwardConfig):
    share: Literal["group", "all"] = Field(
        "group",
        description="Who is trained at the same noise levels, at which rewards are centred.",
    )
    beta: PositiveFloat = Field(1.0, description="Scale of the implicit reward.")
    form: Literal["mse", "bce"] = Field(
        "mse", description="Square of the difference, or cross-entropy of the sigmoids."
    )
    adaptive: bool = Field(True, description="Errors are divided by mean|v - u|.")
    temperature: PositiveFloat | None = Field(
        None,
        description=(
            "Means are weighted by softmax(+-rho / temperature), both averaged; none: evenly."
        ),
    )
    kl_weight: NonNegativeFloat = Field(
        0.1, description="Weight of the mean square distance of velocities to the reference."
    )
    kl_floor: Annotated[float, read_above("algorithm.kl_weight", 0)] = Field(
        1e-4,
        ge=0,
        description="Distance weight of the worst sample, at most kl_weight, that of the best.",
    )
    reference_guidance: Annotated[float | Literal["none"], read_above("algorithm.kl_weight", 0)] = (
        Field("none", description="Guidance of the reference: a scale (4.5 distils it), or none.")
    )


class CRD(forward.ForwardMethod):
    Config = CRDConfig
    config: CRDConfig
    couples = "group"
    reads_old = True

    def chosen(self, rollout: Rollout, advantages: Advantages) -> tuple[Tensor, Tensor]:
        return forward.members_with_signal(rollout, advantages)

    def score(self, policy: Any, rollout: Rollout, batch: Columns) -> dict[str, Tensor]:
        """implicit (n,): the implicit reward; kl (n,) when it has a weight."""
        c, rows = self.config, self.noised(rollout, batch)
        v = self.velocity(policy, rollout, batch, rows.x)
        v_old = self.other(policy, "old", rollout, batch, rows.x, v)

        def error(v: Tensor) -> Tensor:
            w = (
                (v.detach() - rows.target).abs().flatten(1).mean(1).clamp(min=1e-5)
                if c.adaptive
                else 1.0
            )
            return rows.error(v) / w

        scores = {"implicit": error(v_old) - error(v)}
        if c.kl_weight:
            v_ref = self.other(policy, self.anchor, rollout, batch, rows.x, v, c.reference_guidance)
            scores["kl"] = forward.distance(v, v_ref)
        return scores

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        c, implicit = self.config, scores["implicit"]
        rho = (batch.adv / (2 * c.adv_clip) + 0.5).clamp(0, 1)
        signs = (0.0,) if c.temperature is None else (1 / c.temperature, -1 / c.temperature)
        term = torch.zeros_like(implicit)
        for sign in signs:
            weight = forward.softmax(sign * rho, batch.unit)
            guess = c.beta * (implicit - weighted_mean(implicit.detach(), weight, batch.unit))
            target = rho - weighted_mean(rho, weight, batch.unit)
            if c.form == "mse":
                term = term + (guess - target).square() * (c.adv_clip / c.beta) / len(signs)
            else:
                bce = torch.nn.functional.binary_cross_entropy_with_logits(
                    guess, target.sigmoid(), reduction="none"
                )
                term = term + bce * (c.adv_clip / c.beta) / len(signs)
        metrics = {"policy/implicit_reward": implicit, "policy/distillation_error": term}
        floor = min(c.kl_floor, c.kl_weight)
        term = base.held(
            term, scores, metrics, floor + rho * (c.kl_weight - floor)
        )  # better samples are held more
        return base.summed(term, metrics, batch)

    def follow(self, step: int, iteration: int) -> dict[str, float]:
        return {**super().follow(step, iteration), "old": forward.ramp(step, 0.25, 0.005, 0.999)}


def weighted_mean(value: Tensor, weight: Tensor, unit: Tensor) -> Tensor:
    """sum of weight * value of each row's unit: (n,) -> (n,)."""
    total, _, place = base.sums(weight * value, unit)
    return total[place]


ALGORITHM = CRD
