"""Methods on the forward process: finished samples are noised again and velocities compared there.

They need clean samples and rewards alone: any solver, no log-probs, and media from a file do as
well as media just made. With x at noise level s of a sample x0, x = (1-s) x0 + s eps, the error of
a velocity is m = mean((v - u)^2) over latent dims, u = eps - x0.

docs/algorithms/index.md says what they all do differently from papers and code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from torch import Tensor

from flowrl.algorithms.common import base
from flowrl.runtime.rule import read_when
from flowrl.samplers import keys
from flowrl.samplers import plan as plans
from flowrl.samplers.sigmas import shift
from flowrl.types import Advantages, Columns, Plan, Rollout, Solver, expand

LOWEST = 0.01  # least continuous noise level; nearer to the data, errors of v say nothing
CONTINUOUS = ("logit_normal", "uniform")
# refusal of diversity.entropy by methods that do not weight samples by their advantages
SCALED_ALIKE = (
    "diversity.entropy={diversity.entropy:g} scales all advantages of a group alike, and"
    " {algorithm.label} reads only the order of samples in their group; set it to 0"
)
Levels = Literal["schedule", "stratified", "logit_normal", "uniform"]


class ForwardConfig(base.Credit, base.Anchor):
    solver: Solver = Field("dpm2", description="ODE solver of rollouts.")
    levels: Levels = Field(
        "schedule",
        description=(
            "Which noise levels are trained: levels of the schedule, drawn without replacement;"
            " one from each of its equal parts (stratified); or continuous levels."
        ),
    )
    share: Literal["sample", "group", "all"] = Field(
        "sample", description="Which samples are trained at the same noise levels."
    )
    steps: PositiveInt | None = Field(
        None,
        description=(
            "How many noise levels each sample is trained at; none: 99% of the levels in use,"
            " rounded down."
        ),
    )
    first: NonNegativeInt = Field(
        0, description="First step of the schedule whose level is used; 1 leaves out pure noise."
    )
    range: float = Field(
        1.0, gt=0, le=1, description="Share of the schedule, from noise on, whose levels are used."
    )
    shift: Annotated[PositiveFloat, read_when("algorithm.levels", *CONTINUOUS)] = Field(
        1.0,
        description=(
            "Continuous levels s become shift s / (1 + (shift - 1) s): above 1, more noise."
        ),
    )
    error: Literal["velocity", "eps", "x0"] = Field(
        "velocity",
        description=(
            "Quantity whose error is trained, which is m times 1 (velocity), (1-s)^2 (eps) or s^2"
            " (x0)."
        ),
    )

    @model_validator(mode="after")
    def check_levels(self) -> ForwardConfig:
        if self.levels in CONTINUOUS and (self.first, self.range) != (0, 1):
            raise ValueError(
                f"algorithm.first and range choose levels of the schedule, and levels={self.levels}"
                " is continuous; use shift"
            )
        return self


Slope = Annotated[
    NonNegativeFloat,
    Field(description="Growth of the old policy's decay with each optimizer step."),
]
Decay = Annotated[float, Field(ge=0, lt=1, description="Largest decay of the old policy.")]


class Follower(base.Options):
    """How the old policy follows the trained one, with a decay that grows by steps."""

    old_slope: Slope = 0.001
    old_decay: Decay = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Noised:
    """Rows of the loss, noised and ready for the network."""

    x0: Tensor  # (n, *L) clean samples
    x: Tensor  # (n, *L) noised to sigma
    level: Tensor  # (n,) fp64 noise levels
    sigma: Tensor  # (n, 1, ...) fp32, the same levels, shaped to multiply latents
    target: Tensor  # (n, *L) u = eps - x0
    scale: Tensor  # (n,) factor of m that gives the error named by the config
    # (n, *L) weights of latents in the error, of mean 1 in each row; None: all count alike
    mask: Tensor | None = None

    def error(self, v: Tensor) -> Tensor:
        """Mean square error of v (n, *L) in the config's terms -> (n,)."""
        return self.scale * distance(v, self.target, self.mask)


# (view of the weights, guidance) -> that view's velocity (n, *L) at the same rows, without gradient
OtherVelocity = Callable[..., Tensor]


class ForwardMethod(base.Anchored):
    """Plan, rows, noise and velocities of a method on finished samples. A subclass adds the loss,
    and `compared` where that reads more than the error."""

    Config: ClassVar[type[ForwardConfig]] = ForwardConfig
    config: ForwardConfig
    guidance: Literal["none"] | None = "none"
    shared_noise = False  # whether the members of a group get the same noise
    compares_reference = False  # whether the loss reads errors of the reference
    left_out = float("nan")  # NaN, because a sample at the mean has 0, too
    reads_old = False  # whether the loss reads velocities of the old policy

    def __init__(self, config: ForwardConfig):
        super().__init__(config)
        old = {"old"} if self.reads_old or self.rollout_view == "old" else set()
        self.needs = frozenset({"leaves"} | old | self.anchor_needs(self.compares_reference))

    def plan(self, sigmas: Tensor, *, sampler: base.Sampler, iteration: int, seed: int) -> Plan:
        return plans.ode(sigmas, solver=self.config.solver, init=sampler.init_noise)

    def check(self, plan: Plan) -> None:
        self.check_anchor()
        self.draws(plan)

    def most_rows(self, plan: Plan, group: int) -> int:
        return self.draws(plan) * min(group, self.config.keep or group)

    # ------------------------------------------------------------------ noise levels

    def grid(self, plan: Plan) -> Tensor:
        """The noise levels that may be trained, (K,) fp64, falling: those at which the plan calls
        the network, within `first` and `range`."""
        c, levels = self.config, torch.unique(plan.sigma).flip(0)
        last = int(len(levels) * c.range + 1e-9)
        if c.first >= last:
            raise ValueError(
                f"algorithm.first={c.first}, range={c.range} leave none of"
                f" sampler.steps={len(levels)} noise levels; lower first or raise range"
            )
        return levels[c.first : last]

    def draws(self, plan: Plan) -> int:
        """How many noise levels a sample is trained at."""
        c = self.config
        if c.levels in CONTINUOUS:
            return 1 if c.steps is None else c.steps
        levels = len(self.grid(plan))
        whole_schedule = c.levels == "schedule" and (c.first, c.range) == (0, 1)
        most = max(int(levels * 0.99), 1) if whole_schedule else levels
        draws = most if c.steps is None else c.steps
        if draws > most:
            raise ValueError(
                f"algorithm.steps={draws} noise levels per sample, but"
                f" sampler.steps={torch.unique(plan.sigma).numel()} offers {most}; choose at most"
                " that"
            )
        return draws

    def drawn_levels(self, plan: Plan, names: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the noise levels of names (n,) -> levels (n, draws) fp64, numbers of the draws (n,
        draws) int64. Names are keys: samples of one name are trained at the same levels."""
        c, draws = self.config, self.draws(plan)
        place = torch.arange(draws, device=names.device)
        if c.levels == "schedule":
            grid = self.grid(plan).to(names.device)
            level = keys.permutation(names, len(grid))[:, :draws]
            return grid[level], level
        u = keys.uniform(keys.key("level", names[:, None], place))
        if c.levels == "stratified":
            grid = self.grid(plan).to(names.device)
            bounds = torch.arange(draws + 1, device=names.device) * len(grid) // draws
            level = bounds[:-1] + (u * bounds.diff()).long()
            return grid[level], level
        u = (place + u) / draws  # one draw from each of `draws` equal parts
        s = u if c.levels == "uniform" else torch.special.ndtri(u.clamp(1e-9, 1 - 1e-9)).sigmoid()
        # Stable Diffusion was trained on noise levels up to 0.94 only
        most = float(plan.sigma.max())
        return shift(s, c.shift).clamp(LOWEST, most), place.expand(len(names), -1)

    # ------------------------------------------------------------------ rows

    def chosen(self, rollout: Rollout, advantages: Advantages) -> tuple[Tensor, Tensor]:
        """The samples that are trained, (m,) int64, and what their column adv holds, (m,) fp32."""
        leaf = torch.nonzero(has_signal(advantages)).flatten()
        return leaf, advantages.leaf[leaf]

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        """One row for each sample and noise level. unit: equal for the rows of one group at one
        draw; members: size of the group."""
        at_data = not bool(rollout.state_sigma[rollout.leaf].any())
        assert at_data, "what is trained on is data, at sigma 0"
        leaf, adv = self.chosen(rollout, advantages)
        sigma, noise_key = self.drawn(rollout, leaf, seed, iteration)
        _, group, members = torch.unique(rollout.group, return_inverse=True, return_counts=True)
        group, state, draws = group[leaf], rollout.leaf[leaf], sigma.shape[1]
        of_sample = {
            "prompt": rollout.prompt[state],
            "weight": torch.ones_like(adv),
            "adv": adv,
            "state": state,
            "members": members[group],
            **base.gate_column(advantages.kl_gate, leaf),
        }
        rows = {name: value.repeat_interleave(draws) for name, value in of_sample.items()}
        rows["sigma"] = sigma.flatten().to(rollout.state_sigma)
        rows["noise_key"] = noise_key.flatten()
        rows["unit"] = (group[:, None] * draws + torch.arange(draws, device=group.device)).flatten()
        return Columns(rows)

    def drawn(
        self, rollout: Rollout, leaf: Tensor, seed: int, iteration: int
    ) -> tuple[Tensor, Tensor]:
        """Noise levels of samples (m,), and the keys of their noise -> (m, draws) fp64, int64."""
        purpose = type(self).__name__.lower()
        sample = keys.key(purpose, seed, iteration, rollout.leaf_key[leaf])
        of_group = keys.key(purpose, seed, iteration, group_keys(rollout)[leaf])
        everyone = torch.full_like(sample, keys.key(purpose, seed, iteration))
        names = {"sample": sample, "group": of_group, "all": everyone}[self.config.share]
        sigma, number = self.drawn_levels(rollout.plan, names)
        noise = of_group if self.shared_noise else sample
        return sigma, keys.key("eps", noise[:, None], number)

    # ------------------------------------------------------------------ scores

    def score(
        self, policy: base.VelocityField, rollout: Rollout, batch: Columns
    ) -> dict[str, Tensor]:
        """The scores of `compared`; kl (n,), the mean square distance to the reference, where
        kl_weight is above 0; old_deviation (n,), that to the old policy, where it is read."""
        rows = self.noised(rollout, batch)
        v = self.velocity(policy, rollout, batch, rows.x)

        deviation: dict[str, Tensor] = {}

        def other(view: str, guidance: float | str = "none") -> Tensor:
            found = self.other(policy, view, rollout, batch, rows.x, v, guidance)
            if view == "old":
                deviation["old_deviation"] = distance(v.detach(), found)
            return found

        scores = self.compared(rows, v, other) | deviation
        if self.config.kl_weight and "kl" not in scores:
            scores["kl"] = distance(v, other(self.anchor, self.reference_guidance))
        return scores

    def compared(self, rows: Noised, v: Tensor, other: OtherVelocity) -> dict[str, Tensor]:
        """Named (n,) numbers that the loss reads, of the policy's velocity v (n, *L) and those of
        other views of its weights; here the flow-matching error."""
        return {"error": rows.error(v)}

    def noised(self, rollout: Rollout, batch: Columns) -> Noised:
        """Noise the sample of each row again: x = (1 - sigma) x0 + sigma eps."""
        x0 = rollout.at(batch.state)
        eps = keys.gaussian(batch.host("noise_key"), x0.shape[1:], x0.device)
        sigma = expand(batch.sigma, x0).to(x0)
        s = sigma.flatten()
        scales = {"velocity": torch.ones_like(s), "eps": (1 - s).square(), "x0": s.square()}
        x = (1 - sigma) * x0 + sigma * eps
        return Noised(
            x0=x0,
            x=x,
            level=batch.sigma,
            sigma=sigma,
            target=eps - x0,
            scale=scales[self.config.error],
            mask=batch.data.get("mask"),
        )

    def velocity(
        self,
        policy: base.VelocityField,
        rollout: Rollout,
        batch: Columns,
        x: Tensor,
        guidance: float | str = "none",
    ) -> Tensor:
        """The velocity (n, *L) fp32 of the policy's present view."""
        v = policy.velocity(x, batch.sigma, rollout.cond, batch.prompt, guidance=guidance)
        return v.float()

    @torch.no_grad()
    def other(
        self,
        policy: base.VelocityField,
        view: str,
        rollout: Rollout,
        batch: Columns,
        x: Tensor,
        v: Tensor,
        guidance: float | str = "none",
    ) -> Tensor:
        """The velocity (n, *L) of another view, without gradient. Where that has the same weights,
        it is v itself, and no network is called."""
        if view != "reference" and guidance == "none" and policy.same("default", view):
            return v.detach()
        with policy.view(view):
            return self.velocity(policy, rollout, batch, x, guidance)

    def follow(self, step: int, iteration: int) -> dict[str, float]:
        c, decays = self.config, super().follow(step, iteration)
        if "old" in self.needs and isinstance(c, Follower):
            decays["old"] = min(c.old_slope * step, c.old_decay)
        return decays

    def fit(self, policy: base.VelocityField, rollout: Rollout, batch: Columns) -> Tensor:
        rows = self.noised(rollout, batch)
        return -distance(self.velocity(policy, rollout, batch, rows.x), rows.target)


def distance(v: Tensor, other: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean square difference of velocities over latent dims, weighed by a mask: (n, *L) -> (n,)."""
    square = (v - other).square()
    return (square if mask is None else mask * square).flatten(1).mean(1)


def has_signal(advantages: Advantages) -> Tensor:
    """Which samples have an advantage that is neither 0 nor NaN, (B,) bool."""
    return advantages.leaf.nan_to_num(0.0) != 0


def members_with_signal(rollout: Rollout, advantages: Advantages) -> tuple[Tensor, Tensor]:
    """Every valid member of the groups in which any has a signal, in the form of
    ForwardMethod.chosen; for losses that compare members."""
    signal = torch.unique(rollout.group[has_signal(advantages)])
    leaf = torch.nonzero(torch.isin(rollout.group, signal) & ~advantages.leaf.isnan()).flatten()
    return leaf, advantages.leaf[leaf]


def group_keys(rollout: Rollout) -> Tensor:
    """Name of each sample's group, (B,) int64: the smallest of its members' keys, so that the name
    depends on nothing else."""
    groups, place = torch.unique(rollout.group, return_inverse=True)
    largest = torch.full((len(groups),), torch.iinfo(torch.int64).max, device=place.device)
    return largest.scatter_reduce(0, place, rollout.leaf_key, "amin")[place]


def softmax(logits: Tensor, unit: Tensor) -> Tensor:
    """exp(logits) (n,) over its sum within each unit."""
    place = torch.unique(unit, return_inverse=True)[1].to(logits.device, non_blocking=True)
    # the unit's largest logit is subtracted, so that no unit underflows as a whole
    top = torch.full_like(logits, -torch.inf).scatter_reduce(0, place, logits, "amax")
    e = (logits - top[place]).exp()
    return e / base.sums(e, unit)[0][place]


def ramp(n: int, start: float, slope: float, end: float, after: int = 0) -> float:
    """Decay after n optimizer steps: 0 up to `after`, then start + slope (n - after) up to end."""
    return 0.0 if n < after else min(start + slope * (n - after), end)
