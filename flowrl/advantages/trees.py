"""Credit on trees: from the advantages or rewards of leaves to one advantage per transition.

spread gives each transition the mean advantage of its leaves (itself, on a path); branch,
tree_backup and granular are the credit rules of BranchGRPO, TreeGRPO and G2RPO; siblings and td
compare transitions that leave one state, decisiveness says which depth decides. siblings, td and
granular group by the rows of rollout.states: there the copies of a prompt belong to one process.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.advantages.group import group_relative, place_in_group, usable
from flowrl.types import Advantages, Rewards, Rollout


def leaves_below(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
    """Every (leaf, transition above it) with the log-prob of the path between them -> (K,), (K,),
    (K,) fp64."""
    log_prob = None if rollout.log_prob is None else rollout.log_prob.double()
    at, leaf = (
        rollout.leaf_edge,
        torch.arange(len(rollout.leaf_edge), device=rollout.leaf_edge.device),
    )
    path = torch.zeros(len(at), dtype=torch.float64, device=at.device)
    leaves, transitions, paths = [leaf[:0]], [at[:0]], [path[:0]]
    while bool((alive := at >= 0).any()):
        at, leaf, path = at[alive], leaf[alive], path[alive]
        leaves, transitions, paths = [*leaves, leaf], [*transitions, at], [*paths, path]
        path = path if log_prob is None else path + log_prob[at]
        at = rollout.parent[at]
    return torch.cat(leaves), torch.cat(transitions), torch.cat(paths)


def softmax_mean(
    values: Tensor, logits: Tensor, to: Tensor, ok: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Mean of values (K,) that go to the same place, weighted by softmax(logits) over the ok ones
    -> (size,), (size,) any ok."""
    values, logits, to = values[ok], logits[ok], to[ok]
    top = torch.full((size,), -torch.inf, dtype=torch.float64, device=values.device).scatter_reduce(
        0, to, logits, "amax"
    )
    weight = (logits - top[to]).exp()
    zeros = torch.zeros(size, dtype=torch.float64, device=values.device)
    total = zeros.index_add(0, to, weight)
    return zeros.index_add(0, to, weight * values) / total.clamp(min=1e-300), total > 0


def sums_below(rollout: Rollout, leaf: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum of the usable leaves (B,) below each transition, and their number -> (N,) fp64, (N,)
    fp64."""
    leaves, transitions, _ = leaves_below(rollout)
    ok = usable(leaf, valid)[leaves]
    zeros = torch.zeros(len(rollout.src), dtype=torch.float64, device=leaf.device)
    return zeros.index_add(
        0, transitions, torch.where(ok, leaf.double()[leaves], 0.0)
    ), zeros.index_add(0, transitions, ok.double())


def spread(rollout: Rollout, leaf: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Mean of the leaves below each transition: leaf (B,) -> (N,) fp32. On a path: the leaf's own
    value.

    Leaves that are NaN or not in valid (B,) bool are left out of the mean; above such leaves alone
    it is 0.
    """
    total, count = sums_below(rollout, leaf, valid)
    return (total / count.clamp(min=1)).float()


def siblings(
    rollout: Rollout,
    leaf: Tensor,
    *,
    valid: Tensor | None = None,
    ddof: int = 0,
    eps: float = 1e-4,
    clip: float | None = 5.0,
) -> Tensor:
    """Z-score of each transition's mean leaf among the transitions that leave the same state: leaf
    (B,) -> (N,) fp32.

    TempFlow-GRPO's group of (prompt, seed, step), on the plan fan. Each sibling counts once,
    however many leaves it has. NaN or invalid leaves are left out, and so are transitions above
    such leaves alone, which get 0; a transition without siblings gets 0.
    """
    total, count = sums_below(rollout, leaf, valid)
    return group_relative(
        total / count.clamp(min=1), rollout.src, valid=count > 0, ddof=ddof, eps=eps, clip=clip
    )


def td(rollout: Rollout, leaf: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Value of what a transition leads to minus value of the state it leaves: leaf (B,) -> (N,)
    fp32, in the unit of leaf.

    A value is the mean of the leaves below; those below a state are below any transition with its
    rollout.src. Along a path the sum is the leaf minus the value of its first stored state; over
    siblings, weighted by their leaves, it is 0; without siblings it is exactly 0. NaN or invalid
    leaves are left out; a transition above such leaves alone gets 0.
    """
    return exact_td(rollout, leaf, valid).float()


def exact_td(rollout: Rollout, leaf: Tensor, valid: Tensor | None) -> Tensor:
    """td in fp64. Sums, not means, are added over siblings: with one sibling both quotients are of
    the same two numbers."""
    total, count = sums_below(rollout, leaf, valid)
    _, state = torch.unique(rollout.src, return_inverse=True)
    zeros = torch.zeros_like(total)
    before = zeros.index_add(0, state, total) / zeros.index_add(0, state, count).clamp(min=1)
    return torch.where(count > 0, total / count.clamp(min=1) - before[state], 0.0)


def decisiveness(
    rollout: Rollout, leaf: Tensor, *, valid: Tensor | None = None
) -> dict[int, float]:
    """How much of the leaves' variance each depth decides: {depth in the plan: mean over leaves of
    td^2 there}, leaf (B,).

    The law of total variance: values are conditional means under the uniform law over usable
    leaves, hence steps of a path are uncorrelated, and the depths add up to the mean of (leaf -
    value of the first stored state on its path)^2. That is exact for every plan of
    flowrl.samplers.plan but granular, whatever branches and whichever leaves are invalid; there a
    last transition has several leaves, and their variance around their mean, which no transition
    decides, is missing. A path without a transition at a depth adds 0.
    """
    leaves, transitions, _ = leaves_below(rollout)
    ok = usable(leaf, valid)
    depth = rollout.plan.depth.to(leaf.device)[rollout.edge]
    square = torch.where(ok[leaves], exact_td(rollout, leaf, valid).square()[transitions], 0.0)
    total = torch.zeros(len(rollout.plan.depth), dtype=torch.float64, device=leaf.device).index_add(
        0, depth[transitions], square
    )
    return {d: float(total[d]) / max(int(ok.sum()), 1) for d in sorted(set(depth.tolist()))}


def recursive(
    rollout: Rollout, leaf: Tensor, ok: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Value of each transition: mean of its leaves, or of its children by softmax(log-prob /
    temperature) -> (N,) fp64, (N,) known."""
    size, last, leaf = len(rollout.src), rollout.leaf_edge, leaf.double()
    value, known = softmax_mean(
        leaf, torch.zeros_like(leaf), last.clamp(min=0), ok & (last >= 0), size
    )
    if rollout.log_prob is None:
        return value, known
    logits, depth = (
        rollout.log_prob.double() / temperature,
        rollout.plan.depth.to(leaf.device)[rollout.edge],
    )
    for d in sorted(set(depth.tolist()), reverse=True):
        rows = torch.nonzero((depth == d) & (rollout.parent >= 0)).flatten()
        mean, any_known = softmax_mean(
            value[rows], logits[rows], rollout.parent[rows], known[rows], size
        )
        value, known = torch.where(any_known, mean, value), known | any_known
    return value, known


def branch(
    rollout: Rollout,
    rewards: Rewards,
    *,
    weighting: Literal["mean", "path", "recursive"] = "mean",
    scope: Literal["prompt", "tree"] = "prompt",
    beta: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-8,
    clip: float | None = 5.0,
) -> Advantages:
    """BranchGRPO (arXiv:2509.06040): fuse leaf rewards upwards, then z-score at each depth over the
    transitions of a scope.

    weighting: "mean" of the leaves below; "path" softmax over them of beta * log-prob of the way
    down (paper); "recursive" softmax over the children at each node (reference code). scope:
    z-scores over all trees of a prompt, or each tree alone (reference code). An edge takes the
    value of its child. std < 1e-6 -> 0. Leaf advantages are the same z-score over leaf rewards.
    """
    ok = rewards.valid & ~torch.isnan(rewards.total)
    reward = torch.where(ok, rewards.total.double(), 0.0)
    leaves, transitions, paths = leaves_below(rollout)
    if weighting == "recursive":
        value, known = recursive(rollout, reward, ok, 1.0)
    elif weighting in ("mean", "path"):
        logits = (beta if weighting == "path" else 0.0) * paths
        value, known = softmax_mean(
            reward[leaves], logits, transitions, ok[leaves], len(rollout.src)
        )
    else:
        raise ValueError(
            f'weighting="{weighting}" is unknown; choose "mean", "path" or "recursive"'
        )
    of_leaf = rollout.group if scope == "prompt" else rollout.tree
    of = torch.zeros(len(rollout.src), dtype=torch.int64, device=of_leaf.device).index_put(
        (transitions,), of_leaf[leaves]
    )
    depth = rollout.plan.depth.to(of.device)[rollout.edge]
    return Advantages(
        leaf=group_relative(reward, of_leaf, valid=ok, ddof=ddof, eps=eps, clip=clip),
        transition=group_relative(
            value, of * rollout.plan.edges + depth, valid=known, ddof=ddof, eps=eps, clip=clip
        ),
    )


def tree_backup(
    rollout: Rollout,
    leaf_advantages: Tensor,
    *,
    temperature: float = 1.0,
    valid: Tensor | None = None,
) -> Tensor:
    """TreeGRPO: A of an edge = mean over its child edges weighted by softmax(log-prob /
    temperature): leaf (B,) -> (N,) fp32.

    log-prob is the mean-reduced one under the behaviour policy: a sum over 1e4 dims would let one
    child take all. An edge without stored children takes the mean of its leaves. Leaves that are
    NaN or not in valid (B,) bool are left out, and so are edges above such
    leaves alone, which get 0: group_relative gives an invalid sample 0, which is no estimate of
    what its edges are worth.
    """
    return recursive(rollout, leaf_advantages, usable(leaf_advantages, valid), temperature)[
        0
    ].float()


def granular(
    rollout: Rollout,
    rewards_total: Tensor,
    *,
    valid: Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-8,
    clip: float | None = 5.0,
) -> Tensor:
    """G2RPO (arXiv:2510.01982): sum over strides of z-scores among the leaves of one stride from
    one state: rewards (B,) -> (N,) fp32.

    The n-th leaf right below a transition is its n-th stride (plan.granular), and is compared with
    the n-th leaves of the transitions with its rollout.src. Clipped after the sum, as in the
    reference code, which also adds several rewards before it: use clip=None for that. NaN or
    invalid leaves are left out; a transition with none right below it gets 0.
    """
    rows = torch.nonzero(rollout.leaf_edge >= 0).flatten()
    at, rewards = rollout.leaf_edge[rows], rewards_total[rows]
    group = rollout.src[at] * len(rollout.leaf_edge) + place_in_group(at)
    score = group_relative(
        rewards, group, valid=usable(rewards_total, valid)[rows], ddof=ddof, eps=eps, clip=None
    )
    total = torch.zeros(len(rollout.src), dtype=torch.float64, device=score.device).index_add(
        0, at, score.double()
    )
    return (total if clip is None else total.clamp(-clip, clip)).float()
