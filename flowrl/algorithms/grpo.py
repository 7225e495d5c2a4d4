"""GRPO on denoising steps: a clipped ratio of each SDE step's density, group-relative advantages.

Serves Flow-GRPO (arXiv:2505.05470), Flow-GRPO-Fast, DanceGRPO (arXiv:2505.07818), MixGRPO and
MixGRPO-Flash (arXiv:2507.21802), BranchGRPO (arXiv:2509.06040), TreeGRPO (arXiv:2512.08153),
TempFlow-GRPO (arXiv:2508.04324), Granular-GRPO (arXiv:2510.01982), GRPO-Guard (arXiv:2510.22319),
Pref-GRPO (arXiv:2508.20751), DDPO (arXiv:2305.13301) and DPOK (arXiv:2305.16381): they differ in
plan, SDE, credit, ratio and statistics. A closed-form KL to a reference is optional. Each has a
page in docs/algorithms, which says how it differs from its paper and code.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from flowrl.algorithms.common import base, transitions
from flowrl.algorithms.common.step_weight import pulls, step_weight
from flowrl.algorithms.common.transition_config import (
    FORKING,
    TransitionConfig,
    is_learned,
    of_gaussian,
)
from flowrl.runtime.rule import Rule, read_when, read_with
from flowrl.samplers import sde
from flowrl.types import Advantages, Columns, LossOutput, Plan, Rollout, Transition, expand


class Trust(base.Options):
    """Flow-DPPO's trust region (arXiv:2606.11025)."""

    threshold: PositiveFloat | None = Field(
        None,
        description=(
            "A step whose policy has diverged this far from the one that sampled is left out where"
            " its gradient would move it further (Flow-DPPO); none: the ratio is clipped."
        ),
    )
    divergence: Annotated[
        Literal["scaled", "raw", "velocity"], read_with("algorithm.trust.threshold")
    ] = Field(
        "scaled",
        description=(
            "What the threshold bounds, a mean over latent dims: the KL of the two steps,"
            " ((mean - old mean) / std)^2 / 2 (scaled); that without the std (raw); or"
            " (v - old v)^2 (velocity)."
        ),
    )


class GRPOConfig(TransitionConfig):
    ratio: Literal["ppo", "log", "guard", "sequence", "token"] = Field(
        "ppo",
        description=(
            "How old and new policy are compared: the ratio of each step; its logarithm; RatioNorm"
            " (GRPO-Guard); one ratio per sample from the mean log-ratio of its steps (GSPO); one"
            " for each token that a step reveals (token, of masked generators)."
        ),
    )
    shrink: Annotated[PositiveInt, read_when("algorithm.ratio", "token")] = Field(
        1,
        description=(
            "How many consecutive steps are scored together, in the grid where the first of them"
            " starts (TraceRL's s)."
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
        description="Largest ratio that counts where advantages are negative (dual-clip PPO).",
    )
    trust: Trust = Field(Trust(), description="A trust region by divergence, in place of the clip.")
    step_weight: Literal["none", "noise", "inverse_step", "jacobian", "inverse_lambda"] = Field(
        "none",
        description=(
            "Weight of a step: its std over the mean of all (noise, TempFlow-GRPO); 1 over its"
            " length (inverse_step, GRPO-Guard), over the size of d mean / d v (jacobian, Precise),"
            " or over that in units of its std (inverse_lambda, Flash-GRPO)."
        ),
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        *TransitionConfig.rules,
        of_gaussian("ratio", "guard"),
        of_gaussian("step_weight", "noise", "jacobian", "inverse_lambda"),
        of_gaussian("trust.threshold"),
        Rule(
            ("algorithm.ratio", "algorithm.sde"),
            "{0} compares the tokens of masked generators, and {1} is a step of flows; use"
            " algorithm.ratio=ppo",
            when=lambda ratio, step: ratio == "token" and step not in sde.UNMASKING,
        ),
        Rule(
            ("algorithm.clip", "algorithm.trust.threshold"),
            "{1} takes its place",
            when=lambda _, threshold: threshold is not None,
            kind="unread",
        ),
        Rule(
            ("algorithm.trust.threshold", "algorithm.trust.divergence", "policy.latent_shape"),
            lambda bound, _, shape: (
                f"algorithm.trust.threshold={bound:g} bounds a mean over latent dims, and will not"
                f" be reached; a threshold of their sum is divided by {math.prod(shape):,}, which"
                f" gives {bound / math.prod(shape):.1g}"
            ),
            # at 1e-2 a step of 10,000 dims is exp(100) times as likely as before
            when=lambda bound, how, _: bound is not None and how == "scaled" and bound > 1e-2,
            kind="warn",
        ),
    )

    @property
    def by_place(self) -> bool:
        return self.ratio == "token"

    @model_validator(mode="after")
    def check_shrink(self) -> GRPOConfig:
        if self.shrink > 1 and (self.credit != "leaf" or self.timestep_fraction < 1):
            raise ValueError(
                f"algorithm.shrink={self.shrink} scores steps together that credit={self.credit}"
                f" with timestep_fraction={self.timestep_fraction} tells apart; use credit=leaf and"
                " timestep_fraction=1, or shrink=1"
            )
        return self

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

    @model_validator(mode="after")
    def check_trust(self) -> GRPOConfig:
        if (bound := self.trust.threshold) is None:
            return self
        other = f"dual_clip={self.dual_clip}" if self.dual_clip else f"ratio={self.ratio}"
        if self.dual_clip or self.ratio != "ppo":
            raise ValueError(
                f"algorithm.{other} and algorithm.trust.threshold={bound} are two trust regions;"
                " leave one of them out"
            )
        if self.tree.correlation is not None or is_learned(self.sde) or self.sde == "cps":
            kind = f"sde={self.sde}"
            if self.tree.correlation is not None:
                kind = f"tree.correlation={self.tree.correlation}"
            raise ValueError(
                f"algorithm.trust.threshold={bound} reads each step's own noise and Gaussian"
                f" density, and algorithm.{kind} has none; use sde=flow_sde, dance_sde, precise or"
                " ddim without tree.correlation"
            )
        return self


class GRPO(transitions.TransitionMethod):
    Config = GRPOConfig
    config: GRPOConfig

    def __init__(self, config: GRPOConfig):
        super().__init__(config)
        self.couples = "sample" if config.ratio == "sequence" else "row"
        self.clip_size = config.trust.threshold or min(config.clip)
        self.together = config.shrink if config.by_place else 1  # steps of a row
        self.rescored = self.together > 1  # no rollout has seen these grids with these tokens

    def most_rows(self, plan: Plan, group: int) -> int:
        rows = super().most_rows(plan, group)
        return rows // plan.edges * math.ceil(plan.edges / self.together) if self.rescored else rows

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        rows = super().columns(rollout, advantages, seed=seed, iteration=iteration)
        if self.together > 1:
            rows = shrunk(rollout, rows, self.together)
        data, how = dict(rows.data), self.config.step_weight
        if how != "none":
            data["scale"] = step_weight(how, rollout, rows)
        # the old policy's own value is 0, but for rounding in low precision
        if self.config.ratio == "guard":
            data["normed"] = torch.zeros_like(rows.log_prob)
        if self.config.trust.threshold:
            data["moved"] = torch.zeros_like(rows.log_prob)
        if self.couples == "sample":
            data["unit"] = rows.sample
        return Columns(data)

    def more_scores(
        self, rollout: Rollout, batch: Columns, step: Transition, y: Tensor
    ) -> dict[str, Tensor]:
        """What a step's own noise tells about the way of its mean, d = mean - old mean, since the
        old mean is the stored state y minus the noise that made it, (n,) each.

        With ratio=guard GRPO-Guard's log-ratio, normed = mean(noise * d) over latent dims, which is
        std * (log p - log p_old + mean((d / std)^2) / 2). With trust the divergence, moved.
        """
        c = self.config
        if c.ratio != "guard" and c.trust.threshold is None:
            return {}
        noise = transitions.own_noise(batch, y)
        way = step.mean - y + step.std * noise  # (n, *L) fp32
        if c.ratio == "guard":
            return {"normed": (noise * way).flatten(1).mean(1)}
        if c.trust.divergence == "scaled":
            way = way / step.std
        square = way.square().flatten(1).mean(1)
        if c.trust.divergence == "velocity":  # the mean moves by Q where v moves by 1
            return {"moved": square / pulls(rollout, batch).square()}
        return {"moved": square / 2}

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        """Sum over rows of weight * (max(-A ratio, -A clipped ratio) + kl_weight * KL).

        A row is a denoising step, n of them. scores, (n,) each: log_prob of the stored step under
        the policy; normed with ratio=guard; moved with a trust region; kl with a weight. batch,
        (n,) each: log_prob under the policy that sampled, and its normed or moved, 0 but for
        rounding; adv; weight; unit, the sample of a row, with ratio=sequence. With ratio=token
        these are (n, places), adv (n, 1), and weight is 1 at the tokens that a step reveals.
        """
        c, (low, high) = self.config, self.config.clip

        # Ratio of the new policy to the old one: one a step, or one for all steps of a sample.
        step_log_ratio = log_ratio = scores["log_prob"] - batch.log_prob  # (n,)
        if c.ratio == "guard":
            log_ratio = scores["normed"] - batch.normed
        if c.ratio == "sequence":
            log_ratio = base.mean_of_unit(log_ratio, batch.host("unit"))

        # Clip: beyond its range no gradient pushes the ratio further.
        trust: dict[str, Tensor] = {}
        if c.trust.threshold is not None:
            term, stopped, trust = self.trusted(log_ratio, scores["moved"] - batch.moved, batch.adv)
        elif c.ratio == "log":
            clipped = log_ratio.clamp(-low, high)
            term, stopped = base.clipped_surrogate(log_ratio, clipped, batch.adv)
        else:
            ratio = log_ratio.exp()  # (n,)
            clipped = ratio.clamp(1 - low, 1 + high)
            term, stopped = base.clipped_surrogate(ratio, clipped, batch.adv)  # (n,), (n,) 0 or 1
        if c.dual_clip is not None:  # a step that became likely must not be punished without end
            bound = -batch.adv * (math.log(c.dual_clip) if c.ratio == "log" else c.dual_clip)
            past = (batch.adv < 0) & (term > bound)
            term, stopped = torch.where(past, bound, term), torch.where(past, 1.0, stopped)
        if c.step_weight != "none":
            term = term * expand(batch.scale, term)

        # KL to the reference, outside the clip: it has a gradient also where the clip stops the
        # ratio.
        metrics = {
            "policy/clip_fraction": stopped,
            "policy/log_ratio": log_ratio.abs(),
            "policy/approx_kl": step_log_ratio.square() / 2,
            **trust,
        }
        if c.kl_weight:
            term = base.plus_kl(term, scores, metrics, c.kl_weight)
        out = base.summed(term, metrics, batch)
        if trust:
            out.metrics["trust/divergence_max"] = trust["trust/divergence"].detach().max()
        return out

    def trusted(
        self, log_ratio: Tensor, moved: Tensor, adv: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Flow-DPPO's terms (n,), eq. 14 with the mean over dims: -A ratio, but 0 for a step that
        moved (n,) at least the threshold and would move further; 1 for these; and metrics."""
        ratio = log_ratio.detach().exp()
        outside = moved.detach() >= self.config.trust.threshold
        out = outside & torch.where(adv > 0, ratio > 1, (ratio < 1) & (adv < 0))
        # chosen, not multiplied: 0 times an infinite ratio would be NaN, in its gradient too
        term = torch.where(out, 0.0, -adv * torch.where(out, 0.0, log_ratio).exp())
        share = {
            "outside": outside,
            "dropped_good": out & (adv > 0),
            "dropped_bad": out & (adv < 0),
        }
        metrics = {f"trust/{name}": rows.float() for name, rows in share.items()}
        metrics |= {"trust/divergence": moved, "trust/ratio": ratio, "trust/square": ratio.square()}
        return term, out.float(), metrics


def shrunk(rollout: Rollout, rows: Columns, s: int) -> Columns:
    """Join the rows of s consecutive steps of a sample (TraceRL's shrinkage, arXiv:2509.06949) into
    one, from the start of the first to the end of the last: weight is 1 at all tokens revealed in
    between. rows: every step of each sample, in order."""
    steps = rollout.plan.edges
    assert len(rows) % steps == 0, "a sample has a row for every step"
    step = torch.arange(len(rows), device=rows.src.device) % steps
    first = torch.nonzero(step % s == 0).flatten()
    last = first + (steps - 1 - step[first]).clamp(max=s - 1)
    ends = {name: rows.data[name][last] for name in ("dst", "sigma_next")}
    data = {name: value[first] for name, value in rows.data.items()} | ends
    revealed = rollout.at(data["src"]) != rollout.at(data["dst"])
    return Columns(data | {"weight": revealed.flatten(1).to(rows.weight)})


ALGORITHM = GRPO
