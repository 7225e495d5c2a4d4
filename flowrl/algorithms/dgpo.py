"""DGPO, Direct Group Preference Optimization (arXiv:2510.08425): a group's better half preferred.

With d = m(v) and d_ref of the reference at one noise for the whole group, the loss is A d weighted
with W = sigmoid(beta sum_i A_i (d_i - d_ref_i) / K), the gradient of -log sigmoid(-beta sum A (d -
d_ref) / K) without its leading beta: a group that is solved weighs nothing. Advantages add up to 0,
so the partition function of the implicit rewards cancels.

docs/algorithms/dgpo.md says how it differs from the authors' code.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from flowrl.algorithms.common import base, forward
from flowrl.runtime.rule import Rule, read_with
from flowrl.types import Columns, LossOutput


class DGPOConfig(forward.ForwardConfig, forward.Follower):
    steps: PositiveInt | None = Field(
        4, description="How many noise levels each sample is trained at; none: all levels in use."
    )
    share: Literal["group", "all"] = Field(
        "all", description="Which samples are trained at the same noise levels."
    )
    range: float = Field(
        0.7, gt=0, le=1, description="Share of the schedule, from noise on, whose levels are used."
    )
    beta: PositiveFloat = Field(
        100.0,
        description="Sharpness: 10 to 100 with a frozen reference, 2000 to 5000 with a moving one.",
    )
    clip: PositiveFloat | None = Field(
        1e-3, description="No gradient once exp(d_old - d) is this far past 1; none: off."
    )
    reference_guidance: float | Literal["none"] = Field(
        "none", description="Guidance of the reference: a scale, or none."
    )
    old_slope: Annotated[forward.Slope, read_with("algorithm.clip")] = 0.001
    old_decay: Annotated[forward.Decay, read_with("algorithm.clip")] = 0.3

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("draw.mode",),
            "dgpo needs advantages that add up to 0 over a group, which {0} trains a part of; use"
            " draw.mode=refill or once",
            when=lambda mode: mode == "balance",
        ),
    )

    @model_validator(mode="after")
    def check_keep(self) -> DGPOConfig:
        if self.keep is not None:
            raise ValueError(
                "dgpo needs advantages that add up to 0 over a group, of which"
                f" algorithm.keep={self.keep} trains a part; set it to null"
            )
        return self


class DGPO(forward.ForwardMethod):
    Config = DGPOConfig
    config: DGPOConfig
    couples = "group"
    guidance = None
    shared_noise = True
    compares_reference = True

    def __init__(self, config: DGPOConfig):
        self.reads_old = config.clip is not None
        super().__init__(config)
        if config.kl_weight:
            self.needs |= {"reference"}

    def compared(
        self, rows: forward.Noised, v: Tensor, other: forward.OtherVelocity
    ) -> dict[str, Tensor]:
        """error, error_ref, error_old (n,) = mean((v - u)^2); kl (n,) when it has a weight.

        The KL is to the untrained model, also where the loss compares with a moving reference.
        """
        c = self.config
        v_ref = other(self.anchor, c.reference_guidance)
        scores = {"error": rows.error(v), "error_ref": rows.error(v_ref)}
        if self.reads_old:
            scores["error_old"] = rows.error(other("old"))
        if c.kl_weight:
            frozen = self.anchor == "reference"
            v_frozen = v_ref if frozen else other("reference", c.reference_guidance)
            scores["kl"] = forward.distance(v, v_frozen)
        return scores

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        c, d = self.config, scores["error"]
        with torch.no_grad():
            total, _, place = base.sums(batch.adv * (d - scores["error_ref"]), batch.host("unit"))
            # weight of the group: 1/2 at the reference, 0 once the group is solved
            doubt = torch.sigmoid(c.beta * total[place] / batch.members)
            stopped = self.stopped(scores, batch)
        term = doubt * batch.adv * torch.where(stopped, d.detach(), d)
        metrics = {
            "policy/doubt": doubt,
            "policy/clip_fraction": stopped.float(),
            "policy/error": d,
        }
        term = base.plus_kl(term, scores, metrics, c.kl_weight)
        return base.summed(term, metrics, batch)

    def stopped(self, scores: dict[str, Tensor], batch: Columns) -> Tensor:
        """Rows that the clip keeps from going further, (n,) bool."""
        clip, adv = self.config.clip, batch.adv
        if clip is None:
            return torch.zeros_like(adv, dtype=torch.bool)
        ratio = (scores["error_old"] - scores["error"]).exp()
        return (ratio > 1 + clip) & (adv > 0) | (ratio < 1 - clip) & (adv <= 0)


ALGORITHM = DGPO
