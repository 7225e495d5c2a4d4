"""BranchGRPO's pruning (arXiv:2509.06040): edges that are walked but not trained.

Their leaves still get rewards. docs/algorithms/branch_grpo.md says how it differs from the code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.common.transition_config import Prune, prunable
from flowrl.types import Advantages, Plan, Rollout


def pruned(
    prune: Prune,
    rollout: Rollout,
    advantages: Advantages,
    *,
    splits: tuple[int, ...],
    iteration: int,
) -> Tensor:
    """Which transitions are left out, (N,) bool."""
    assert advantages.transition is not None
    last = max(splits)
    depth = rollout.plan.depth.to(rollout.edge.device)[rollout.edge]
    out = torch.zeros_like(rollout.trained)
    if prune.depth:
        first = first_left_out(prune, last, int(depth.max()), iteration)
        out |= (depth >= first) & (depth < first + prune.depth)
    if prune.width == "parent":
        out |= (depth >= last) & ~best_child(rollout, advantages.transition, depth, last)
    elif prune.width == "extremes":
        extremes = extreme_leaves(advantages.leaf, rollout.group, prune.leaves)
        out |= (depth >= last) & ~leads_to(rollout, extremes)
    return out


def prunes_all(prune: Prune, plan: Plan, splits: tuple[int, ...]) -> bool:
    """Whether `depth` covers every noisy step of a branching plan, so that none is trained."""
    first = int(plan.depth[plan.trained].min())
    return first >= max(splits) and prune.depth >= prunable(plan, splits)


def first_left_out(prune: Prune, last: int, deepest: int, iteration: int) -> int:
    """The first depth that is left out in an iteration."""
    moves = iteration // prune.every
    reach = max(deepest + 1 - prune.depth - last, 0)
    return last + (max(reach - moves, 0) if prune.slide == "earlier" else moves % (reach + 1))


def best_child(rollout: Rollout, adv: Tensor, depth: Tensor, last: int) -> Tensor:
    """Which transitions lie at or below the best of the siblings that start at the last split, (N,)
    bool."""
    at = torch.nonzero(depth == last).flatten()
    best: dict[int, int] = {}
    for row, src in zip(at.tolist(), rollout.src[at].tolist(), strict=True):
        if src not in best or adv[row] > adv[best[src]]:
            best[src] = row
    kept = torch.zeros_like(rollout.trained)
    kept[torch.tensor(list(best.values()), dtype=torch.int64, device=kept.device)] = True
    for d in range(last + 1, int(depth.max()) + 1):
        rows = torch.nonzero((depth == d) & (rollout.parent >= 0)).flatten()
        kept[rows] = kept[rollout.parent[rows]]
    return kept


def extreme_leaves(leaf: Tensor, group: Tensor, count: int) -> Tensor:
    """Which leaves are among the `count` highest or lowest of their group, (B,) bool."""
    chosen = torch.zeros(len(leaf), dtype=torch.bool, device=leaf.device)
    for g in torch.unique(group).tolist():
        rows = torch.nonzero((group == g) & ~torch.isnan(leaf)).flatten()
        order = rows[leaf[rows].argsort(stable=True)]
        chosen[order[:count]] = chosen[order[-count:]] = True
    return chosen


def leads_to(rollout: Rollout, leaves: Tensor) -> Tensor:
    """Which transitions have one of the chosen leaves (B,) below them, (N,) bool."""
    out = torch.zeros_like(rollout.trained)
    at = rollout.leaf_edge[leaves]
    while bool((at >= 0).any()):
        at = at[at >= 0]
        out[at] = True
        at = rollout.parent[at]
    return out
