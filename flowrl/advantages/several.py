"""Several rewards made into one advantage, and which members of a group count."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from flowrl.advantages.group import FLAT, Std, group_relative, std_of_all
from flowrl.types import Rewards


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
    """Advantage of several rewards -> (B,) fp32, clipped last.

    "rewards": z-score of the weighted sum (Flow-GRPO). "advantages": weighted sum of one z-score
    per reward, which no reward's scale can dominate (DanceGRPO, MixGRPO). "gdpo": that sum divided
    by its standard deviation over all samples given (arXiv:2601.05242). Each reward enters with the
    value that is counted, which is 0 behind a closed gate; one that is absent from a sample adds
    nothing to it, and its z-score is over the samples that have it. Statistics of the sum are those
    of each domain by itself.
    """
    z_score = partial(group_relative, group=group, valid=rewards.valid, std=std, ddof=ddof, eps=eps)
    if how == "rewards":
        return z_score(rewards.total, clip=clip, within=rewards.within)
    weights = {name: weight for name, weight in rewards.weights.items() if weight != 0}
    parts = [weight * z_score(rewards.terms[name], clip=None) for name, weight in weights.items()]
    total = torch.stack(parts).sum(0) if parts else torch.zeros_like(rewards.total)
    if how == "gdpo":
        # the sum is not centred again: flat groups would get the mean's rounding as a signal
        scale = std_of_all(total.double(), rewards.valid, ddof, rewards.within)
        total = torch.where(scale >= FLAT, total / (scale + eps), 0.0).float()
    return total if clip is None else total.clamp(-clip, clip)


def best_worst(adv: Tensor, group: Tensor, keep: int) -> Tensor:
    """DanceGRPO's best-of-N, the best and worst samples of each group: (B,), (B,) -> (B,) bool.

    Keeps the ceil(keep/2) highest and the floor(keep/2) lowest; the earlier one of two equal
    advantages counts as the lower. A group of at most `keep` samples is kept whole.
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
    """Share of its group's other members that each value exceeds: (B,), (B,) -> (B,) in [0, 1].

    Pref-GRPO's reward (arXiv:2508.20751), with comparisons made by a point-wise score. A tie counts
    1/2; NaN is compared with nothing and stays NaN; a value alone in its group gets 0.5. fp32.
    """
    out = torch.full(values.shape, torch.nan, device=values.device)
    for g in group.unique():
        rows = torch.nonzero((group == g) & ~values.isnan()).flatten()
        v, others = values[rows], len(rows) - 1
        wins = (v[:, None] > v).sum(1) + 0.5 * ((v[:, None] == v).sum(1) - 1)
        out[rows] = wins / others if others else torch.full_like(v, 0.5)
    return out


def place_in_group(group: Tensor) -> Tensor:
    """How many equal values come before each one: (n,) -> (n,) int64."""
    order = group.argsort(stable=True)
    ordered = group[order]
    rows = torch.arange(len(order), device=order.device)
    place = torch.empty_like(order)
    place[order] = rows - torch.searchsorted(ordered, ordered)
    return place
