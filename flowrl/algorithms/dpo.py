"""Online Diffusion-DPO (arXiv:2311.12908): the best sample of each group is preferred to its worst.

With errors e of winner and loser at the same noise and level, means over latent dims, and those of
the reference, L = -log sigmoid(beta/2 h), h = (e_l - e_l_ref) - (e_w - e_w_ref). kind="ipo" is
(h - 1/(2 tau))^2 (arXiv:2310.12036), kind="hinge" max(0, 1 - beta/2 h) (SLiC, arXiv:2305.10425).
With pairs or scored media from files (data.offline) it is the offline method; there a pair may have
a soft label p, the share of raters who prefer the winner: p L(h) + (1 - p) L(-h).

docs/algorithms/dpo.md says how it differs from the paper and from Flow-GRPO's online code.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor
from torch.nn import functional as F

from flowrl.algorithms.common import base, forward
from flowrl.runtime.rule import Rule, read_when
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
    kind: Literal["sigmoid", "ipo", "hinge"] = Field(
        "sigmoid",
        description=(
            "Loss of a pair's margin h: -log sigmoid(beta h / 2), (h - 1 / (2 tau))^2 (ipo), or"
            " max(0, 1 - beta h / 2) (hinge)."
        ),
    )
    tau: Annotated[PositiveFloat, read_when("algorithm.kind", "ipo")] = Field(
        1.0, description="The margin that ipo aims at is 1 / (2 tau)."
    )
    wrong: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description=(
            "Share e of pairs whose label is taken to be wrong (conservative DPO): the loss is"
            " (1 - e) L(h) + e L(-h)."
        ),
    )

    limit_loser: bool = Field(
        False,
        description=(
            "Whether the loser's gradient is scaled so that, to first order, the winner's error"
            " does not grow (SDPO)."
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
        """The best and the worst leaf of each group with a signal, the first of equal ones; and
        both of a pair from files, where a tie has a soft label."""
        leaf: list[int] = []
        stated = bool(rollout.stated)
        signal = ~advantages.leaf.isnan() if stated else forward.has_signal(advantages)
        for g in torch.unique(rollout.group[signal]).tolist():
            rows = torch.nonzero((rollout.group == g) & signal).flatten()
            adv = advantages.leaf[rows]
            if float(adv.max()) > float(adv.min()):
                leaf += [int(rows[adv.argmax()]), int(rows[adv.argmin()])]
            elif stated and len(rows) == 2:
                leaf += rows.tolist()
        chosen = torch.tensor(leaf, dtype=torch.int64, device=rollout.leaf.device)
        adv = torch.ones(len(leaf), device=rollout.leaf.device)
        adv[1::2] = -1
        return chosen, adv

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        """With pairs from files, label (n,) is the share of raters who prefer the row's winner,
        weight that of the pair, and mask (n, *L) where errors count, if the pair says it."""
        rows = super().columns(rollout, advantages, seed=seed, iteration=iteration)
        if not rollout.stated:
            return rows
        at = torch.searchsorted(rollout.leaf, rows.state)
        label, weight = (rollout.stated[name][at] for name in ("label", "weight"))
        label = torch.where(rows.adv > 0, label, 1 - label)
        mask = {"mask": rollout.stated["mask"][at]} if "mask" in rollout.stated else {}
        return Columns({**rows.data, "label": label, "weight": weight, **mask})

    def compared(
        self, rows: forward.Noised, v: Tensor, other: forward.OtherVelocity
    ) -> dict[str, Tensor]:
        """error, error_ref (n,), within the mask; kl (n,), of all latents, when it has a weight;
        residual (n, d), v - u without gradient and as it counts, where the loser is limited."""
        v_ref = other(self.anchor)
        more: dict[str, Tensor] = {}
        if self.config.limit_loser:
            gap = (v - rows.target).detach()
            more["residual"] = (gap if rows.mask is None else rows.mask * gap).flatten(1)
        scores = more | {"error": rows.error(v), "error_ref": rows.error(v_ref)}
        return scores | ({"kl": forward.distance(v, v_ref)} if self.config.kl_weight else {})

    def of_margin(self, h: Tensor) -> Tensor:
        """The loss of margins h, (pairs,); above 0 the winner has gained more than the loser."""
        c = self.config
        if c.kind == "ipo":
            return (h - 1 / (2 * c.tau)).square()
        if c.kind == "hinge":
            return (1 - c.beta / 2 * h).clamp(min=0)
        return -F.logsigmoid(c.beta / 2 * h)

    def limited(self, gain: Tensor, residual: Tensor, batch: Columns) -> Tensor:
        """Gains (n,) whose gradient is scaled for losers by SDPO's kappa (arXiv:2511.03317):
        min(1, |g_w|^2 / <g_w, g_l>) where <g_w, g_l> > 0, else 1, with g = v - u."""
        # a unit holds a winner and a loser; the host has the units, so that it waits for nothing
        pairs = batch.host("unit").argsort(stable=True).view(-1, 2)
        other = torch.empty_like(pairs.flatten())
        other[pairs.flatten()] = pairs.flip(1).flatten()
        other = other.to(gain.device, non_blocking=True)
        g, g_other = residual.detach(), residual.detach()[other]
        dot, winner = (g * g_other).sum(1), g_other.square().sum(1)
        kappa = torch.where(dot > 0, winner / dot, 1.0).clamp(max=1)
        kappa = torch.where(batch.adv < 0, kappa, 1.0)
        return gain.detach() + kappa * (gain - gain.detach())

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        """Each row carries its pair's term: the mean over rows is the mean over pairs."""
        c = self.config
        gain = scores["error"] - scores["error_ref"]
        if c.limit_loser:
            gain = self.limited(gain, scores["residual"], batch)
        margin, _, place = base.sums(batch.adv * gain, batch.host("unit"))
        term = self.of_margin(-margin)[place]
        if c.wrong or "label" in batch.data:
            p = batch.data.get("label", torch.ones_like(term))
            p = (1 - c.wrong) * p + c.wrong * (1 - p)
            term = p * term + (1 - p) * self.of_margin(margin)[place]
        metrics = {
            "policy/accuracy": (margin < 0).float()[place],
            "policy/margin": -margin[place],
            "policy/error": scores["error"],
            # the loss falls also while both errors rise: the winner's own tells it
            "policy/winner_error": base.sums(
                torch.where(batch.adv > 0, scores["error"], 0.0), batch.host("unit")
            )[0][place],
        }
        term = base.plus_kl(term, scores, metrics, c.kl_weight)
        return base.summed(term, metrics, batch)


ALGORITHM = DPO
