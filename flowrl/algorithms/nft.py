"""DiffusionNFT (arXiv:2509.16117): RL on the forward process with two implicit policies.

With optimality probability r of a sample, the implicit positive policy (1-beta) v_old + beta v is
fitted with weight r and the implicit negative policy (1+beta) v_old - beta v with weight 1 - r,
both to the flow-matching target of the re-noised sample. The optimum moves v by 2/beta times the
direction from average to optimal samples. The rollout uses the old policy, no guidance and DPM++2M.

docs/algorithms/nft.md says how it differs from the authors' code.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator
from torch import Tensor

from flowrl.algorithms.common import base, forward
from flowrl.types import Columns, LossOutput, Rewards


class NFTConfig(forward.ForwardConfig):
    beta: PositiveFloat = Field(
        1.0,
        description=(
            "Inverse guidance strength: half of it doubles the step that is aimed at; 0.1 is fast"
            " and less stable."
        ),
    )
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = Field(
        "all",
        description=(
            "Advantages as they are, their positive or negative part, 1 where positive, or their"
            " sign."
        ),
    )
    adv_clip: PositiveFloat = Field(
        5.0, description="Advantages are clipped to this size c; optimality is A / 2c + 1/2."
    )
    kl_weight: NonNegativeFloat = Field(
        1e-4, description="Weight of the mean square distance of velocities to the reference."
    )
    decay: Literal[0, 1, 2] = Field(
        1,
        description=(
            "Decay of the old policy after n optimizer steps. 0: always 0, a copy; 1: min(n /"
            " 1000, 0.5); 2: 0 until n = 75, then growing to 0.999."
        ),
    )

    @model_validator(mode="after")
    def check_error(self) -> NFTConfig:
        if self.error != "velocity":
            raise ValueError(
                f"algorithm.error={self.error} has no effect: nft's error is of x0, over its own"
                " size; leave it out"
            )
        return self


class NFT(forward.ForwardMethod):
    Config = NFTConfig
    config: NFTConfig
    rollout_view = "old"

    def leaf_advantages(self, rewards: Rewards, group: Tensor) -> Tensor:
        adv = super().leaf_advantages(rewards, group)
        modes = {
            "all": lambda a: a,
            "positive_only": lambda a: a.clamp(min=0),
            "negative_only": lambda a: a.clamp(max=0),
            "one_only": lambda a: (a > 0).to(a),
            "binary": torch.sign,
        }
        return modes[self.config.adv_mode](adv)

    def compared(
        self, rows: forward.Noised, v: Tensor, other: forward.OtherVelocity
    ) -> dict[str, Tensor]:
        """positive, negative (n,): x0 errors of the two implicit policies."""
        beta, v_old = self.config.beta, other("old")
        return {
            "positive": x0_error(rows.x - rows.sigma * ((1 - beta) * v_old + beta * v), rows.x0),
            "negative": x0_error(rows.x - rows.sigma * ((1 + beta) * v_old - beta * v), rows.x0),
        }

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        """c (r L+ + (1-r) L-) / beta + kl_weight KL, with c = adv_clip, r = A / 2c + 1/2.

        At the old policy its gradient is A times L's.
        """
        c = self.config
        r = (batch.adv / (2 * c.adv_clip) + 0.5).clamp(0, 1)
        term = c.adv_clip * (r * scores["positive"] + (1 - r) * scores["negative"]) / c.beta
        metrics = {"policy/x0_error": scores["positive"]}
        term = base.plus_kl(term, scores, metrics, c.kl_weight)
        return base.summed(term, metrics, batch)

    def follow(self, step: int, iteration: int) -> dict[str, float]:
        quick = forward.ramp(step, 0, 0.001, 0.5)
        late = forward.ramp(step, 0, 0.0075, 0.999, after=75)
        decay = (0.0, quick, late)[self.config.decay]
        return {**super().follow(step, iteration), "old": decay}


def x0_error(x0_hat: Tensor, x0: Tensor) -> Tensor:
    """mean((x0_hat - x0)^2) / w, w = max(mean |x0_hat - x0|, 1e-5) detached: (n, *L) -> (n,).

    w evens out noise levels.
    """
    with torch.no_grad():
        w = (x0_hat.double() - x0.double()).abs().flatten(1).mean(1).clamp(min=1e-5)
    return (x0_hat - x0).square().flatten(1).mean(1) / w.float()


ALGORITHM = NFT
