"""Online Diffusion-DPO (arXiv:2311.12908): the best sample of each group is preferred to its worst.

With errors e of winner and loser at the same noise and level, and those of the reference,
L = -log sigmoid(-beta/2 [(e_w - e_w_ref) - (e_l - e_l_ref)]). beta takes in the number of steps and
latent dims. With media and scores from a folder (data.offline) it is the offline method.

docs/algorithms/dpo.md says how it differs from the paper and from Flow-GRPO's online code.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor
from torch.nn import functional as F

from flowrl.algorithms.common import base, forward
from flowrl.runtime.rule import Rule
from flowrl.types import Advantages, Columns, LossOutput, Plan, Rollout


class DPOConfig(forward.ForwardConfig):
    levels: forward.Levels = Field(
        "logit_normal",
        description=(
            "Which noise levels are trained: continuous levels, levels of the schedule, or one"
            " from each of its equal parts (stratified)."
        ),
    )
    share: Literal["group", "all"] = Field(
        "group",
        description=(
            "Which samples are trained at the same noise levels: winner and loser of a group, or"
            " all."
        ),
    )
    adv_clip: PositiveFloat = Field(
        1e6, description="Advantages are clipped to this size; a pair is ranked by them."
    )
    beta: PositiveFloat = Field(
        100.0,
        description=(
            "Strength of the pull to the reference: 100 online, 2000 to 5000 from a data set."
        ),
    )

    rules: ClassVar[tuple[Rule, ...]] = (Rule(("diversity.entropy",), forward.SCALED_ALIKE),)

    @model_validator(mode="after")
    def check_keep(self) -> DPOConfig:
        if self.keep is not None:
            raise ValueError(
                "dpo trains the best and the worst of each group whatever"
                f" algorithm.keep={self.keep} says; set it to null"
            )
        return self


class DPO(forward.ForwardMethod):
    Config = DPOConfig
    config: DPOConfig
    couples = "group"
    guidance = None
    shared_noise = True
    compares_reference = True

    def most_rows(self, plan: Plan, group: int) -> int:
        return 2 * self.draws(plan)

    def chosen(self, rollout: Rollout, advantages: Advantages) -> tuple[Tensor, Tensor]:
        """The best and the worst leaf of each group with a signal; the first of equal ones."""
        leaf: list[int] = []
        signal = forward.has_signal(advantages)
        for g in torch.unique(rollout.group[signal]).tolist():
            rows = torch.nonzero((rollout.group == g) & signal).flatten()
            adv = advantages.leaf[rows]
            if float(adv.max()) > float(adv.min()):
                leaf += [int(rows[adv.argmax()]), int(rows[adv.argmin()])]
        chosen = torch.tensor(leaf, dtype=torch.int64, device=rollout.leaf.device)
        adv = torch.ones(len(leaf), device=rollout.leaf.device)
        adv[1::2] = -1
        return chosen, adv

    def compared(
        self, rows: forward.Noised, v: Tensor, other: forward.OtherVelocity
    ) -> dict[str, Tensor]:
        """error, error_ref (n,); kl (n,) when it has a weight."""
        v_ref = other(self.anchor)
        scores = {"error": rows.error(v), "error_ref": rows.error(v_ref)}
        return scores | ({"kl": forward.distance(v, v_ref)} if self.config.kl_weight else {})

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        """Each row carries its pair's term: the mean over rows is the mean over pairs."""
        c = self.config
        gain = scores["error"] - scores["error_ref"]
        margin, _, place = base.sums(batch.adv * gain, batch.host("unit"))
        term = -F.logsigmoid(-c.beta / 2 * margin)[place]
        metrics = {
            "policy/accuracy": (margin < 0).float()[place],
            "policy/margin": -margin[place],
            "policy/error": scores["error"],
        }
        term = base.plus_kl(term, scores, metrics, c.kl_weight)
        return base.summed(term, metrics, batch)


ALGORITHM = DPO
