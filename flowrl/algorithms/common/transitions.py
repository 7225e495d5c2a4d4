"""Methods on denoising steps: which plan is walked, which credit its edges get, scores of a step.

Log-probs are means over latent dims: a ratio is the true one to the power 1 / D, and clip is 1e-4
or so. kl="exact" is the Gaussian KL per latent dim, "flow_grpo" that times the length of the step,
"velocity" the mean square difference of the velocities, "mean" that of the steps' means.

docs/algorithms/index.md says what they all do differently from papers and code.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl import advantages as credit
from flowrl.algorithms.common import base
from flowrl.algorithms.common.planning import check_plan, make_plan, window_start, windowed
from flowrl.algorithms.common.prune import pruned
from flowrl.algorithms.common.transition_config import (
    FORKING,
    GAUSSIAN_KL,
    OWN_STATISTICS,
    TransitionConfig,
)
from flowrl.samplers import keys, sde
from flowrl.samplers.common import forest
from flowrl.types import Advantages, Columns, Plan, Rewards, Rollout, Transition, expand


class TransitionMethod(base.Anchored):
    """Plan, credit, rows and scores of a method on denoising steps. A subclass adds the loss."""

    Config = TransitionConfig
    config: TransitionConfig
    compares_reference = False  # whether the loss reads log-probs of the reference

    def __init__(self, config: TransitionConfig):
        super().__init__(config)
        self.needs = frozenset({"log_prob"} | self.anchor_needs(self.compares_reference))
        self.windowed = windowed(config)
        self.unmasks = config.sde in sde.UNMASKING
        self.planned: tuple[object, Plan] | None = None  # settings of the newest plan, and the plan

    # ------------------------------------------------------------------ what is walked

    def plan(self, sigmas: Tensor, *, sampler: base.Sampler, iteration: int, seed: int) -> Plan:
        """The plan of an iteration, which is the same object while its window stays in place."""
        start = 0
        if self.windowed:
            start = window_start(
                self.config, len(sigmas) - 1, iteration=iteration, seed=seed, memory=self.memory
            )
        settings = (tuple(sigmas.tolist()), sampler.eta, sampler.init_noise, start)
        if self.planned is None or self.planned[0] != settings:
            self.planned = (settings, make_plan(self.config, sigmas, sampler, start))
        return self.planned[1]

    def check(self, plan: Plan) -> None:
        self.check_anchor()
        check_plan(self.config, plan)

    def most_rows(self, plan: Plan, group: int) -> int:
        each = max(int(int(plan.trained.sum()) * self.config.timestep_fraction + 1e-9), 1)
        return each * min(group, self.config.keep or group) // plan.leaves

    # ------------------------------------------------------------------ credit

    def leaf_advantages(self, rewards: Rewards, group: Tensor) -> Tensor:
        """z-scores (B,), or the outcome itself where the credit rule has statistics of its own; NaN
        for an invalid sample."""
        c = self.config
        if c.credit not in OWN_STATISTICS or c.combine != "rewards":
            return super().leaf_advantages(rewards, group)
        scored = rewards if c.outcome == "reward" else self.win_rates(rewards, group)
        return torch.where(rewards.valid, scored.total, torch.nan)

    def advantages(self, rollout: Rollout, leaf: Tensor) -> Advantages:
        """Credit of each transition by algorithm.credit. Invalid samples have leaf NaN or 0 and
        enter no transition."""
        c, valid = self.config, ~torch.isnan(leaf)
        stats: dict[str, Any] = {"ddof": c.ddof, "eps": c.eps, "clip": c.adv_clip}
        if c.credit == "depth":
            rewards = Rewards(raw={}, weights={}, total=leaf, valid=valid)
            return credit.branch(rollout, rewards, weighting=c.fusion, scope=c.scope, **stats)
        if c.credit in OWN_STATISTICS:
            rules = {"siblings": credit.siblings, "granular": credit.granular}
            rule = rules.get(c.credit, credit.dense)
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
        """How much of the variance of rewards each step decides, for plans that fork; and for dense
        what each step gains, and the reward of whole trajectories."""
        if self.config.plan not in FORKING:
            return {}
        if self.config.plan == "dense":
            return credit.step_gains(rollout, rewards)
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
        kept = rollout.trained & self.chosen(rollout, advantages)
        if self.config.timestep_fraction < 1:
            kept &= self.drawn(rollout, seed, iteration)
        if self.config.plan == "branch" and self.config.prune.active:
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
        gate = advantages.kl_gate  # a step that several samples share has the mean of theirs
        held = None if gate is None else credit.spread(rollout, gate)
        weight, gates = torch.ones_like(adv), base.gate_column(held, rows)
        if rollout.plan.reduction == "none":  # each token that a step reveals is a term
            revealed = rollout.at(data["src"]) != rollout.at(data["dst"])
            weight, adv = revealed.flatten(1).to(adv), adv[:, None]
            gates = {name: gate[:, None] for name, gate in gates.items()}
        return Columns(
            {
                "prompt": prompt,
                "weight": weight,
                "adv": adv,
                "sample": samples(rollout)[rows],
                **data,
                **gates,
            }
        )

    def chosen(self, rollout: Rollout, advantages: Advantages) -> Tensor:
        """Which transitions have a signal and are trained, (N,) bool."""
        return advantages.transition != 0

    def drawn(self, rollout: Rollout, seed: int, iteration: int) -> Tensor:
        """Draw floor(fraction * K) of each sample's K trained transitions (DanceGRPO,
        arXiv:2505.07818) -> (N,) bool."""
        top = samples(rollout)
        draw = keys.uniform(keys.key("timesteps", seed, iteration, rollout.noise_key))
        order = draw.argsort()
        order = order[top[order].argsort(stable=True)]  # sorted by sample, then by draw
        _, place, count = torch.unique(top[order], return_inverse=True, return_counts=True)
        rank = torch.arange(len(order), device=order.device) - (count.cumsum(0) - count)[place]
        most = (count * self.config.timestep_fraction + 1e-9).floor().clamp(min=1)
        return torch.zeros_like(rollout.trained).index_put((order,), rank < most[place])

    # ------------------------------------------------------------------ scores

    def network_rows(self, batch: Columns) -> Tensor:
        return batch.host("src")

    def transition(
        self, policy: base.VelocityField, rollout: Rollout, batch: Columns
    ) -> tuple[Any, Tensor]:
        """The step that the policy's present view takes from each row's state (see sde.transition),
        and v (n, *L).

        Each state is evaluated once.
        """
        found = torch.unique(batch.host("src"), return_inverse=True)
        states, place = (t.to(rollout.prompt.device, non_blocking=True) for t in found)
        x = rollout.at(states)
        v = policy.velocity(
            x,
            rollout.state_sigma[states],
            rollout.cond,
            rollout.prompt[states],
            guidance=rollout.guidance,
            detach_uncond=self.config.detach_uncond,
        ).float()[place]
        plan, std = rollout.plan, None
        if self.config.learns_noise:
            std = policy.step_std(rollout.cond, batch.sigma, batch.prompt, batch.eta)
        where = batch.host("sigma"), batch.host("sigma_next"), batch.host("eta")
        return sde.transition(plan, v, x[place], *where, std), v

    def score(
        self, policy: base.VelocityField, rollout: Rollout, batch: Columns
    ) -> dict[str, Tensor]:
        """log_prob (n,) of the stored step; log_prob_ref (n,) where the loss compares with the
        reference; kl (n,), per latent dim, where it has a weight; and `more_scores`. Where each
        token is a term (plan.reduction="none"), log_prob and kl are (n, places)."""
        y, c = rollout.at(batch.dst), self.config
        step, v = self.transition(policy, rollout, batch)
        scores = {"log_prob": sde.log_prob(rollout.plan, step, y)}
        scores |= self.more_scores(rollout, batch, step, y)
        if self.anchor not in self.needs:
            return scores
        with torch.no_grad(), policy.view(self.anchor):
            other, v_ref = self.transition(policy, rollout, batch)
        if self.compares_reference:
            scores["log_prob_ref"] = sde.log_prob(rollout.plan, other, y)
        if c.kl_weight:
            if c.kl in GAUSSIAN_KL:
                gap = v - v_ref if c.kl == "velocity" else step.mean - other.mean
                kl = gap.square().flatten(1).mean(1)
            else:
                kl = step.kl(other, reduction=rollout.plan.reduction)
            scores["kl"] = (
                kl * expand((batch.sigma - batch.sigma_next).to(kl), kl)
                if c.kl == "flow_grpo"
                else kl
            )
        return scores

    def more_scores(
        self, rollout: Rollout, batch: Columns, step: Transition, y: Tensor
    ) -> dict[str, Tensor]:
        """Further scores (n,) of a step, from its transition and its stored end y (n, *L)."""
        return {}

    def fit(self, policy: base.VelocityField, rollout: Rollout, batch: Columns) -> Tensor:
        step, y = self.transition(policy, rollout, batch)[0], rollout.at(batch.dst)
        return sde.log_prob(rollout.plan, step, y, reduction="mean")


class GroupMethod(TransitionMethod):
    """A loss that compares the samples of a group: groups with a signal are trained as a whole."""

    couples = "group"

    def chosen(self, rollout: Rollout, advantages: Advantages) -> Tensor:
        return of_groups_with_signal(rollout, advantages)

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        rows = super().columns(rollout, advantages, seed=seed, iteration=iteration)
        return Columns({**rows.data, "unit": rows.prompt})


def samples(rollout: Rollout) -> Tensor:
    """The first stored transition of the path that each transition lies on, (N,) int64; on a path
    without forks it stands for the sample."""
    top = torch.where(
        rollout.parent < 0,
        torch.arange(len(rollout.parent), device=rollout.parent.device),
        rollout.parent,
    )
    while bool((top != top[top]).any()):
        top = top[top]
    return top


def own_noise(batch: Columns, like: Tensor) -> Tensor:
    """The standard normal noise that made each row's step, (n, *L), in plans whose siblings are
    independent."""
    noise = partial(keys.gaussian, shape=like.shape[1:], device=like.device)
    return forest.own_noise(noise, batch.host("noise_key"))


def of_groups_with_signal(rollout: Rollout, advantages: Advantages) -> Tensor:
    """Which transitions belong to valid samples of groups where any advantage differs from 0, (N,)
    bool; a sample at the mean is compared, too."""
    assert advantages.transition is not None
    prompt = rollout.prompt[rollout.src]
    valid = credit.spread(rollout, (~torch.isnan(advantages.leaf)).float()) > 0
    return valid & torch.isin(prompt, torch.unique(prompt[advantages.transition != 0]))


def first_rows(place: Tensor) -> Tensor:
    """The first row of each value 0..m-1 of place (n,) -> (m,) int64."""
    rows = torch.arange(len(place), device=place.device)
    return torch.full((int(place.max()) + 1,), len(place), device=place.device).scatter_reduce_(
        0, place, rows, "amin"
    )
