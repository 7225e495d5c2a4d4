"""Advantages within groups of samples: GRPO's z-score and what is made of several rewards.

All statistics are in fp64 and depend on (reward, group) alone: give them the whole iteration,
gathered over processes, and the result does not depend on how many there are. Invalid samples enter
no statistic.

Departures: best_worst selects within each group (DanceGRPO: within a process's whole batch). A
group with std < 1e-6 gets 0, which is BranchGRPO's rule (DanceGRPO and G2RPO divide by std + 1e-8
all the same).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.types import Rewards

Std = Literal["group", "global"] | None


def group_relative(
    rewards: Tensor,
    group: Tensor,
    *,
    valid: Tensor | None = None,
    std: Std = "group",
    ddof: int = 0,
    eps: float = 1e-4,
    clip: float | None = 5.0,
) -> Tensor:
    """A = (r - mean of its group) / (std + eps), clipped to +-clip: rewards (B,), group (B,) int ->
    (B,) fp32.

    std: "group" its own, "global" that of all rewards given (Flow-GRPO), None no division (Dr.
    GRPO). ddof: 0 or 1.
    A group with std < 1e-6 and invalid samples (valid False, or a NaN reward) get 0; invalid ones
    enter no statistic.
    """
    ok = usable(rewards, valid)
    r = torch.where(ok, rewards.double(), 0.0)
    _, g = torch.unique(group, return_inverse=True)
    centred, spread = standard(r, g, ok, ddof)
    if std == "global":
        scale = standard(r, torch.zeros_like(g), ok, ddof)[1]
    elif std in ("group", None):
        scale = spread
    else:
        raise ValueError(f'std="{std}" is unknown; choose "group", "global" or None')
    adv = centred if std is None else centred / (scale + eps)
    adv = torch.where(ok & (spread >= 1e-6), adv, 0.0)
    return (adv if clip is None else adv.clamp(-clip, clip)).float()


def standard(r: Tensor, g: Tensor, ok: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """(r - mean, std) of each value's group, over ok values: r (n,) fp64, g (n,) 0.. -> (n,),
    (n,)."""
    size = int(g.max()) + 1 if len(g) else 0
    zeros = torch.zeros(size, dtype=torch.float64, device=r.device)
    count = zeros.index_add(0, g, ok.double())
    mean = zeros.index_add(0, g, torch.where(ok, r, 0.0)) / count.clamp(min=1)
    centred = torch.where(ok, r - mean[g], 0.0)
    var = zeros.index_add(0, g, centred.square()) / (count - ddof).clamp(min=1)
    return centred, var.sqrt()[g]


def combine(
    rewards: Rewards,
    group: Tensor,
    *,
    how: Literal["rewards", "advantages", "gdpo"] = "rewards",
    std: Std = "group",
    ddof: int = 0,
    eps: float = 1e-4,
    clip: float | None = 5.0,
) -> Tensor:
    """Advantage of several rewards -> (B,) fp32.

    "rewards": z-score of the weighted sum (Flow-GRPO). "advantages": weighted sum of one z-score
    per reward (DanceGRPO, MixGRPO),
    which no reward's scale can dominate; clipped after the sum. "gdpo" (arXiv:2601.05242): that
    sum, z-scored over all samples given.
    """
    if how == "rewards":
        return group_relative(
            rewards.total, group, valid=rewards.valid, std=std, ddof=ddof, eps=eps, clip=clip
        )
    parts = [
        weight
        * group_relative(
            rewards.raw[name], group, valid=rewards.valid, std=std, ddof=ddof, eps=eps, clip=None
        )
        for name, weight in rewards.weights.items()
        if weight != 0
    ]
    total = torch.stack(parts).sum(0) if parts else torch.zeros_like(rewards.total)
    if (
        how == "gdpo"
        # the mean of each group is 0 already: subtracting its rounding would give flat groups a
        # signal
    ):
        spread = standard(total.double(), torch.zeros_like(group), rewards.valid, ddof)[1]
        total = torch.where(spread >= 1e-6, total / (spread + eps), 0.0).float()
    return total if clip is None else total.clamp(-clip, clip)


def best_worst(adv: Tensor, group: Tensor, keep: int) -> Tensor:
    """DanceGRPO's best-of-N: the ceil(keep/2) highest and floor(keep/2) lowest of each group: (B,),
    (B,) -> (B,) bool.

    Of equal advantages the earlier counts as the lower. A group of at most `keep` is kept whole.
    """
    if keep < 1:
        raise ValueError(
            f"keep={keep} must be at least 1: the samples of each group that are trained"
        )
    _, g, size = torch.unique(group, return_inverse=True, return_counts=True)
    order = adv.argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = place_in_group(g[order])
    return (rank < keep // 2) | (rank >= size[g] - (keep - keep // 2))


def win_rate(values: Tensor, group: Tensor) -> Tensor:
    """Share of the other members of its group that each value exceeds, ties counting a half: (B,),
    (B,) -> (B,) fp32 in [0, 1].

    Pref-GRPO's reward (arXiv:2508.20751), with the comparison made by a point-wise score. NaN
    neither compares nor counts; alone: 0.5.
    """
    out = torch.full(values.shape, torch.nan, device=values.device)
    for g in group.unique():
        rows = torch.nonzero((group == g) & ~values.isnan()).flatten()
        v, others = values[rows], len(rows) - 1
        wins = (v[:, None] > v).sum(1) + 0.5 * ((v[:, None] == v).sum(1) - 1)
        out[rows] = wins / others if others else torch.full_like(v, 0.5)
    return out


def usable(values: Tensor, valid: Tensor | None) -> Tensor:
    """(B,) bool: neither NaN nor marked invalid."""
    return ~torch.isnan(values) if valid is None else valid & ~torch.isnan(values)


def place_in_group(group: Tensor) -> Tensor:
    """How many equal values come before each one: (n,) -> (n,) int64."""
    order = group.argsort(stable=True)
    ordered = group[order]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - torch.searchsorted(
        ordered, ordered
    )
    return place
