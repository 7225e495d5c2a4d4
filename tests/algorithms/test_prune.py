"""BranchGRPO's pruning, by hand.

Splits 0 and 2 of eight steps: SDE edges at depths 0..6 and four chains after the last split.
"""

import pytest
import torch
from toy import ToyPolicy, advantages_of, prepared, rewards_of, roll_out

from flowrl.algorithms.common.prune import first_left_out
from flowrl.algorithms.common.transition_config import Prune
from flowrl.algorithms.grpo import ALGORITHM

NAN = float("nan")
BRANCH = {"plan": "branch", "tree": {"splits": (0, 2), "children": 2}}


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**options))


def pruned(leaf, iteration=0, **prune):
    """The plan, and the edges that are trained, of one tree with the given leaves."""
    algorithm = make(**BRANCH, credit="leaf", prune=prune)
    rollout = roll_out(ToyPolicy(0.5), algorithm, copies=1, prompts=1)
    rows = algorithm.columns(
        rollout, advantages_of(algorithm, rollout, rewards_of(leaf)), seed=0, iteration=iteration
    )
    edge = {int(d): int(e) for d, e in zip(rollout.dst, rollout.edge, strict=True)}
    trained = [edge[int(d)] for d in rows.dst]
    return rollout.plan, trained


def counts(plan, trained):
    return [sum(int(plan.depth[e]) == d for e in trained) for d in range(7)]


def chains(plan, trained):
    """Numbers of the leaves whose whole way from the last split on is trained."""
    out = []
    for number, e in enumerate(plan.leaf_edges.tolist()):
        way = []
        while e >= 0:
            way.append(e)
            e = int(plan.parent[e])
        out += [number] if set(way[1:6]) <= set(trained) else []
    return out


def test_without_pruning_all_edges_are_trained():
    plan, trained = pruned([1.0, 2, 8, 5])
    assert counts(plan, trained) == [2, 2, 4, 4, 4, 4, 4] and chains(plan, trained) == [0, 1, 2, 3]


def test_parent_keeps_the_best_child_of_each_last_split():
    plan, trained = pruned([1.0, 2, 8, 5], width="parent")
    assert counts(plan, trained) == [2, 2, 2, 2, 2, 2, 2] and chains(plan, trained) == [1, 2]


def test_extremes_keep_the_ways_to_the_best_and_worst_leaves():
    plan, trained = pruned([1.0, 2, 8, 5], width="extremes", leaves=1)
    assert counts(plan, trained) == [2, 2, 2, 2, 2, 2, 2] and chains(plan, trained) == [0, 2]
    plan, trained = pruned([6.0, 8, 7, 5], width="extremes", leaves=1)
    assert chains(plan, trained) == [1, 3]
    plan, trained = pruned([NAN, 2, 8, 5], width="extremes", leaves=1)  # an invalid leaf is neither
    assert chains(plan, trained) == [1, 2]


@pytest.mark.parametrize(
    ("slide", "first"),
    [("later", [2, 2, 3, 3, 4, 4, 5, 5, 2, 2, 3]), ("earlier", [5, 5, 4, 4, 3, 3, 2, 2, 2, 2, 2])],
)
def test_depth_pruning_slides_between_the_last_split_and_the_last_sde_step(slide, first):
    """Two depths, moved every two iterations; depths 2..6 follow the last split, so the window
    starts at 2, 3, 4 or 5."""
    for iteration, start in enumerate(first):
        plan, trained = pruned([1.0, 2, 8, 5], iteration=iteration, depth=2, every=2, slide=slide)
        assert counts(plan, trained) == [
            2,
            2,
            *(0 if start <= d < start + 2 else 4 for d in range(2, 7)),
        ], iteration


def test_branchgrpos_code_slides_from_15_to_9():
    """20 steps, splits 0 3 6 9, "15,16,17,18", stop depth 9: shift = min(step // 30, 6), depth -
    shift."""
    prune = Prune(depth=4, slide="earlier")
    assert [first_left_out(prune, 9, 18, i) for i in (0, 29, 30, 179, 180, 1000)] == [
        15,
        15,
        14,
        10,
        9,
        9,
    ]
    late = Prune(depth=20)
    # more than there are: from the last split to the end
    assert {first_left_out(late, 9, 18, i) for i in range(0, 300, 10)} == {9}


def test_width_and_depth_pruning_add_up():
    plan, trained = pruned([1.0, 2, 8, 5], width="parent", depth=3)
    assert counts(plan, trained) == [2, 2, 0, 0, 0, 2, 2]


def test_pruning_leaves_credit_alone():
    """Pruned edges are walked: the advantages of what is kept are those without pruning."""
    policy = ToyPolicy(0.5)
    _, _, a, rows = prepared(
        make(**BRANCH, credit="depth", prune={"width": "parent"}), policy, copies=2
    )
    _, _, b, every = prepared(make(**BRANCH, credit="depth"), policy, copies=2)
    assert torch.equal(a.transition, b.transition) and len(rows) < len(every)
    kept = {int(d): float(x) for d, x in zip(every.dst, every.adv, strict=True)}
    assert all(kept[int(d)] == float(x) for d, x in zip(rows.dst, rows.adv, strict=True))
