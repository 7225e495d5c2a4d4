"""CRD, Centered Reward Distillation (arXiv:2603.14128): regress implicit rewards on given ones.

The implicit reward is r_hat = -(m(v) / w - m(v_old) / w_old) with w = mean|v - u|, detached; the
external one is rho = A / 2c + 1/2, c = adv_clip. Both minus their group's weighted mean, (beta
r_hat - rho)^2 c / beta is the loss, or the cross-entropy of their sigmoids.

docs/algorithms/crd.md says how it differs from Flow-Factory's port.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from flowrl.algorithms.common import base, forward
from flowrl.runtime.rule import read_above
from flowrl.types import Advantages, Columns, LossOutput, Rollout


class CRDConfig(forward.ForwardConfig):
    share: Literal["group", "all"] = Field(
        "group",
        description=(
            "Which samples are trained at the same noise levels, at which rewards are centred."
        ),
    )
    beta: PositiveFloat = Field(1.0, description="Scale of the implicit reward.")
    form: Literal["mse", "bce"] = Field(
        "mse", description="Square of the difference, or cross-entropy of the sigmoids."
    )
    adaptive: bool = Field(True, description="Errors are divided by mean|v - u|.")
    temperature: PositiveFloat | None = Field(
        None,
        description=(
            "Temperature of the weights softmax(+-rho / temperature) of the means, whose losses"
            " are averaged over both signs; none: equal weights."
        ),
    )
    kl_weight: NonNegativeFloat = Field(
        0.1, description="Weight of the mean square distance of velocities to the reference."
    )
    kl_floor: Annotated[float, read_above("algorithm.kl_weight", 0)] = Field(
        1e-4,
        ge=0,
        description=(
            "Weight of the distance for the worst sample, at most kl_weight, which is the weight"
            " for the best."
        ),
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

    def compared(
        self, rows: forward.Noised, v: Tensor, other: forward.OtherVelocity
    ) -> dict[str, Tensor]:
        """implicit (n,): the implicit reward."""
        return {"implicit": self.error(rows, other("old")) - self.error(rows, v)}

    def error(self, rows: forward.Noised, v: Tensor) -> Tensor:
        """m(v) / w -> (n,), with w = mean|v - u| without gradient, or 1."""
        if not self.config.adaptive:
            return rows.error(v)
        return rows.error(v) / (v.detach() - rows.target).abs().flatten(1).mean(1).clamp(min=1e-5)

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        c, implicit, unit = self.config, scores["implicit"], batch.host("unit")
        rho = (batch.adv / (2 * c.adv_clip) + 0.5).clamp(0, 1)
        signs = (0.0,) if c.temperature is None else (1 / c.temperature, -1 / c.temperature)
        term = torch.zeros_like(implicit)
        for sign in signs:
            weight = forward.softmax(sign * rho, unit)
            guess = c.beta * (implicit - weighted_mean(implicit.detach(), weight, unit))
            target = rho - weighted_mean(rho, weight, unit)
            term = term + self.gap(guess, target) * (c.adv_clip / c.beta) / len(signs)
        metrics = {"policy/implicit_reward": implicit, "policy/distillation_error": term}
        floor = min(c.kl_floor, c.kl_weight)
        # the better a sample, the nearer it is kept to the reference
        held_by = floor + rho * (c.kl_weight - floor)
        term = base.plus_kl(term, scores, metrics, held_by)
        return base.summed(term, metrics, batch)

    def gap(self, guess: Tensor, target: Tensor) -> Tensor:
        """Square of the difference, or cross-entropy of the sigmoids -> (n,)."""
        if self.config.form == "mse":
            return (guess - target).square()
        return F.binary_cross_entropy_with_logits(guess, target.sigmoid(), reduction="none")

    def follow(self, step: int, iteration: int) -> dict[str, float]:
        return {**super().follow(step, iteration), "old": forward.ramp(step, 0.25, 0.005, 0.999)}


def weighted_mean(value: Tensor, weight: Tensor, unit: Tensor) -> Tensor:
    """sum of weight * value of each row's unit: (n,) -> (n,)."""
    total, _, place = base.sums(weight * value, unit)
    return total[place]


ALGORITHM = CRD
