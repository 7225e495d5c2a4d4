"""Credit on trees: from the advantages or rewards of leaves to one advantage per transition.

spread gives each transition the mean of its leaves; branch, tree_backup and granular are the credit
rules of BranchGRPO, TreeGRPO and G2RPO; siblings and td compare transitions that leave one state;
gains and dense (DenseGRPO) compare the ODE completions of the two states that a step joins;
decisiveness tells how much each depth decides. siblings, td and granular group by the rows of
rollout.states, so all copies of a prompt must lie in one process.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.advantages.group import group_relative, usable
from flowrl.advantages.several import place_in_group
from flowrl.types import Advantages, Rewards, Rollout


def spread(rollout: Rollout, leaf: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """The mean of the leaves (B,) below each transition -> (N,) fp32.

    On a path without forks it is the leaf's own value. Leaves that are NaN or not in valid (B,)
    bool are left out of the mean; a transition all of whose leaves are left out gets 0.
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
    """Z-score of the mean leaf among transitions that leave one state: leaf (B,) -> (N,) fp32.

    TempFlow-GRPO's group of (prompt, seed, step), on the plan fan. Each sibling counts once,
    however many leaves it has. NaN or invalid leaves are left out; a transition all of whose leaves
    are left out is no sibling and gets 0, and so does a transition without siblings.
    """
    total, count = sums_below(rollout, leaf, valid)
    return group_relative(
        total / count.clamp(min=1), rollout.src, valid=count > 0, ddof=ddof, eps=eps, clip=clip
    )


def td(rollout: Rollout, leaf: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Value that a transition reaches minus the value it leaves: leaf (B,) -> (N,) fp32.

    The result has the unit of leaf. A value is the mean of the leaves below; the leaves below a
    state are those below all transitions with its rollout.src. Along a path the sum is the leaf
    minus the value of its first stored state; over siblings, weighted by their leaves, it is 0;
    without siblings it is exactly 0. NaN or invalid leaves are left out; a transition all of whose
    leaves are left out gets 0.
    """
    return exact_td(rollout, leaf, valid).float()


def exact_td(rollout: Rollout, leaf: Tensor, valid: Tensor | None) -> Tensor:
    """td in fp64; exactly 0 for a transition without siblings."""
    total, count = sums_below(rollout, leaf, valid)
    _, state = torch.unique(rollout.src, return_inverse=True)
    zeros = torch.zeros_like(total)
    # Sums are added over siblings, not means: an only child then divides the same two numbers
    # twice, and the difference is exactly 0.
    before = zeros.index_add(0, state, total) / zeros.index_add(0, state, count).clamp(min=1)
    return torch.where(count > 0, total / count.clamp(min=1) - before[state], 0.0)


def decisiveness(
    rollout: Rollout, leaf: Tensor, *, valid: Tensor | None = None
) -> dict[int, float]:
    """Variance of the leaves that each depth of the plan decides: leaf (B,) -> {depth: variance}.

    It is the mean over leaves of td^2 at that depth; a path without a transition there adds 0.
    By the law of total variance (values are conditional means under the uniform law over usable
    leaves, so the steps of a path are uncorrelated) the depths add up to the mean of (leaf - value
    of the first stored state on its path)^2, whatever branches and whichever leaves are invalid.
    The plan granular is the exception: its last transitions have several leaves, and the variance
    of those around their mean, which no transition decides, is missing.
    """
    leaves, transitions, _ = leaves_below(rollout)
    ok = usable(leaf, valid)
    depth = depths(rollout)
    square = torch.where(ok[leaves], exact_td(rollout, leaf, valid).square()[transitions], 0.0)
    zeros = torch.zeros(len(rollout.plan.depth), dtype=torch.float64, device=leaf.device)
    total = zeros.index_add(0, depth[transitions], square)
    return {d: float(total[d]) / max(int(ok.sum()), 1) for d in sorted(set(depth.tolist()))}


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
    """BranchGRPO (arXiv:2509.06040): fuse leaf rewards upwards, then z-score at each depth.

    weighting: see fused. scope: z-scores over all trees of a prompt, or over each tree alone. A
    transition takes the value of the node it leads to; std < 1e-6 -> 0. Leaf advantages are the
    same z-score over leaf rewards.
    """
    ok = usable(rewards.total, rewards.valid)
    reward = torch.where(ok, rewards.total.double(), 0.0)
    value, known = fused(rollout, reward, ok, weighting, beta)
    of_leaf = rollout.group if scope == "prompt" else rollout.tree
    same_depth = of_transitions(rollout, of_leaf) * rollout.plan.edges + depths(rollout)
    z_score = partial(group_relative, ddof=ddof, eps=eps, clip=clip)
    return Advantages(
        leaf=z_score(reward, of_leaf, valid=ok),
        transition=z_score(value, same_depth, valid=known),
    )


def fused(
    rollout: Rollout, reward: Tensor, ok: Tensor, weighting: str, beta: float
) -> tuple[Tensor, Tensor]:
    """The value of each transition by its ok leaves (B,) -> (N,) fp64, and whether it has any (N,).

    weighting: "mean" of the leaves below; "path" their softmax by beta * log-prob of the way down;
    "recursive" softmax over the children at each node.
    """
    if weighting == "recursive":
        return backed_up(rollout, reward, ok, temperature=1.0)
    if weighting not in ("mean", "path"):
        raise ValueError(
            f'weighting="{weighting}" is unknown; choose "mean", "path" or "recursive"'
        )
    leaves, transitions, way_down = leaves_below(rollout)
    logits = (beta if weighting == "path" else 0.0) * way_down
    return softmax_mean(reward[leaves], logits, transitions, ok[leaves], len(rollout.src))


def tree_backup(
    rollout: Rollout,
    leaf_advantages: Tensor,
    *,
    temperature: float = 1.0,
    valid: Tensor | None = None,
) -> Tensor:
    """TreeGRPO (arXiv:2512.08153): leaf advantages passed up the tree, (B,) -> (N,) fp32.

    A of a transition is the mean over its child transitions, weighted by softmax(log-prob /
    temperature), or the mean of its leaves where it has no stored children. log-prob is the
    mean-reduced one under the behaviour policy: with a sum over 1e4 dims one child would take all.
    Leaves that are NaN or not in valid (B,) bool are left out, because the 0 that group_relative
    gives an invalid sample does not estimate its transitions; a transition all of whose leaves are
    left out gets 0.
    """
    ok = usable(leaf_advantages, valid)
    return backed_up(rollout, leaf_advantages, ok, temperature)[0].float()


def gains(rollout: Rollout, leaf: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """DenseGRPO's dR (arXiv:2601.20218): the reward of the completion of the state that a
    transition reaches minus that of the state it leaves, leaf (B,) -> (N,) fp64.

    On the plan dense, where exactly one leaf completes each state by ODE. Along a chain the gains
    add up to its own reward minus that of the completion of x_T. NaN where one of the two is NaN or
    invalid.
    """
    value = torch.where(usable(leaf, valid), leaf.double(), torch.nan)
    at, size = rollout.leaf_edge, len(rollout.src)
    # the completion of x_T lies below no stored transition: it is found by its tree
    first, trees = at < 0, int(rollout.tree.max()) + 1
    start = torch.full((trees,), torch.nan, dtype=torch.float64, device=leaf.device)
    start[rollout.tree[first]] = value[first]
    after = torch.full((size,), torch.nan, dtype=torch.float64, device=leaf.device)
    after[at[~first]] = value[~first]
    top = start[of_transitions(rollout, rollout.tree)]
    return after - torch.where(rollout.parent < 0, top, after[rollout.parent])


def dense(rollout: Rollout, leaf: Tensor, *, valid: Tensor | None = None, **stats: Any) -> Tensor:
    """Z-score of each step's own gain among those of its prompt at that step: leaf (B,) -> (N,)
    fp32. stats: ddof, eps and clip of group_relative. A step without a gain gets 0."""
    gain = gains(rollout, leaf, valid=valid)
    step = of_transitions(rollout, rollout.group) * rollout.plan.edges + depths(rollout)
    return group_relative(gain, step, **stats)


def step_gains(rollout: Rollout, rewards: Rewards) -> dict[str, float]:
    """Means over usable samples of a dense plan: dense/reward of the trajectories themselves,
    dense/gain/STEP of each step, and dense/balance/STEP, the share of gains above 0 minus that of
    gains below 0. 0 where there is none."""
    gain, depth = gains(rollout, rewards.total, valid=rewards.valid), depths(rollout)
    # a trajectory's own end lies below its last noisy step
    last = (rollout.leaf_edge >= 0) & (depth[rollout.leaf_edge] == depth.max())
    ends = rewards.total[last & usable(rewards.total, rewards.valid)].double()
    out = {"dense/reward": float(ends.sum()) / max(len(ends), 1)}
    for step in sorted(set(depth.tolist())):
        found = gain[(depth == step) & ~gain.isnan()]
        for name, value in (("gain", found), ("balance", found.sign())):
            out[f"dense/{name}/{step}"] = float(value.sum()) / max(len(found), 1)
    return out


def granular(
    rollout: Rollout,
    rewards_total: Tensor,
    *,
    valid: Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-8,
    clip: float | None = 5.0,
) -> Tensor:
    """G2RPO (arXiv:2510.01982): z-scores of each stride's leaves, summed: (B,) -> (N,) fp32.

    The n-th leaf right below a transition is that of its n-th stride (plan.granular); it is
    compared with the n-th leaves of the transitions that leave the same state. The sum is
    clipped. NaN or invalid leaves are left out; a transition with none right below it gets 0.
    """
    rows = torch.nonzero(rollout.leaf_edge >= 0).flatten()
    at, rewards = rollout.leaf_edge[rows], rewards_total[rows]
    group = rollout.src[at] * len(rollout.leaf_edge) + place_in_group(at)
    ok = usable(rewards_total, valid)[rows]
    score = group_relative(rewards, group, valid=ok, ddof=ddof, eps=eps, clip=None)
    zeros = torch.zeros(len(rollout.src), dtype=torch.float64, device=score.device)
    total = zeros.index_add(0, at, score.double())
    return (total if clip is None else total.clamp(-clip, clip)).float()


def backed_up(
    rollout: Rollout, leaf: Tensor, ok: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Value of each transition, node by node from its ok leaves (B,) -> (N,) fp64, known (N,).

    A last transition has the mean of its leaves; one above it, where there are log-probs, the mean
    of its children weighted by softmax(log-prob / temperature).
    """
    size, last, leaf = len(rollout.src), rollout.leaf_edge, leaf.double()
    even = torch.zeros_like(leaf)
    value, known = softmax_mean(leaf, even, last.clamp(min=0), ok & (last >= 0), size)
    if rollout.log_prob is None:
        return value, known
    logits, depth = of_steps(rollout.log_prob) / temperature, depths(rollout)
    for d in sorted(set(depth.tolist()), reverse=True):
        rows = torch.nonzero((depth == d) & (rollout.parent >= 0)).flatten()
        parent = rollout.parent[rows]
        mean, any_known = softmax_mean(value[rows], logits[rows], parent, known[rows], size)
        value, known = torch.where(any_known, mean, value), known | any_known
    return value, known


def softmax_mean(
    values: Tensor, logits: Tensor, to: Tensor, ok: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Mean of the values (K,) that go `to` each place -> (size,), whether any do (size,) bool.

    The weights are softmax(logits) over the values that are ok.
    """
    values, logits, to = values[ok], logits[ok], to[ok]
    lowest = torch.full((size,), -torch.inf, dtype=torch.float64, device=values.device)
    top = lowest.scatter_reduce(0, to, logits, "amax")
    weight = (logits - top[to]).exp()
    zeros = torch.zeros(size, dtype=torch.float64, device=values.device)
    total = zeros.index_add(0, to, weight)
    return zeros.index_add(0, to, weight * values) / total.clamp(min=1e-300), total > 0


def sums_below(rollout: Rollout, leaf: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum of the usable leaves (B,) below each transition, and their number -> (N,), (N,) fp64."""
    leaves, transitions, _ = leaves_below(rollout)
    ok = usable(leaf, valid)[leaves]
    values = torch.where(ok, leaf.double()[leaves], 0.0)
    zeros = torch.zeros(len(rollout.src), dtype=torch.float64, device=leaf.device)
    return zeros.index_add(0, transitions, values), zeros.index_add(0, transitions, ok.double())


def leaves_below(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
    """Every (leaf, transition above it), and the log-prob of the path between -> 3 x (K,).

    The log-prob is fp64, and 0 where the rollout has none.
    """
    log_prob = None if rollout.log_prob is None else of_steps(rollout.log_prob)
    at = rollout.leaf_edge
    leaf = torch.arange(len(at), device=at.device)
    path = torch.zeros(len(at), dtype=torch.float64, device=at.device)
    leaves, transitions, paths = [leaf[:0]], [at[:0]], [path[:0]]
    while bool((alive := at >= 0).any()):
        at, leaf, path = at[alive], leaf[alive], path[alive]
        leaves, transitions, paths = [*leaves, leaf], [*transitions, at], [*paths, path]
        path = path if log_prob is None else path + log_prob[at]
        at = rollout.parent[at]
    return torch.cat(leaves), torch.cat(transitions), torch.cat(paths)


def of_steps(log_prob: Tensor) -> Tensor:
    """Log-probs of steps (N,) fp64, of these or of the tokens of each, (N, places)."""
    return log_prob.double() if log_prob.ndim == 1 else log_prob.double().sum(1)


def of_transitions(rollout: Rollout, of_leaf: Tensor) -> Tensor:
    """A value that all leaves below a transition share, such as their prompt: (B,) -> (N,)
    int64."""
    leaves, transitions, _ = leaves_below(rollout)
    zeros = torch.zeros(len(rollout.src), dtype=torch.int64, device=of_leaf.device)
    return zeros.index_put((transitions,), of_leaf[leaves])


def depths(rollout: Rollout) -> Tensor:
    """Depth of each transition in the plan -> (N,) int64."""
    return rollout.plan.depth.to(rollout.edge.device)[rollout.edge]
