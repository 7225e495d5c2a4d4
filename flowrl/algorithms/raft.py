"""RAFT (arXiv:2304.06767) and RWR: supervised fine-tuning on one's own samples, weighted by reward.

The loss is the flow-matching error of a sample times its weight. select="best" is RAFT: weight 1
for the `top` best of a group. select="softmax" is reward-weighted regression (DDPO's RWR,
arXiv:2305.13301, eq. 4): softmax(A / temperature) within the group.

docs/algorithms/raft.md and rwr.md say how they differ from the papers and from Flow-GRPO's code.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from flowrl.algorithms.common import base, forward
from flowrl.runtime.rule import Rule, read_when
from flowrl.types import Advantages, Columns, LossOutput, Plan, Rollout

# least share of its group's weight with which a row is trained: every row costs the same time
LEAST = 1e-4


class RAFTConfig(forward.ForwardConfig):
    levels: forward.Levels = Field(
        "logit_normal",
        description=(
            "Which noise levels are trained: continuous levels, levels of the schedule, or one"
            " from each of its equal parts (stratified)."
        ),
    )
    adv_clip: PositiveFloat = Field(
        1e6, description="Advantages are clipped to this size; samples are ranked by them."
    )
    select: Literal["best", "softmax"] = Field(
        "best", description="Train the best samples of a group, or all, weighted by softmax."
    )
    top: Annotated[PositiveInt, read_when("algorithm.select", "best")] = Field(
        1, description="How many samples of a group are trained."
    )
    temperature: Annotated[PositiveFloat, read_when("algorithm.select", "softmax")] = Field(
        1.0, description="Temperature of the softmax over the advantages."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("algorithm.top", "batch.group", "algorithm.select", "data.offline"),
            "{0} of {1} trains every sample, whatever its reward; lower it, or raise the group",
            when=lambda top, group, select, offline: (
                top >= group and select == "best" and not offline
            ),
        ),
        Rule(
            ("diversity.entropy", "algorithm.select"),
            forward.SCALED_ALIKE,
            when=lambda entropy, select: entropy and select == "best",
        ),
    )


class RAFT(forward.ForwardMethod):
    Config = RAFTConfig
    config: RAFTConfig
    guidance = None

    def most_rows(self, plan: Plan, group: int) -> int:
        trained = min(group, self.config.top) if self.config.select == "best" else group
        return super().most_rows(plan, trained)

    def chosen(self, rollout: Rollout, advantages: Advantages) -> tuple[Tensor, Tensor]:
        leaf, adv = forward.members_with_signal(rollout, advantages)
        if self.config.select == "softmax":
            return leaf, adv
        group = rollout.group[leaf]
        best = [leaf[:0]]
        for rows in members(group):
            order = adv[rows].argsort(descending=True, stable=True)
            best.append(rows[order[: self.config.top]])
        kept = torch.cat(best)
        return leaf[kept], adv[kept]

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        rows = super().columns(rollout, advantages, seed=seed, iteration=iteration)
        if self.config.select == "best" or not len(rows):
            return rows
        weight = forward.softmax(rows.adv / self.config.temperature, rows.unit)
        return Columns({**rows.data, "weight": weight})[weight >= LEAST]

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        term, metrics = scores["error"], {"policy/error": scores["error"]}
        term = base.plus_kl(term, scores, metrics, self.config.kl_weight)
        return base.summed(term, metrics, batch)


def members(group: Tensor) -> list[Tensor]:
    """Rows of each group."""
    return [torch.nonzero(group == g).flatten() for g in torch.unique(group).tolist()]


ALGORITHM = RAFT
