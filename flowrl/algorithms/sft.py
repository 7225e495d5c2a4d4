"""Supervised fine-tuning on media and prompts of a user's own (data.offline).

The loss is the flow-matching error, L = mean((v - (eps - x0))^2), at noise levels drawn
logit-normally (Esser et al., arXiv:2403.03206): they need no further weight. A share of the prompts
is replaced by the empty one, so that the model can still be guided. There are no rollouts, no
advantages and no reward.

docs/algorithms/sft.md says how it differs from other trainers.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from flowrl.algorithms.common import base, forward
from flowrl.runtime.rule import Rule
from flowrl.samplers import keys
from flowrl.types import Advantages, Columns, LossOutput, Rewards, Rollout


class SFTConfig(forward.ForwardConfig):
    levels: forward.Levels = Field(
        "logit_normal",
        description=(
            "Which noise levels are trained: continuous levels, levels of the schedule, or one"
            " from each of its equal parts (stratified)."
        ),
    )
    prompt_dropout: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of samples that are trained with the empty prompt, for guidance.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("data.offline",),
            "algorithm=sft trains media of your own; name them with data.offline=FOLDER",
            when=lambda offline: not offline,
        ),
        Rule(
            ("dataset",),
            lambda data: (
                f"algorithm=sft trains media with their prompts, and data.offline holds {data.kind}"
                " ones; use algorithm=raft for scored folders and algorithm=dpo for pairs"
            ),
            when=lambda data: data is not None and data.kind != "media",
        ),
        base.WATCHED,
    )


class SFT(forward.ForwardMethod):
    Config = SFTConfig
    config: SFTConfig
    reads_rewards = False

    def leaf_advantages(self, rewards: Rewards, group: Tensor) -> Tensor:
        """1 for every sample."""
        return torch.where(rewards.valid, 1.0, torch.nan)

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        """text (n,): the row of cond that the network reads, which is the prompt's, or P further on
        the empty one's."""
        rows = super().columns(rollout, advantages, seed=seed, iteration=iteration)
        text = rows.prompt
        if self.config.prompt_dropout:
            draw = keys.uniform(keys.key("dropout", seed, iteration, rollout.leaf_key))
            dropped = (
                draw[torch.searchsorted(rollout.leaf, rows.state)] < self.config.prompt_dropout
            )
            text = torch.where(dropped, text + int(rollout.group.max()) + 1, text)
        return Columns({**rows.data, "text": text})

    def velocity(
        self,
        policy: base.VelocityField,
        rollout: Rollout,
        batch: Columns,
        x: Tensor,
        guidance: float | str = "none",
    ) -> Tensor:
        return policy.velocity(x, batch.sigma, rollout.cond, batch.text, guidance=guidance).float()

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        term, metrics = scores["error"], {"policy/error": scores["error"]}
        term = base.plus_kl(term, scores, metrics, self.config.kl_weight)
        return base.summed(term, metrics, batch)


ALGORITHM = SFT
