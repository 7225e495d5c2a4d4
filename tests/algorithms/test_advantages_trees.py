"""Credit through trees against a walk over the nodes written out in Python, with invalid leaves."""

import math
from dataclasses import replace

import pytest
import torch

from flowrl import advantages as credit
from flowrl.samplers import keys, plan, sigmas, tree
from flowrl.types import Rewards

GRID = sigmas.shifted(6, 3)
NAN = math.nan
# 9 leaves; nodes at depths 0..4: 3, 3, 9, 9, 9
BRANCHY = plan.branch(GRID, splits=[0, 2], children=3, eta=0.3)
# edges 0 1 | 2 3 below 0, 4 5 below 1
TREE = plan.tree(GRID, start=1, depth=2, children=2, eta=0.7)


def grow(p, rows):
    """A rollout whose log-probs differ by about 1, so that softmax weights are far from equal."""
    grown = tree.grow(
        lambda x, s, r: torch.tanh(x),
        lambda k: keys.gaussian(k, (4,)),
        p,
        shape=(4,),
        rows=torch.tensor(rows),
    )
    return replace(grown, log_prob=torch.randn(len(grown.src)))


def make(total):
    total = torch.as_tensor(total, dtype=torch.float32)
    return Rewards(raw={"r": total}, weights={"r": 1.0}, total=total, valid=~torch.isnan(total))


def softmax_mean(values, logits):
    """Weighted mean of the values that are not NaN; NaN if there are none."""
    pairs = [(v, math.exp(l)) for v, l in zip(values, logits, strict=True) if not math.isnan(v)]
    return sum(v * w for v, w in pairs) / sum(w for _, w in pairs) if pairs else NAN


def fused(grown, reward, weighting, beta=1.0):
    """Value of each stored transition, NaN without a valid leaf: a recursion from the definition,
    one node at a time."""
    kids = {
        e: [k for k, p in enumerate(grown.parent.tolist()) if p == e] for e in range(len(grown.src))
    }
    at = {e: [b for b, last in enumerate(grown.leaf_edge.tolist()) if last == e] for e in kids}

    def below(e):
        """(leaf, log-prob of the way down to it from the end of e)."""
        return [(b, 0.0) for b in at[e]] + [
            (b, path + float(grown.log_prob[k])) for k in kids[e] for b, path in below(k)
        ]

    def value(e):
        if weighting == "recursive":
            own = [reward[b] for b in at[e]]
            return softmax_mean(
                [value(k) for k in kids[e]] + own,
                [float(grown.log_prob[k]) for k in kids[e]] + [0.0] * len(own),
            )
        leaves = below(e)
        return softmax_mean(
            [reward[b] for b, _ in leaves],
            [(beta if weighting == "path" else 0.0) * path for _, path in leaves],
        )

    return [value(e) for e in kids]


def standardised(values, scope, ddof=1, eps=1e-8):
    """z-scores over equal scopes of the values that are not NaN; 0 for a NaN and where nothing
    differs."""
    out = []
    for v, s in zip(values, scope, strict=True):
        peers = torch.tensor(
            [w for w, t in zip(values, scope, strict=True) if t == s and not math.isnan(w)],
            dtype=torch.float64,
        )
        flat = math.isnan(v) or len(peers) <= ddof or float(peers.std(correction=0)) < 1e-6
        out.append(0.0 if flat else float((v - peers.mean()) / (peers.std(correction=ddof) + eps)))
    return torch.tensor(out)


def tree_of(grown):
    """Which tree each stored transition belongs to."""
    out = {}
    for b, at in enumerate(grown.leaf_edge.tolist()):
        while at >= 0:
            out[at], at = int(grown.tree[b]), int(grown.parent[at])
    return [out[e] for e in range(len(grown.src))]


CLEAN = [
    1.0,
    2.0,
    4.0,
    9.0,
    3.0,
    -1.0,
    0.5,
    7.0,
    6.0,
    2.5,
    8.0,
    -3.0,
    1.5,
    0.0,
    5.0,
    4.5,
    -2.0,
    3.5,
]
# 3, 4, 5: all leaves of a node
HOLED = [NAN if i in (1, 3, 4, 5, 8, 12) else r for i, r in enumerate(CLEAN)]


@pytest.mark.parametrize("reward", [CLEAN, HOLED], ids=["all valid", "some invalid"])
@pytest.mark.parametrize("scope", ["prompt", "tree"])
@pytest.mark.parametrize(
    ("weighting", "beta"), [("mean", 1.0), ("path", 1.0), ("path", 0.5), ("recursive", 1.0)]
)
def test_branch_credit_is_the_definition(weighting, beta, scope, reward):
    """Two trees of one prompt, K = 3: values fused node by node, then z-scores at each depth over
    the prompt or over each tree."""
    grown = grow(BRANCHY, [0, 0])
    out = credit.branch(grown, make(reward), weighting=weighting, beta=beta, scope=scope)
    values, depth = fused(grown, reward, weighting, beta), BRANCHY.depth[grown.edge].tolist()
    where = tree_of(grown) if scope == "tree" else [0] * len(depth)
    assert torch.allclose(
        out.transition, standardised(values, list(zip(where, depth, strict=True))), atol=1e-5
    )
    assert torch.allclose(
        out.leaf,
        standardised(reward, grown.tree.tolist() if scope == "tree" else [0] * 18),
        atol=1e-5,
    )
    assert float(out.transition.abs().max()) > 0.5 and float(out.leaf.abs().max()) > 0.5


def test_the_weightings_and_scopes_are_told_apart():
    grown = grow(BRANCHY, [0, 0])
    ways = [
        {"weighting": w, "scope": s}
        for w in ("mean", "path", "recursive")
        for s in ("prompt", "tree")
    ]
    ways.append({"weighting": "path", "beta": 0.5})
    out = [credit.branch(grown, make(CLEAN), **way).transition for way in ways]
    for i in range(len(out)):
        assert all(not torch.allclose(out[i], other, atol=1e-2) for other in out[:i]), ways[i]


@pytest.mark.parametrize("weighting", ["mean", "path", "recursive"])
def test_edges_above_invalid_leaves_alone_get_no_credit(weighting):
    """The first half of the tree has no valid leaf: 0 there, and the rest is scored as if it were
    not there."""
    grown = grow(plan.branch(GRID, splits=[0, 2], children=2, eta=0.3), [0])
    out = credit.branch(grown, make([NAN, NAN, 3.0, 6.0]), weighting=weighting)
    dead = torch.tensor([math.isnan(v) for v in fused(grown, [NAN, NAN, 3.0, 6.0], "mean")])
    depth = grown.plan.depth[grown.edge]
    assert bool((out.transition[dead] == 0).all()) and int(dead.sum()) == 1 + 1 + 2 + 2 + 2
    # one valid node at these depths: nothing to compare with
    assert bool((out.transition[~dead & (depth < 2)] == 0).all())
    assert torch.allclose(
        out.transition[~dead & (depth >= 2)].abs(), torch.tensor(0.5**0.5), atol=1e-5
    )


# --- spread and tree_backup


def test_an_invalid_leaf_is_left_out_of_spread_and_not_counted_as_zero():
    """Leaves 1, 2, 5, 8; without the second the first edge has mean 1, not (1 + 0) / 2."""
    grown = grow(TREE, [0])
    marked = credit.spread(
        grown, torch.tensor([1.0, 0.0, 5.0, 8.0]), valid=torch.tensor([True, False, True, True])
    )
    assert marked.tolist() == [1.0, 6.5, 1.0, 0.0, 5.0, 8.0]
    assert torch.equal(credit.spread(grown, torch.tensor([1.0, NAN, 5.0, 8.0])), marked)
    assert credit.spread(grown, torch.tensor([NAN, NAN, 5.0, 8.0])).tolist() == [
        0.0,
        6.5,
        0.0,
        0.0,
        5.0,
        8.0,
    ]
    assert credit.spread(grown, torch.tensor([1.0, 0.0, 5.0, 8.0]))[0] == 0.5  # a valid 0 counts


def test_an_invalid_leaf_is_left_out_of_tree_backup_and_not_counted_as_zero():
    grown = grow(TREE, [0])
    right = torch.softmax(grown.log_prob[4:6].double() / 0.5, 0)
    above = float(right[0] * 5 + right[1] * 8)
    marked = credit.tree_backup(
        grown,
        torch.tensor([1.0, 0.0, 5.0, 8.0]),
        temperature=0.5,
        valid=torch.tensor([True, False, True, True]),
    )
    assert marked.tolist() == pytest.approx([1.0, above, 1.0, 0.0, 5.0, 8.0], abs=1e-6)
    assert torch.equal(
        credit.tree_backup(grown, torch.tensor([1.0, NAN, 5.0, 8.0]), temperature=0.5), marked
    )
    none = credit.tree_backup(grown, torch.full((4,), NAN))
    assert none.tolist() == [0.0] * 6


def test_an_invalid_branch_leaves_its_parents_mean_over_the_other_child():
    """Depth 3: both leaves of the first inner edge are invalid, so its parent is worth what the
    other inner edge is."""
    grown = grow(plan.tree(GRID, start=0, depth=3, children=2, eta=0.7), [0])
    leaf = torch.tensor([NAN, NAN, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    out = credit.tree_backup(grown, leaf)
    assert out[:6].tolist() == pytest.approx([2.0, 1.0, 0.0, 2.0, 1.0, 1.0], abs=1e-6)
