"""GRPO on denoising steps: PPO's clipped ratio of each SDE step's density, group-relative advantages, optional closed-form KL.

Serves Flow-GRPO (arXiv:2505.05470), Flow-GRPO-Fast, DanceGRPO (arXiv:2505.07818), MixGRPO and MixGRPO-Flash (arXiv:2507.21802):
they differ in plan, SDE and statistics. Log-probs are means over latent dims: a ratio is the true one to the power 1 / D, and clip is
1e-4 or so.

Departures from papers and reference code:
* The last step is always ODE (Flow-GRPO samples it with noise of std < 0.01 and does not train it; DanceGRPO decodes its x0 prediction,
  which is the same).
* Transitions with zero advantage are left out, KL included (Flow-GRPO's filter without its random refill); the loss is the mean over
  what is left.
* kl="exact" is the Gaussian KL per latent dim (Flow-GRPO's paper and its Wan code); "flow_grpo" is that times the step (its SD3 and FLUX
  code); "velocity" the mean square of the velocities' difference.
* DanceGRPO: samples are not trained one by one but share forwards.
* Two places of a batch with equal prompt text are two groups (Flow-GRPO merges them by text).
* MixGRPO: reward weights are not divided by their sum; the window never shrinks at the end of the schedule, and never holds the last
  step (the code uses l + w clipped to T - 2); the random schedule is seeded, hence the same on all processes; the training log-prob
  never resamples its transition.
* Flow-GRPO-Fast: one window an iteration for all processes, so that the members of a group share it (the code draws one per pipeline call).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from flowrl import advantages as credit
from flowrl.algorithms import _base
from flowrl.samplers import keys, sde
from flowrl.samplers import plan as plans
from flowrl.types import Advantages, Columns, LossOutput, Plan, Rewards, Rollout, Transition


class Window(_base.Options):
    """Which steps are SDE when plan is "window"."""

    schedule: Literal["progressive", "random", "decay", "exp_decay", "frozen"] = Field("progressive", description="How the window moves.")
    size: PositiveInt = Field(4, description="SDE steps in the window.")
    low: int = Field(0, ge=0, description="First step the window may hold.")
    high: PositiveInt | None = Field(None, description="The window ends before this step; none: before the last step, which stays ODE.")
    every: PositiveInt = Field(25, description="Iterations at one place (the longest stay, for decay and exp_decay).")
    every_min: PositiveInt = Field(1, description="Shortest stay of the decay schedule.")
    stride: PositiveInt = Field(1, description="Steps the window moves at a time.")
    rate: PositiveFloat = Field(0.1, description="Rate of exp_decay per step beyond the knee.")
    knee: int = Field(13, ge=0, description="Step at which exp_decay sets in.")


class GRPOConfig(_base.Options):
    plan: Literal["full", "window"] = Field("full", description="SDE at every step but the last, or in a window only.")
    window: Window = Field(Window(), description="The window, when plan is window.")
    sde: Literal["flow_sde", "dance_sde", "cps", "ddim"] = Field("flow_sde", description="The SDE step; sampler.eta is its noise level.")
    tail: float | None = Field(None, gt=0, le=1, description="MixGRPO-Flash: share of the ODE steps kept after the window; none: all.")
    tail_count: Literal["paper", "code"] = Field("paper", description="How tail is rounded: up (paper) or as the reference code counts.")
    timestep_fraction: float = Field(1.0, gt=0, le=1, description="Share of its SDE steps that each sample trains, drawn at random.")
    clip: tuple[PositiveFloat, PositiveFloat] = Field((1e-4, 1e-4), description="The ratio is clipped to 1 - first .. 1 + second.")
    adv_clip: PositiveFloat = Field(5.0, description="Advantages are clipped to this size.")
    combine: Literal["rewards", "advantages"] = Field("rewards", description="Several rewards: z-score of the sum, or sum of z-scores.")
    std: Literal["group", "global"] | None = Field("group", description="An advantage is divided by the spread of its group, all, or none.")
    ddof: Literal[0, 1] = Field(0, description="Degrees of freedom taken from the standard deviation.")
    eps: NonNegativeFloat = Field(1e-4, description="Added to the standard deviation.")
    ratio: Literal["ppo"] = Field("ppo", description="How old and new policy are compared: the clipped ratio of each transition.")
    kl: Literal["exact", "flow_grpo", "velocity"] = Field("exact", description="Which distance to the reference kl_weight multiplies.")
    kl_weight: NonNegativeFloat = Field(0.0, description="Weight of the distance to the untrained model; 0: it is not computed.")
    detach_uncond: bool = Field(False, description="No gradient through the unconditional branch of guidance.")


class GRPO(_base.Algorithm):
    Config = GRPOConfig
    config: GRPOConfig

    def __init__(self, config: GRPOConfig):
        super().__init__(config)
        self.needs = frozenset({"log_prob", "reference"} if config.kl_weight else {"log_prob"})

    def plan(self, sigmas: Tensor, *, sampler: _base.Sampler, iteration: int, seed: int) -> Plan:
        c = self.config
        common: dict[str, Any] = {"eta": sampler.eta, "sde": c.sde, "init": sampler.init_noise}
        if c.plan == "full":
            out = plans.full(sigmas, **common)
        else:
            w = c.window
            start = plans.window_start(**w.model_dump(), iteration=iteration, steps=len(sigmas) - 1, seed=seed)
            out = plans.window(sigmas, start=start, size=w.size, **common)
        self.check(out)
        return out if c.tail is None else plans.compress(out, tail=c.tail, count=c.tail_count)

    def check(self, plan: Plan) -> None:
        if not bool(plan.trained.any()):
            raise ValueError(
                "GRPO needs SDE steps and this plan has none: set sampler.eta > 0 (0.7 for flow_sde) and sampler.steps >= 2, or train with "
                "algorithm=nft, which needs no SDE"
            )

    def rows_per_copy(self, plan: Plan) -> int:
        return max(int(int(plan.trained.sum()) * self.config.timestep_fraction + 1e-9), 1)

    def leaf_advantages(self, rewards: Rewards, group: Tensor) -> Tensor:
        c = self.config
        return credit.combine(rewards, group, how=c.combine, std=c.std, ddof=c.ddof, eps=c.eps, clip=c.adv_clip)

    def advantages(self, rollout: Rollout, leaf: Tensor) -> Advantages:
        return Advantages(leaf=leaf, transition=credit.spread(rollout, leaf))

    def columns(self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int) -> Columns:
        assert rollout.log_prob is not None and advantages.transition is not None
        kept = rollout.trained & (advantages.transition != 0) & self._drawn(rollout, seed, iteration)
        rows = torch.nonzero(kept).flatten()
        names = ("src", "dst", "sigma", "sigma_next", "eta", "log_prob")
        data = {name: getattr(rollout, name)[rows] for name in names}
        adv = advantages.transition[rows]
        return Columns({"prompt": rollout.prompt[data["src"]], "weight": torch.ones_like(adv), "adv": adv, **data})

    def _drawn(self, rollout: Rollout, seed: int, iteration: int) -> Tensor:
        """DanceGRPO: a random floor(fraction * K) of the K trained transitions of each sample -> (N,) bool."""
        if self.config.timestep_fraction == 1:
            return torch.ones_like(rollout.trained)
        top = torch.where(rollout.parent < 0, torch.arange(len(rollout.parent), device=rollout.parent.device), rollout.parent)
        while bool((top != top[top]).any()):
            top = top[top]
        draw = keys.uniform(keys.key("timesteps", seed, iteration, rollout.noise_key))
        order = draw.argsort()
        order = order[top[order].argsort(stable=True)]  # by sample, then by draw
        _, place, count = torch.unique(top[order], return_inverse=True, return_counts=True)
        rank = torch.arange(len(order), device=order.device) - (count.cumsum(0) - count)[place]
        most = (count * self.config.timestep_fraction + 1e-9).floor().clamp(min=1)
        return torch.zeros_like(rollout.trained).index_put((order,), rank < most[place])

    def network_rows(self, batch: Columns) -> Tensor:
        return batch.src

    def score(self, policy: Any, rollout: Rollout, batch: Columns) -> dict[str, Tensor]:
        """log_prob (n,) of the stored step, and kl (n,) per latent dim when it has a weight. Each distinct state is evaluated once."""
        states, place = torch.unique(batch.src, return_inverse=True)
        x, y = rollout.states[states], rollout.states[batch.dst]

        def velocity() -> Tensor:
            v = policy.velocity(
                x, rollout.state_sigma[states], rollout.cond, rollout.prompt[states],
                guidance=rollout.guidance, detach_uncond=self.config.detach_uncond,
            )  # fmt: skip
            return v.float()[place]

        def transition(v: Tensor) -> Transition:
            return sde.transition(rollout.plan, v, x[place], batch.sigma, batch.sigma_next, batch.eta)

        v = velocity()
        step = transition(v)
        scores = {"log_prob": sde.log_prob(rollout.plan, step, y)}
        if self.config.kl_weight:
            with torch.no_grad(), policy.view("reference"):
                v_ref = velocity()
            if self.config.kl == "velocity":
                kl = (v - v_ref).square().flatten(1).mean(1)
            else:
                kl = ((step.mean - transition(v_ref).mean) / step.std).square().flatten(1).mean(1) / 2
            scores["kl"] = kl * (batch.sigma - batch.sigma_next).to(kl) if self.config.kl == "flow_grpo" else kl
        return scores

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        low, high = self.config.clip
        log_ratio = scores["log_prob"] - batch.log_prob
        ratio = log_ratio.exp()
        term = torch.maximum(-batch.adv * ratio, -batch.adv * ratio.clamp(1 - low, 1 + high))
        metrics = {
            "policy/clip_fraction": ((ratio < 1 - low) & (batch.adv < 0) | (ratio > 1 + high) & (batch.adv > 0)).float(),
            "policy/log_ratio": log_ratio.abs(),
        }
        if "kl" in scores:
            term = term + self.config.kl_weight * scores["kl"]
            metrics["policy/kl"] = scores["kl"]
        return LossOutput(
            loss=(batch.weight * term).sum(), metrics={name: (batch.weight * value.detach()).sum() for name, value in metrics.items()}
        )


ALGORITHM = GRPO
