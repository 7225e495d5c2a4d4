"""Shared by methods that train denoising steps: which plan is walked, which credit its edges get,
and the scores of a stored step.

Log-probs are means over latent dims: a ratio is the true one to the power 1 / D, and clip is 1e-4
or so.

Departures that every such method shares:
* The last step is always ODE (Flow-GRPO samples it with noise of std < 0.01 and does not train it;
  DanceGRPO decodes its x0 prediction, which is the same).
* Transitions with zero advantage are left out, KL included (Flow-GRPO's filter without its random
  refill); the loss is the mean over what is left.
* kl="exact" is the Gaussian KL per latent dim (Flow-GRPO's paper and its Wan code); "flow_grpo" is
  that times the step (its SD3 and FLUX code); "velocity" the mean square of the velocities'
  difference (the drifts'); "mean" that of the steps' means, which holds the step (Flow-Factory's
  x-based KL). Their weights do not transfer.
* Two places of a batch with equal prompt text are two groups (Flow-GRPO merges them by text).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from flowrl import advantages as credit
from flowrl.algorithms.common import base
from flowrl.algorithms.common.prune import Prune, pruned, prunes_all
from flowrl.runtime.read_when import read_above, read_when, read_with
from flowrl.samplers import keys, sde, tree
from flowrl.samplers import plan as plans
from flowrl.types import Advantages, Columns, Plan, Rewards, Rollout, Transition

FORKING = ("branch", "tree", "fan", "granular")  # plans whose samples share steps
OWN_STATISTICS = ("depth", "siblings", "granular")  # credit rules that z-score edges, not samples

planned = partial(read_when, "algorithm.plan")
scheduled = partial(read_when, "algorithm.window.schedule")
credited = partial(read_when, "algorithm.credit")
WINDOWED = planned("window", "tree") | planned("branch") & read_when(
    "algorithm.tree.noisy", "window"
)


class Window(base.Options):
    """Where the steps lie that are SDE when others are ODE."""

    schedule: Literal[
        "progressive", "random", "geometric", "decay", "exp_decay", "frozen", "adaptive"
    ] = Field(
        "progressive",
        description=(
            "How the window moves; adaptive: to where branches differ most, measured (plan=tree)."
        ),
    )
    size: PositiveInt = Field(4, description="SDE steps in the window; the depth of plan=tree.")
    low: int = Field(0, ge=0, description="First step the window may hold.")
    high: PositiveInt | None = Field(
        None,
        description=(
            "The window ends before this step; none: before the last step, which stays ODE."
        ),
    )
    every: Annotated[PositiveInt, scheduled("progressive", "decay", "exp_decay")] = Field(
        25, description="Iterations at one place (the longest stay, for decay and exp_decay)."
    )
    every_min: Annotated[PositiveInt, scheduled("decay")] = Field(1, description="Shortest stay.")
    stride: Annotated[PositiveInt, scheduled("progressive", "decay", "exp_decay", "adaptive")] = (
        Field(1, description="Steps the window moves at a time.")
    )
    rate: Annotated[PositiveFloat, scheduled("geometric", "exp_decay")] = Field(
        0.1, description="Rate of exp_decay per step beyond the knee; ratio of geometric, below 1."
    )
    knee: Annotated[int, scheduled("exp_decay")] = Field(
        13, ge=0, description="Step at which the decay sets in."
    )


class Tree(base.Options):
    """Where trajectories fork."""

    children: Annotated[PositiveInt, planned(*FORKING)] = Field(
        2, description="Children of a node that forks."
    )
    splits: Annotated[tuple[int, ...], planned("branch")] = Field(
        (0, 3, 6, 9), description="Steps at which every node forks."
    )
    noisy: Annotated[Literal["all", "window"], planned("branch")] = Field(
        "all", description="SDE steps beside the splits; window: BranchGRPO-Mix."
    )
    correlation: Annotated[NonNegativeFloat | None, planned("branch")] = Field(
        None, description="s of correlated siblings; none: independent."
    )
    steps: Annotated[tuple[int, ...] | None, planned("fan", "granular")] = Field(
        None, description="Steps that fork off the trunk; none: all but the last."
    )
    strides: Annotated[tuple[PositiveInt, ...], planned("granular")] = Field(
        (1, 2, 3), description="Step lengths of the ODE paths that end a branch."
    )


class TransitionConfig(base.Credit, base.Anchor):
    plan: Literal["full", "window", "branch", "tree", "fan", "granular"] = Field(
        "full",
        description=(
            "SDE at every step but the last, in a window, or with forks: at splits, in a window, or"
            " off an ODE trunk."
        ),
    )
    window: Annotated[Window, WINDOWED] = Field(
        Window(), description="Where the window lies, and how it moves."
    )
    tree: Tree = Field(Tree(), description="The forks of plan=branch, tree, fan and granular.")
    sde: Literal["flow_sde", "dance_sde", "cps", "ddim"] = Field(
        "flow_sde", description="The SDE step; sampler.eta is its noise level."
    )
    tail: Annotated[float | None, WINDOWED] = Field(
        None,
        gt=0,
        le=1,
        description="MixGRPO-Flash: share of the ODE steps kept after the window; none: all.",
    )
    tail_count: Annotated[Literal["paper", "code"], read_with("algorithm.tail")] = Field(
        "paper", description="How tail is rounded: up (paper) or as the reference code counts."
    )
    credit: Literal["leaf", "depth", "backup", "td", "siblings", "granular"] = Field(
        "leaf",
        description=(
            "Advantage of a step: of its leaves; z-scored at each depth; backed up by log-prob;"
            " leaves plus the gain over the node it starts from; z-scored among siblings; the same"
            " for each stride, summed."
        ),
    )
    fusion: Annotated[Literal["mean", "path", "recursive"], credited("depth")] = Field(
        "mean", description="How leaf rewards are fused upwards."
    )
    scope: Annotated[Literal["prompt", "tree"], credited("depth")] = Field(
        "prompt", description="z-scores over all trees of a prompt, or each alone."
    )
    temperature: Annotated[PositiveFloat, credited("backup")] = Field(
        1.0, description="Of the softmax over siblings' mean log-probs."
    )
    prune: Prune = Field(
        Prune(), description="Edges of plan=branch that are walked but not trained."
    )
    timestep_fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of its SDE steps that each sample trains, drawn at random.",
    )
    kl: Annotated[
        Literal["exact", "flow_grpo", "velocity", "mean"], read_above("algorithm.kl_weight", 0)
    ] = Field("exact", description="Which distance to the reference kl_weight multiplies.")
    detach_uncond: bool = Field(
        False, description="No gradient through the unconditional branch of guidance."
    )

    @model_validator(mode="after")
    def check_credit(self) -> TransitionConfig:
        if self.credit in OWN_STATISTICS and self.std != "group":
            raise ValueError(
                f"algorithm.std={self.std} has no meaning for credit={self.credit}, which z-scores"
                " edges; use std=group"
            )
        if self.keep is not None and (self.plan in FORKING or self.credit != "leaf"):
            raise ValueError(
                f"algorithm.keep={self.keep} leaves out whole samples, which plan={self.plan} with"
                f" credit={self.credit} would not; use it with plan=full or window and credit=leaf"
            )
        if self.tail is not None and self.plan in ("fan", "granular"):
            raise ValueError(
                f"algorithm.tail={self.tail} shortens what follows the last noisy step, and"
                f" plan={self.plan} has several; drop it"
            )
        if self.tree.correlation is not None and self.plan != "branch":
            raise ValueError(
                f"algorithm.tree.correlation={self.tree.correlation} is of plan=branch, and the"
                f" plan is {self.plan}; drop it"
            )
        if self.timestep_fraction < 1 and self.plan in FORKING:
            raise ValueError(
                f"algorithm.timestep_fraction={self.timestep_fraction} draws steps of each sample,"
                f" and samples of plan={self.plan} share them; set it to 1"
            )
        return self


class TransitionMethod(base.Anchored):
    """Plan, credit, rows and scores; a subclass adds the loss."""

    Config = TransitionConfig
    config: TransitionConfig
    compares_reference = False  # whether the loss reads log-probs of the reference

    def __init__(self, config: TransitionConfig):
        super().__init__(config)
        self.needs = frozenset({"log_prob"} | self.anchor_needs(self.compares_reference))

    # ------------------------------------------------------------------ what is walked

    def plan(self, sigmas: Tensor, *, sampler: base.Sampler, iteration: int, seed: int) -> Plan:
        c, t = self.config, self.config.tree
        last = len(sigmas) - 2
        common: dict[str, Any] = {"eta": sampler.eta, "sde": c.sde, "init": sampler.init_noise}
        forks = range(last) if t.steps is None else t.steps
        if c.plan == "full":
            out = plans.full(sigmas, **common)
        elif c.plan == "window":
            out = plans.window(
                sigmas, start=self._start(sigmas, iteration, seed), size=c.window.size, **common
            )
        elif c.plan == "tree":
            start = self._start(sigmas, iteration, seed)
            out = plans.tree(
                sigmas, start=start, depth=c.window.size, children=t.children, **common
            )
        elif c.plan == "branch":
            start = self._start(sigmas, iteration, seed) if t.noisy == "window" else 0
            noisy = range(start, start + c.window.size) if t.noisy == "window" else None
            out = plans.branch(
                sigmas,
                splits=t.splits,
                children=t.children,
                correlation=t.correlation,
                noisy=noisy,
                **common,
            )
        elif c.plan == "fan":
            out = plans.fan(sigmas, steps=forks, children=t.children, **common)
        else:
            out = plans.granular(
                sigmas, steps=forks, children=t.children, strides=t.strides, **common
            )
        self.check(out)
        return out if c.tail is None else plans.compress(out, tail=c.tail, count=c.tail_count)

    def _start(self, sigmas: Tensor, iteration: int, seed: int) -> int:
        """First step of the window."""
        w, steps = self.config.window, len(sigmas) - 1
        if w.schedule != "adaptive":
            return plans.window_start(**w.model_dump(), iteration=iteration, steps=steps, seed=seed)
        first = plans.window_start(
            "frozen", iteration, steps=steps, size=w.size, low=w.low, high=w.high
        )
        places = range(first, (w.high or steps - 1) - w.size + 1, w.stride)
        unseen = float("inf")  # each step is looked at once before places are compared
        gain = {
            p: sum(self.memory.get(f"tree/variance/{i}", unseen) for i in range(p, p + w.size))
            for p in places
        }
        return max(places, key=lambda p: (gain[p], -p))

    def check(self, plan: Plan) -> None:
        c = self.config
        self.check_anchor()
        if not bool(plan.trained.any()):
            raise ValueError(
                "GRPO needs SDE steps and this plan has none: set sampler.eta > 0 (0.7 for"
                " flow_sde) and sampler.steps >= 2, or train with algorithm=nft, which needs no SDE"
            )
        if c.credit == "siblings" and c.plan not in FORKING and plan.init == "sample":
            raise ValueError(
                f"algorithm.credit=siblings compares children of one node, and plan={c.plan} never"
                " forks; set algorithm.plan=tree, or credit=leaf"
            )
        if c.plan in FORKING and c.tree.children == 1 and c.credit in ("siblings", "granular"):
            raise ValueError(
                f"algorithm.tree.children=1 leaves credit={c.credit} nothing to compare: an only"
                " child has no siblings; set children to 2 or more, or credit=leaf"
            )
        if c.credit == "depth" and c.scope == "tree" and plan.leaves == 1:
            raise ValueError(
                f"algorithm.scope=tree compares the leaves of one tree, and a tree of plan={c.plan}"
                " has a single one here; use scope=prompt, or a plan that forks, as"
                " algorithm.plan=branch"
            )
        if c.credit == "granular" and c.plan != "granular":
            raise ValueError(
                f"algorithm.credit=granular sums over strides, which plan={c.plan} has not; set"
                " algorithm.plan=granular"
            )
        if c.window.schedule == "adaptive" and c.plan != "tree":
            raise ValueError(
                "algorithm.window.schedule=adaptive measures how children differ at each step of"
                f" the window, and plan={c.plan} does not fork at all of them; set"
                " algorithm.plan=tree"
            )
        if c.prune.active and c.plan != "branch":
            raise ValueError(
                f"algorithm.prune leaves out edges of plan=branch, and the plan is {c.plan}; set"
                " algorithm.plan=branch"
            )
        if c.prune.depth and prunes_all(c.prune, plan, c.tree.splits):
            raise ValueError(
                f"algorithm.prune.depth={c.prune.depth} leaves out every noisy step of this plan,"
                " so that nothing would be trained; choose less"
            )

    def most_rows(self, plan: Plan, group: int) -> int:
        each = max(int(int(plan.trained.sum()) * self.config.timestep_fraction + 1e-9), 1)
        return each * min(group, self.config.keep or group) // plan.leaves

    # ------------------------------------------------------------------ credit

    def leaf_advantages(self, rewards: Rewards, group: Tensor) -> Tensor:
        """z-scores, or the outcome itself where the credit rule has statistics of its own; NaN of
        an invalid sample."""
        own = self.config.credit in OWN_STATISTICS and self.config.combine == "rewards"
        return (
            torch.where(rewards.valid, self.outcome(rewards, group).total, torch.nan)
            if own
            else super().leaf_advantages(rewards, group)
        )

    def advantages(self, rollout: Rollout, leaf: Tensor) -> Advantages:
        """Invalid samples have leaf NaN or 0 and enter no transition."""
        c, valid = self.config, ~torch.isnan(leaf)
        stats: dict[str, Any] = {"ddof": c.ddof, "eps": c.eps, "clip": c.adv_clip}
        if c.credit == "depth":
            rewards = Rewards(raw={}, weights={}, total=leaf, valid=valid)
            return credit.branch(rollout, rewards, weighting=c.fusion, scope=c.scope, **stats)
        if c.credit in OWN_STATISTICS:
            rule = credit.siblings if c.credit == "siblings" else credit.granular
            own = credit.group_relative(leaf, rollout.group, valid=valid, **stats)
            return Advantages(leaf=own, transition=rule(rollout, leaf, valid=valid, **stats))
        if c.credit == "backup":
            edge = credit.tree_backup(rollout, leaf, temperature=c.temperature)
        else:
            edge = credit.spread(rollout, leaf)
            if c.credit == "td":
                edge = (edge + credit.td(rollout, leaf)).clamp(-c.adv_clip, c.adv_clip)
        return Advantages(leaf=leaf, transition=edge)

    def observe(self, rollout: Rollout, rewards: Rewards) -> dict[str, float]:
        """Of plans that fork: how much of the variance of rewards each step decides."""
        if self.config.plan not in FORKING:
            return {}
        return {
            f"tree/variance/{step}": value
            for step, value in credit.decisiveness(
                rollout, rewards.total, valid=rewards.valid
            ).items()
        }

    def remember(self, observed: dict[str, float]) -> None:
        if self.config.window.schedule == "adaptive":
            for name, value in observed.items():
                self.memory[name] = 0.8 * self.memory.get(name, value) + 0.2 * value

    # ------------------------------------------------------------------ rows

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        assert rollout.log_prob is not None and advantages.transition is not None
        kept = (
            rollout.trained
            & self.chosen(rollout, advantages)
            & self._drawn(rollout, seed, iteration)
        )
        if self.config.prune.active:
            kept &= ~pruned(
                self.config.prune,
                rollout,
                advantages,
                splits=self.config.tree.splits,
                iteration=iteration,
            )
        rows = torch.nonzero(kept).flatten()
        names = ("src", "dst", "sigma", "sigma_next", "eta", "log_prob", "noise_key")
        data = {name: getattr(rollout, name)[rows] for name in names}
        adv = advantages.transition[rows]
        prompt = rollout.prompt[data["src"]]
        return Columns(
            {
                "prompt": prompt,
                "weight": torch.ones_like(adv),
                "adv": adv,
                "sample": samples(rollout)[rows],
                **data,
            }
        )

    def chosen(self, rollout: Rollout, advantages: Advantages) -> Tensor:
        """(N,) bool: transitions with a signal."""
        return advantages.transition != 0

    def _drawn(self, rollout: Rollout, seed: int, iteration: int) -> Tensor:
        """DanceGRPO: a random floor(fraction * K) of the K trained transitions of each sample ->
        (N,) bool."""
        if self.config.timestep_fraction == 1:
            return torch.ones_like(rollout.trained)
        top = samples(rollout)
        draw = keys.uniform(keys.key("timesteps", seed, iteration, rollout.noise_key))
        order = draw.argsort()
        order = order[top[order].argsort(stable=True)]  # by sample, then by draw
        _, place, count = torch.unique(top[order], return_inverse=True, return_counts=True)
        rank = torch.arange(len(order), device=order.device) - (count.cumsum(0) - count)[place]
        most = (count * self.config.timestep_fraction + 1e-9).floor().clamp(min=1)
        return torch.zeros_like(rollout.trained).index_put((order,), rank < most[place])

    # ------------------------------------------------------------------ scores

    def network_rows(self, batch: Columns) -> Tensor:
        return batch.src

    def transition(
        self, policy: Any, rollout: Rollout, batch: Columns
    ) -> tuple[Transition, Tensor]:
        """The step that the policy's present view takes from each row's state -> (transition, v (n,
        *L)). Each state is evaluated once."""
        states, place = torch.unique(batch.src, return_inverse=True)
        x = rollout.states[states]
        v = policy.velocity(
            x,
            rollout.state_sigma[states],
            rollout.cond,
            rollout.prompt[states],
            guidance=rollout.guidance,
            detach_uncond=self.config.detach_uncond,
        ).float()[place]
        return (
            sde.transition(rollout.plan, v, x[place], batch.sigma, batch.sigma_next, batch.eta),
            v,
        )

    def score(self, policy: Any, rollout: Rollout, batch: Columns) -> dict[str, Tensor]:
        """log_prob (n,) of the stored step; log_prob_ref (n,) where the loss reads it; kl (n,) per
        latent dim when it has a weight."""
        y, c = rollout.states[batch.dst], self.config
        step, v = self.transition(policy, rollout, batch)
        scores = {
            "log_prob": sde.log_prob(rollout.plan, step, y),
            **self.more_scores(rollout, batch, step, y),
        }
        if self.anchor not in self.needs:
            return scores
        with torch.no_grad(), policy.view(self.anchor):
            other, v_ref = self.transition(policy, rollout, batch)
        if self.compares_reference:
            scores["log_prob_ref"] = sde.log_prob(rollout.plan, other, y)
        if c.kl_weight:
            moved = step.mean - other.mean
            gap = {"velocity": v - v_ref, "mean": moved}.get(c.kl, moved / step.std / 2**0.5)
            kl = gap.square().flatten(1).mean(1)
            scores["kl"] = (
                kl * (batch.sigma - batch.sigma_next).to(kl) if c.kl == "flow_grpo" else kl
            )
        return scores

    def more_scores(
        self, rollout: Rollout, batch: Columns, step: Transition, y: Tensor
    ) -> dict[str, Tensor]:
        """Further scores (n,) of the step from its transition and the stored state y (n, *L) at its
        end."""
        return {}

    def fit(self, policy: Any, rollout: Rollout, batch: Columns) -> Tensor:
        return sde.log_prob(
            rollout.plan, self.transition(policy, rollout, batch)[0], rollout.states[batch.dst]
        )


class GroupMethod(TransitionMethod):
    """A loss that compares the samples of a group: all of those with a signal anywhere are trained,
    together."""

    couples = "group"

    def chosen(self, rollout: Rollout, advantages: Advantages) -> Tensor:
        return of_groups_with_signal(rollout, advantages)

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        rows = super().columns(rollout, advantages, seed=seed, iteration=iteration)
        return Columns({**rows.data, "unit": rows.prompt})


def needs_whole_samples(config: TransitionConfig, name: str) -> None:
    """ValueError where samples share steps, for losses that compare whole samples."""
    if config.plan in FORKING or config.credit != "leaf":
        raise ValueError(
            f"{name} compares whole samples; algorithm.plan={config.plan} with"
            f" credit={config.credit} does not fit: use plan=full, credit=leaf"
        )
    if config.keep is not None:
        raise ValueError(
            f"{name} compares all samples of a group; algorithm.keep={config.keep} would leave some"
            " out: set it to null"
        )


def samples(rollout: Rollout) -> Tensor:
    """(N,) first stored transition of the path that each transition lies on: on a path without
    forks, its sample."""
    top = torch.where(
        rollout.parent < 0,
        torch.arange(len(rollout.parent), device=rollout.parent.device),
        rollout.parent,
    )
    while bool((top != top[top]).any()):
        top = top[top]
    return top


def own_noise(batch: Columns, like: Tensor) -> Tensor:
    """The standard normal that made each row's step, (n, *L), of plans whose siblings are
    independent."""
    return tree.own_noise(lambda k: keys.gaussian(k, like.shape[1:], like.device), batch.noise_key)


def of_groups_with_signal(rollout: Rollout, advantages: Advantages) -> Tensor:
    """(N,) bool: transitions of valid samples, of groups in which any advantage differs from 0. A
    sample at the mean is compared too."""
    assert advantages.transition is not None
    prompt = rollout.prompt[rollout.src]
    valid = credit.spread(rollout, (~torch.isnan(advantages.leaf)).float()) > 0
    return valid & torch.isin(prompt, torch.unique(prompt[advantages.transition != 0]))


def first_rows(place: Tensor) -> Tensor:
    """Index of the first row of each value 0..m-1 in place (n,) -> (m,)."""
    rows = torch.arange(len(place), device=place.device)
    return torch.full((int(place.max()) + 1,), len(place), device=place.device).scatter_reduce_(
        0, place, rows, "amin"
    )
