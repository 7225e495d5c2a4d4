"""Finished samples of masked generators, some of whose tokens are masked again and scored.

    log p_i(x_i | x with the places of M masked, prompt)      for each i of M

stands in for the log-likelihood of a sample x, whose own steps are not read. The loss is PPO's
clipped ratio of each masked token, at the same masks for the trained, the old and the reference
policy. With all places masked it is diffu-GRPO (d1, arXiv:2504.12216), with several shares of them
UniGRPO (MMaDA, arXiv:2505.15809). clip=null leaves the ratio out: its gradient, -A grad log p, is
that of the masked cross-entropy with which such models are pretrained (MaskGIT, arXiv:2202.04200),
weighted by advantages.

Masks are drawn once, as functions of names, and stored in a column: no policy draws them again.
Each has a page in docs/algorithms, which says how it differs from its paper and code.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from flowrl.algorithms.common import base
from flowrl.algorithms.common.forward import has_signal
from flowrl.runtime.rule import Rule, read_when
from flowrl.samplers import keys, random_order
from flowrl.samplers import plan as plans
from flowrl.samplers.common.unmasking import MASK, Unmasking
from flowrl.types import Advantages, Columns, LossOutput, Plan, Rollout


class RemaskConfig(base.Credit, base.Anchor):
    sde: Literal["random_order", "confidence"] = Field(
        "random_order",
        description=(
            "The step of rollouts, which reveals tokens: in random order, with sampler.eta the"
            " temperature of tokens, or by confidence, with sampler.eta the first temperature of"
            " the choice."
        ),
    )
    mask: Literal["all", "ramp", "cosine"] = Field(
        "all",
        description=(
            "Which share of a sample's tokens is masked again: all of them; shares that rise evenly"
            " from mask_from to 1 over its draws (ramp); or cos(pi r / 2) with r uniform, as in"
            " pretraining (cosine)."
        ),
    )
    mask_from: Annotated[float, read_when("algorithm.mask", "ramp")] = Field(
        0.6, ge=0, lt=1, description="Share of masked tokens below which mask=ramp does not go."
    )
    draws: PositiveInt = Field(1, description="How many times each sample is masked again.")
    clip: tuple[PositiveFloat, PositiveFloat] | None = Field(
        (0.2, 0.2),
        description=(
            "The ratio of a token is clipped to 1 - first .. 1 + second; none: there is no ratio,"
            " and the loss is the masked cross-entropy times the advantage."
        ),
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("algorithm.mask", "algorithm.draws"),
            "{0} masks the same tokens in each of {1}; use draws=1, or mask=ramp or cosine",
            when=lambda mask, draws: mask == "all" and draws > 1,
        ),
        Rule(
            ("algorithm.mask", "algorithm.draws"),
            "{0} with {1} masks all tokens, whatever mask_from says; use more draws, or mask=all",
            when=lambda mask, draws: mask == "ramp" and draws == 1,
        ),
    )


class Remask(base.Anchored):
    Config = RemaskConfig
    config: RemaskConfig
    unmasks = True

    def __init__(self, config: RemaskConfig):
        super().__init__(config)
        self.rescored = config.clip is not None
        ratio = {"log_prob"} if self.rescored else set()
        self.needs = frozenset({"leaves"} | ratio | self.anchor_needs())
        self.clip_size = min(config.clip or (self.clip_size,))

    def plan(self, sigmas: Tensor, *, sampler: base.Sampler, iteration: int, seed: int) -> Plan:
        plan = plans.unmask(sigmas, eta=sampler.eta, sde=self.config.sde, init=sampler.init_noise)
        # no step is trained, so that only finished samples are kept
        return dataclasses.replace(plan, trained=torch.zeros_like(plan.trained))

    def check(self, plan: Plan) -> None:
        self.check_anchor()

    def draws(self, plan: Plan) -> int:
        """How many times a sample is masked again."""
        return self.config.draws

    def most_rows(self, plan: Plan, group: int) -> int:
        return self.draws(plan) * min(group, self.config.keep or group)

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        """One row for each sample and draw. masked: (n, places) bool, the tokens that are masked
        again; weight: of each token, 1 over their number, so that every row has weight 1."""
        draws = self.draws(rollout.plan)
        leaf = torch.nonzero(has_signal(advantages)).flatten().repeat_interleave(draws)
        draw = torch.arange(draws, device=leaf.device).repeat(len(leaf) // draws)
        names = keys.key("remask", seed, iteration, rollout.leaf_key[leaf], draw)
        state, adv = rollout.leaf[leaf], advantages.leaf[leaf]
        masked = self.masks(names, draw, rollout.leaves[0].numel())
        gate = base.gate_column(advantages.kl_gate, leaf)
        return Columns(
            {
                "prompt": rollout.prompt[state],
                "state": state,
                "masked": masked,
                "weight": masked / masked.sum(1, keepdim=True),
                "adv": adv[:, None],
                "log_prob": torch.zeros(masked.shape, device=masked.device),
                "noise_key": names,
                **{name: value[:, None] for name, value in gate.items()},
            }
        )

    def masks(self, names: Tensor, draw: Tensor, places: int) -> Tensor:
        """Draw the masked places (n, places) bool of rows by their names and draws, (n,) each."""
        c = self.config
        share = torch.ones(len(names), dtype=torch.float64, device=names.device)
        if c.mask == "ramp":
            share = c.mask_from + (1 - c.mask_from) * (draw + 1) / c.draws
        elif c.mask == "cosine":
            share = torch.cos(torch.pi / 2 * keys.uniform(keys.key("share", names)))
        count = (share * places).round().clamp(1, places)
        return keys.permutation(names, places) < count[:, None]

    def step(self, policy: base.VelocityField, rollout: Rollout, batch: Columns) -> Unmasking:
        """The step that reveals all masked tokens of each row at once, by the present view."""
        x0 = rollout.at(batch.state)
        x = torch.where(batch.masked.view(x0.shape), MASK, x0)
        share = batch.masked.double().mean(1)
        logits = policy.velocity(
            x, share, rollout.cond, batch.prompt, guidance=rollout.guidance
        ).float()
        # tokens have the temperature at which the rollout drew them
        level = float(rollout.plan.eta[0]) if self.config.sde == "random_order" else 1.0
        return random_order.transition(logits, x, share, torch.zeros_like(share), eta=level)

    def score(
        self, policy: base.VelocityField, rollout: Rollout, batch: Columns
    ) -> dict[str, Tensor]:
        """log_prob (n, places) of the masked tokens, and kl (n, places) where it has a weight."""
        step = self.step(policy, rollout, batch)
        scores = {"log_prob": step.log_prob(rollout.at(batch.state), reduction="none")}
        if self.config.kl_weight:
            with torch.no_grad(), policy.view(self.anchor):
                other = self.step(policy, rollout, batch)
            scores["kl"] = step.kl(other, reduction="none")
        return scores

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        """Sum over masked tokens of weight * (max(-A ratio, -A clipped ratio) + kl_weight * KL), or
        with clip=null of weight * (-A log p + kl_weight * KL). All are (n, places), adv (n, 1)."""
        c, log_prob = self.config, scores["log_prob"]
        metrics = {"policy/error": -log_prob}
        if c.clip is None:
            term = -batch.adv * log_prob
        else:
            log_ratio = log_prob - batch.log_prob
            ratio = log_ratio.exp()
            clipped = ratio.clamp(1 - c.clip[0], 1 + c.clip[1])
            term, stopped = base.clipped_surrogate(ratio, clipped, batch.adv)
            metrics |= {"policy/clip_fraction": stopped, "policy/log_ratio": log_ratio.abs()}
        term = base.plus_kl(term, scores, metrics, c.kl_weight)
        return base.summed(term, metrics, batch)

    def fit(self, policy: base.VelocityField, rollout: Rollout, batch: Columns) -> Tensor:
        step = self.step(policy, rollout, batch)
        return (batch.weight * step.log_prob(rollout.at(batch.state), reduction="none")).sum(1)


ALGORITHM = Remask
