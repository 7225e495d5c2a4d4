"""Neighbor GRPO (arXiv:2511.16955): a policy over the samples of a group, without noise in steps.

The group's samples begin at neighbouring noises and follow the ODE. From the state of one of them,
the anchor, the policy predicts the next state, and prefers each member by how near it is:
log pi(i) = log softmax_i(-|x_i - x_theta|^2 / temperature). Ratio and clip are PPO's, for every
member. At the policy that sampled the prediction is the anchor's own next state, so the old policy
costs no call.

docs/algorithms/neighbor_grpo.md says how it differs from the paper, which has no public code.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import pad

from flowrl.algorithms.common import base
from flowrl.runtime.rule import Rule
from flowrl.samplers import keys
from flowrl.samplers import plan as plans
from flowrl.types import Advantages, Columns, LossOutput, Plan, Rollout

CHUNK = 16  # rows whose members' states are compared at once


class NeighborConfig(base.Credit):
    spread: float = Field(
        0.3,
        gt=0,
        le=1,
        description=(
            "Share r of a sample's own noise in its start, sqrt(1 - r^2) e + r e_i; e is its"
            " group's."
        ),
    )
    anchors: PositiveInt = Field(
        4, description="How many samples of a group are anchors, from which the policy steps."
    )
    steps: PositiveInt | None = Field(
        None, description="How many steps are trained, drawn for each group; none: all."
    )
    distance: Literal["mean", "sum"] = Field(
        "mean", description="Square distances are a mean or a sum (the paper's) over latent dims."
    )
    temperature: PositiveFloat = Field(
        1.0, description="Square distance at which a member is e times less likely."
    )
    power: PositiveFloat = Field(
        0.8, description="Advantages of a group are divided by (sum |A|^p)^(1/p) with this p."
    )
    clip: tuple[PositiveFloat, PositiveFloat] = Field(
        (1e-3, 1e-3), description="The ratio is clipped to 1 - first .. 1 + second."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        *base.Credit.rules,
        Rule(
            ("sampler.init_noise",),
            "{0} shares the noise from which samples start, and algorithm.spread says how;"
            " use sampler.init_noise=sample",
            when=lambda how: how != "sample",
        ),
        Rule(
            ("algorithm.anchors", "batch.group"),
            "{0} samples of a group are to be anchors, and {1}; choose at most as many",
            when=lambda anchors, group: anchors > group,
        ),
    )


class Neighbor(base.Algorithm):
    Config = NeighborConfig
    config: NeighborConfig
    needs = frozenset({"states"})

    def plan(self, sigmas: Tensor, *, sampler: base.Sampler, iteration: int, seed: int) -> Plan:
        return plans.neighbours(sigmas, spread=self.config.spread)

    def most_rows(self, plan: Plan, group: int) -> int:
        return self.drawn_steps(plan) * min(self.config.anchors, group)

    def drawn_steps(self, plan: Plan) -> int:
        return min(self.config.steps or plan.edges, plan.edges)

    def check(self, plan: Plan) -> None:
        if (self.config.steps or 0) > plan.edges:
            raise ValueError(
                f"algorithm.steps={self.config.steps} steps are to be trained, and"
                f" sampler.steps={plan.edges}; choose at most that"
            )

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        """A row for each anchor and trained step. adv (n,): the anchor's advantage; ends (n, G):
        the members' states after the step; prefer (n, G): their advantages A'; old (n, G): their
        log-probs under the policy that sampled. G is the largest group; a member that is missing
        or invalid has ends -1."""
        adv, path = advantages.leaf, paths(rollout)
        signal = torch.unique(rollout.group[adv.nan_to_num() != 0])
        member = torch.isin(rollout.group, signal) & ~adv.isnan()
        width = int(torch.bincount(rollout.group[member]).max()) if len(signal) else 1
        found: list[tuple[Tensor, ...]] = []
        for g in signal.tolist():
            leaf = torch.nonzero(member & (rollout.group == g)).flatten()
            name = keys.key("neighbor", seed, iteration, rollout.leaf_key[leaf])
            anchor = leaf[name.argsort()[: self.config.anchors]]
            step = keys.permutation(name.min(), path.shape[1])[: self.drawn_steps(rollout.plan)]
            at = path[anchor][:, step]  # (anchors, steps)
            ends = pad(rollout.dst[path[leaf][:, step]].T, (0, width - len(leaf)), value=-1)
            prefer = pad(scaled(adv[leaf], self.config.power), (0, width - len(leaf)))
            own = adv[anchor].repeat_interleave(len(step))
            rows = at.numel()
            found.append((at.flatten(), ends.repeat(len(anchor), 1), prefer.expand(rows, -1), own))
        found = found or [(path[:0, 0], rollout.dst[:0, None], adv[:0, None], adv[:0])]
        at, ends, prefer, own = map(torch.cat, zip(*found, strict=True))
        names = ("src", "dst", "sigma", "sigma_next", "noise_key")
        data = {name: getattr(rollout, name)[at] for name in names}
        # the policy that sampled predicts the anchor's own next state
        parts = zip(ends.split(CHUNK), data["dst"].split(CHUNK), strict=True)
        old = [self.log_policy(rollout, end, rollout.at(dst)) for end, dst in parts]
        more = {"ends": ends, "prefer": prefer, "old": torch.cat(old), "adv": own}
        prompt, weight = rollout.prompt[data["src"]], torch.ones_like(own)
        return Columns({"prompt": prompt, "weight": weight, **data, **more})

    def log_policy(self, rollout: Rollout, ends: Tensor, x: Tensor) -> Tensor:
        """log pi of members, whose states are the rows ends (n, G), at predictions x (n, *L) ->
        (n, G) fp32; -inf for a member that is missing (ends -1)."""
        n, width = ends.shape
        other = rollout.at(ends.clamp(min=0).flatten()).view(n, width, *x.shape[1:])
        square = (other.double() - x.double()[:, None]).square().flatten(2)
        square = square.mean(2) if self.config.distance == "mean" else square.sum(2)
        logits = (-square / self.config.temperature).masked_fill(ends < 0, -torch.inf)
        return logits.log_softmax(1).float()

    def predicted(self, policy: base.VelocityField, rollout: Rollout, batch: Columns) -> Tensor:
        """The anchor's next state by one Euler step of the policy's present view, (n, *L)."""
        x = rollout.at(batch.src)
        v = policy.velocity(
            x, batch.sigma, rollout.cond, batch.prompt, guidance=rollout.guidance
        ).float()
        step = (batch.sigma_next - batch.sigma).to(x).view(-1, *[1] * (x.ndim - 1))
        return x + step * v

    def score(
        self, policy: base.VelocityField, rollout: Rollout, batch: Columns
    ) -> dict[str, Tensor]:
        """log_prob (n, G) of the members at the anchor's predicted next state."""
        x = self.predicted(policy, rollout, batch)
        return {"log_prob": self.log_policy(rollout, batch.ends, x)}

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        """Sum over rows of weight * sum_i max(-A'_i ratio_i, -A'_i clipped_i)."""
        low, high = self.config.clip
        here = batch.ends >= 0
        # missing members: -inf - -inf would be NaN, in the gradient too
        now = torch.where(here, scores["log_prob"], 0.0)
        log_ratio = now - torch.where(here, batch.old, 0.0)  # (n, G)
        ratio = log_ratio.exp()
        term, stopped = base.clipped_surrogate(ratio, ratio.clamp(1 - low, 1 + high), batch.prefer)
        count = here.sum(1)
        metrics = {
            "policy/clip_fraction": stopped.sum(1) / count,
            "policy/log_ratio": log_ratio.abs().sum(1) / count,
            "policy/entropy": -(now.exp() * now * here).sum(1) / count.log().clamp(min=math.log(2)),
        }
        return base.summed(term.sum(1), metrics, batch)

    def advantages(self, rollout: Rollout, leaf: Tensor) -> Advantages:
        return Advantages(leaf=leaf)

    def fit(self, policy: base.VelocityField, rollout: Rollout, batch: Columns) -> Tensor:
        """Minus the mean square distance between the anchor's next state and the predicted one."""
        gap = self.predicted(policy, rollout, batch) - rollout.at(batch.dst)
        return -gap.square().flatten(1).mean(1)


def scaled(adv: Tensor, power: float) -> Tensor:
    """A / (sum |A|^p)^(1/p) over the members of a group, (G,)."""
    return adv / adv.abs().pow(power).sum().pow(1 / power)


def paths(rollout: Rollout) -> Tensor:
    """The stored transitions of each sample from noise to data, (B, T) int64; every step of its
    chain is stored."""
    steps = [rollout.leaf_edge]
    while bool((above := rollout.parent[steps[-1]]).ge(0).all()):
        steps.append(above)
    return torch.stack(steps[::-1], 1)


ALGORITHM = Neighbor
