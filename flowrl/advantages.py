"""Credit: from leaf rewards to one advantage per leaf and per stored transition.

group_relative is GRPO's z-score; spread gives each transition the mean advantage of its leaves
(itself, on a path); branch, tree_backup and granular are the credit rules of BranchGRPO, TreeGRPO
and G2RPO; siblings and td compare transitions that leave one state, decisiveness says which depth
decides. All statistics are in fp64 and depend on (reward, group) alone: give them the whole
iteration, gathered over processes, and the result does not depend on how many there are. siblings,
td and granular group by the rows of rollout.states instead: there the copies of a prompt belong to
one process.

Departures: best_worst selects within each group (DanceGRPO: within a process's whole batch). A
group with std < 1e-6 gets 0, which is BranchGRPO's rule (DanceGRPO and G2RPO divide by std + 1e-8
all the same). Invalid samples enter no statistic.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.types import Advantages, Rewards, Rollout

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
    ok = _usable(rewards, valid)
    r = torch.where(ok, rewards.double(), 0.0)
    _, g = torch.unique(group, return_inverse=True)
    centred, spread = _standard(r, g, ok, ddof)
    if std == "global":
        scale = _standard(r, torch.zeros_like(g), ok, ddof)[1]
    elif std in ("group", None):
        scale = spread
    else:
        raise ValueError(f'std="{std}" is unknown; choose "group", "global" or None')
    adv = centred if std is None else centred / (scale + eps)
    adv = torch.where(ok & (spread >= 1e-6), adv, 0.0)
    return (adv if clip is None else adv.clamp(-clip, clip)).float()


def _standard(r: Tensor, g: Tensor, ok: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
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
        spread = _standard(total.double(), torch.zeros_like(group), rewards.valid, ddof)[1]
        total = torch.where(spread >= 1e-6, total / (spread + eps), 0.0).float()
    return total if clip is None else total.clamp(-clip, clip)


def _pairs(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
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


def _softmax_mean(
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


def _below(rollout: Rollout, leaf: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum of the usable leaves (B,) below each transition, and their number -> (N,) fp64, (N,)
    fp64."""
    leaves, transitions, _ = _pairs(rollout)
    ok = _usable(leaf, valid)[leaves]
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
    total, count = _below(rollout, leaf, valid)
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
    total, count = _below(rollout, leaf, valid)
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
    return _td(rollout, leaf, valid).float()


def _td(rollout: Rollout, leaf: Tensor, valid: Tensor | None) -> Tensor:
    """td in fp64. Sums, not means, are added over siblings: with one sibling both quotients are of
    the same two numbers."""
    total, count = _below(rollout, leaf, valid)
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
    leaves, transitions, _ = _pairs(rollout)
    ok = _usable(leaf, valid)
    depth = rollout.plan.depth.to(leaf.device)[rollout.edge]
    square = torch.where(ok[leaves], _td(rollout, leaf, valid).square()[transitions], 0.0)
    total = torch.zeros(len(rollout.plan.depth), dtype=torch.float64, device=leaf.device).index_add(
        0, depth[transitions], square
    )
    return {d: float(total[d]) / max(int(ok.sum()), 1) for d in sorted(set(depth.tolist()))}


def _usable(values: Tensor, valid: Tensor | None) -> Tensor:
    """(B,) bool: neither NaN nor marked invalid."""
    return ~torch.isnan(values) if valid is None else valid & ~torch.isnan(values)


def _recursive(
    rollout: Rollout, leaf: Tensor, ok: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Value of each transition: mean of its leaves, or of its children by softmax(log-prob /
    temperature) -> (N,) fp64, (N,) known."""
    size, last, leaf = len(rollout.src), rollout.leaf_edge, leaf.double()
    value, known = _softmax_mean(
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
        mean, any_known = _softmax_mean(
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
    leaves, transitions, paths = _pairs(rollout)
    if weighting == "recursive":
        value, known = _recursive(rollout, reward, ok, 1.0)
    elif weighting in ("mean", "path"):
        logits = (beta if weighting == "path" else 0.0) * paths
        value, known = _softmax_mean(
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
    return _recursive(rollout, leaf_advantages, _usable(leaf_advantages, valid), temperature)[
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
    group = rollout.src[at] * len(rollout.leaf_edge) + _place(at)
    score = group_relative(
        rewards, group, valid=_usable(rewards_total, valid)[rows], ddof=ddof, eps=eps, clip=None
    )
    total = torch.zeros(len(rollout.src), dtype=torch.float64, device=score.device).index_add(
        0, at, score.double()
    )
    return (total if clip is None else total.clamp(-clip, clip)).float()


def _place(group: Tensor) -> Tensor:
    """How many equal values come before each one: (n,) -> (n,) int64."""
    order = group.argsort(stable=True)
    ordered = group[order]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - torch.searchsorted(
        ordered, ordered
    )
    return place


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
    rank[order] = _place(g[order])
    return (rank < keep // 2) | (rank >= size[g] - (keep - keep // 2))
