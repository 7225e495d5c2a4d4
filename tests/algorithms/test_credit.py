"""Credit of transitions that leave one state, and what every rule gives where nothing branches."""

import math
from dataclasses import replace

import pytest
import torch

from flowrl import advantages as credit
from flowrl.samplers import keys, plan, sigmas, tree
from flowrl.types import Rewards

GRID = sigmas.shifted(6, 3)
NAN = math.nan
# name -> (plan, copies of one prompt): equal trees, a shared x_T, unary edges before and between
# splits, branches at several depths
FORESTS = {
    "branch": (plan.branch(GRID, splits=[0, 2], children=3, eta=0.3), 2),
    "branch with a shared root": (
        plan.branch(GRID, splits=[1, 2], children=2, eta=0.3, init="group"),
        3,
    ),
    "branch in seven": (plan.branch(GRID, splits=[1], children=7, eta=0.3), 8),
    "tree": (plan.tree(GRID, start=1, depth=3, children=2, eta=0.7), 2),
    "tree with a shared root": (
        plan.tree(GRID, start=1, depth=2, children=3, eta=0.7, init="group"),
        2,
    ),
    "fan": (plan.fan(GRID, steps=[0, 1, 3], children=4, eta=0.7), 2),
    "full with a shared root": (plan.full(GRID, eta=0.7, init="group"), 5),
    "window": (plan.window(GRID, start=1, size=2, eta=0.7), 4),
}
each_forest = pytest.mark.parametrize("name", FORESTS)
some_invalid = pytest.mark.parametrize("holes", [False, True], ids=["all valid", "some invalid"])


def grow(p, copies, prompts=1):
    """A rollout whose log-probs differ by about 1, so that softmax weights are far from equal."""
    rows = torch.arange(prompts).repeat_interleave(copies)
    grown = tree.grow(
        lambda x, s, r: torch.tanh(x), lambda k: keys.gaussian(k, (4,)), p, shape=(4,), rows=rows
    )
    return grown if grown.log_prob is None else replace(grown, log_prob=torch.randn(len(grown.src)))


def leaves_of(grown, holes):
    """Leaf values whose sums round; with holes a third of them is NaN, and all of the first two."""
    leaf = torch.randn(len(grown.leaf)) * 0.1 + 1e3
    leaf[: 2 * holes] = NAN
    leaf[5::3] = NAN if holes else leaf[5::3]
    return leaf


def make(total):
    return Rewards(raw={"r": total}, weights={"r": 1.0}, total=total, valid=~torch.isnan(total))


def walk(grown, b):
    """Transitions on the path of leaf b, the last one first."""
    at = int(grown.leaf_edge[b])
    while at >= 0:
        yield at
        at = int(grown.parent[at])


def mean(values):
    values = [v for v in values if not math.isnan(v)]
    return math.fsum(values) / len(values) if values else NAN


def node_values(grown, leaf):
    """(value of each transition's end, value of the state it leaves, usable leaves below it), from
    the definition; NaN without leaves."""
    below = [[] for _ in grown.src]
    for b in range(len(grown.leaf)):
        for e in walk(grown, b):
            below[e].append(float(leaf[b]))
    src = grown.src.tolist()
    value = [mean(v) for v in below]
    before = [mean([x for e, v in enumerate(below) if src[e] == s for x in v]) for s in src]
    return value, before, [sum(not math.isnan(x) for x in v) for v in below]


# --- td


@some_invalid
@each_forest
def test_td_is_the_value_reached_minus_the_value_left(name, holes):
    grown = grow(*FORESTS[name])
    leaf = leaves_of(grown, holes)
    value, before, count = node_values(grown, leaf)
    out = credit.td(grown, leaf)
    assert out.tolist() == pytest.approx(
        [v - w if n else 0 for v, w, n in zip(value, before, count, strict=True)], abs=1e-6
    )
    marked = credit.td(grown, torch.nan_to_num(leaf, 55.0), valid=~torch.isnan(leaf))
    assert torch.equal(marked, out) and out.dtype == torch.float32
    assert name == "window" or float(out.abs().max()) > 0.01


@some_invalid
@each_forest
def test_td_along_a_path_is_the_leaf_minus_the_value_of_its_first_state(name, holes):
    grown = grow(*FORESTS[name])
    leaf = leaves_of(grown, holes)
    _, before, _ = node_values(grown, leaf)
    out = credit.td(grown, leaf).double()
    for b in range(len(leaf)):
        path = list(walk(grown, b))
        if not leaf[b].isnan():
            assert float(out[path].sum()) == pytest.approx(
                float(leaf[b]) - before[path[-1]], abs=1e-6
            )


@some_invalid
@each_forest
def test_td_weighted_by_leaves_sums_to_zero_over_siblings(name, holes):
    grown = grow(*FORESTS[name])
    leaf = leaves_of(grown, holes)
    count = torch.tensor(node_values(grown, leaf)[2])
    out = credit.td(grown, leaf).double()
    totals = torch.zeros(len(grown.states), dtype=torch.float64).index_add(
        0, grown.src, count * out
    )
    assert float(totals.abs().max()) < 1e-5
    if not holes:  # siblings have equally many leaves
        plain = torch.zeros(len(grown.states), dtype=torch.float64).index_add(0, grown.src, out)
        assert float(plain.abs().max()) < 1e-5


@some_invalid
@pytest.mark.parametrize(
    "name",
    ["branch", "branch in seven", "branch with a shared root", "full with a shared root", "window"],
)
def test_td_without_siblings_is_exactly_zero(name, holes):
    """Not just small: transitions with zero advantage are not trained. Leaves of 1 to 1e12 round in
    every sum."""
    grown = grow(*FORESTS[name])
    leaf = leaves_of(grown, holes).double() * torch.logspace(
        -3, 9, len(grown.leaf), dtype=torch.float64
    )
    known, src = node_values(grown, leaf)[2], grown.src.tolist()
    alone = [sum(n > 0 for n, t in zip(known, src, strict=True) if t == s) <= 1 for s in src]
    assert any(alone) and not bool(credit.td(grown, leaf)[torch.tensor(alone)].any())


@each_forest
def test_td_of_equal_rewards_is_exactly_zero(name):
    """Also where means are over 2 and 3 leaves: .1 in fp32 adds up exactly in fp64. And siblings
    with equal leaves in another order."""
    grown = grow(*FORESTS[name])
    for holes in (False, True):
        leaf = leaves_of(grown, holes)
        assert not bool(credit.td(grown, torch.where(leaf.isnan(), leaf, 0.1)).any())
    turned = grow(plan.tree(GRID, start=1, depth=2, children=3, eta=0.7), 1)
    assert not bool(
        credit.td(turned, torch.tensor([0.1, 0.2, 0.7, 0.7, 0.1, 0.2, 0.2, 0.7, 0.1]))[:3].any()
    )


def test_td_by_hand():
    """Leaves 1 2 | 5 8 below a root worth 4: -2.5 and 2.5, then the halves' own differences."""
    grown = grow(plan.tree(GRID, start=1, depth=2, children=2, eta=0.7), 1)
    assert credit.td(grown, torch.tensor([1.0, 2.0, 5.0, 8.0])).tolist() == [
        -2.5,
        2.5,
        -0.5,
        0.5,
        -1.5,
        1.5,
    ]
    # the root is worth 5, its ends 1 and 7
    holed = credit.td(grown, torch.tensor([1.0, NAN, 5.0, 9.0]))
    assert holed.tolist() == [-4.0, 2.0, 0.0, 0.0, -2.0, 2.0]


def test_copies_with_one_x_T_are_siblings_and_copies_without_are_not():
    leaf = torch.tensor([1.0, 2.0, 6.0])
    shared = grow(plan.full(GRID, eta=0.7, init="group"), 3)
    assert credit.td(shared, leaf).view(3, 5).tolist() == [
        [-2, 0, 0, 0, 0],
        [-1, 0, 0, 0, 0],
        [3, 0, 0, 0, 0],
    ]
    apart = grow(plan.full(GRID, eta=0.7), 3)
    assert not bool(credit.td(apart, leaf).any())


# --- decisiveness


@some_invalid
@each_forest
def test_the_depths_add_up_to_the_variance_of_leaves_around_their_first_state(name, holes):
    """The law of total variance, also where invalid leaves make the tree unequal."""
    grown = grow(*FORESTS[name], prompts=2)
    leaf = leaves_of(grown, holes)
    _, before, _ = node_values(grown, leaf)
    gaps = [
        (float(leaf[b]) - before[list(walk(grown, b))[-1]]) ** 2
        for b in range(len(leaf))
        if not leaf[b].isnan()
    ]
    out = credit.decisiveness(grown, leaf)
    assert sum(out.values()) == pytest.approx(sum(gaps) / len(gaps), rel=1e-9, abs=1e-15)
    assert (
        sorted(out) == sorted(set(grown.plan.depth[grown.edge].tolist())) and min(out.values()) >= 0
    )
    assert (sum(gaps) > 0) == (name != "window")


def test_decisiveness_by_hand():
    """Leaves 1 2 | 5 8: depth 1 decides 2.5^2, depth 2 (2 * .5^2 + 2 * 1.5^2) / 4, together their
    variance 7.5; depth 0 is ODE."""
    grown = grow(plan.tree(GRID, start=1, depth=2, children=2, eta=0.7), 1)
    leaf = torch.tensor([1.0, 2.0, 5.0, 8.0])
    assert (
        credit.decisiveness(grown, leaf) == {1: 6.25, 2: 1.25}
        and float(leaf.var(correction=0)) == 7.5
    )
    # root 5: (16 + 4 + 4) / 3, then (0 + 4 + 4) / 3
    unequal = credit.decisiveness(grown, torch.tensor([1.0, NAN, 5.0, 9.0]))
    assert unequal == pytest.approx({1: 8.0, 2: 8 / 3}) and sum(unequal.values()) == pytest.approx(
        (16 + 0 + 16) / 3
    )


def test_decisiveness_of_granular_misses_the_variance_between_strides():
    """Two branches with leaves 0 2 and 4 10: the step decides ((1 - 4)^2 + (7 - 4)^2) / 2; the
    strides' (1 + 9) / 2 is nobody's."""
    grown = grow(plan.granular(GRID, steps=[1], children=2, strides=(1, 2), eta=0.7), 1)
    leaf = torch.tensor([0.0, 2.0, 4.0, 10.0])
    assert credit.decisiveness(grown, leaf) == {1: 9.0} and float(leaf.var(correction=0)) == 9 + 5


# --- siblings


@some_invalid
@each_forest
def test_siblings_are_z_scored_by_the_state_they_leave(name, holes):
    grown = grow(*FORESTS[name])
    leaf = leaves_of(grown, holes)
    value = node_values(grown, leaf)[0]
    expected = []
    for v, s in zip(value, grown.src.tolist(), strict=True):
        peers = torch.tensor(
            [
                w
                for w, t in zip(value, grown.src.tolist(), strict=True)
                if s == t and not math.isnan(w)
            ]
        ).double()
        known = not math.isnan(v) and len(peers) > 1
        expected.append(
            float((v - peers.mean()) / (peers.std(correction=1) + 1e-3)) if known else 0.0
        )
    assert credit.siblings(grown, leaf, ddof=1, eps=1e-3).tolist() == pytest.approx(
        expected, abs=1e-3
    )


def test_siblings_on_a_fan_are_grpo_at_each_step():
    """TempFlow-GRPO: steps 0 and 3, three branches each, of two copies."""
    grown = grow(plan.fan(GRID, steps=[0, 3], children=3, eta=0.7), 2)
    leaf = torch.randn(12)
    assert torch.allclose(
        credit.siblings(grown, leaf), credit.group_relative(leaf, torch.arange(12) // 3), atol=1e-6
    )
    spiked = torch.tensor([100.0] + [0.0] * 11)
    assert (
        float(credit.siblings(grown, spiked, clip=1.0).max())
        == 1
        < float(credit.siblings(grown, spiked, clip=None).max())
    )


# --- granular


def test_granular_sums_z_scores_of_each_stride_and_clips_the_sum():
    """One step, branches a b c, strides 1 and 2: rewards of stride 1 are 1 2 3, of stride 2 10 10
    40; z-scores by hand, ddof 0."""
    grown = grow(plan.granular(GRID, steps=[1], children=3, strides=(1, 2), eta=0.7), 1)
    agree, against = torch.tensor([1.0, 10, 2, 10, 3, 40]), torch.tensor([1.0, 40, 2, 10, 3, 10])
    a, b = 1.5**0.5, 0.5**0.5  # (1, 2, 3): -a 0 a; (10, 10, 40): mean 20, std 10 sqrt(2), -b -b 2b
    assert credit.granular(grown, agree, ddof=0, eps=0.0).tolist() == pytest.approx(
        [-a - b, -b, a + 2 * b], abs=1e-6
    )
    assert credit.granular(grown, agree, ddof=0, eps=0.0, clip=2.0).tolist() == pytest.approx(
        [-a - b, -b, 2], abs=1e-6
    )
    assert credit.granular(grown, against, ddof=0, eps=0.0, clip=1.0).tolist() == pytest.approx(
        [2 * b - a, -b, a - b], abs=1e-6
    )


def test_granular_compares_within_one_state_and_one_stride():
    """Copies, steps and strides have offsets and scales of their own, which change nothing; the sum
    is over (copy, step, child, stride)."""
    grown = grow(plan.granular(GRID, steps=[0, 2, 3], children=4, strides=(1, 2, 3), eta=0.7), 3)
    r = torch.randn(3, 3, 4, 3)
    out = credit.granular(grown, r.flatten())
    z = (r - r.mean(2, keepdim=True)) / r.std(2, keepdim=True)
    assert torch.allclose(out, z.sum(3).clamp(-5, 5).flatten(), atol=1e-5)
    moved = r * (2 * torch.rand(3, 3, 1, 3) + 0.5) + 10 * torch.randn(3, 3, 1, 3)
    assert torch.allclose(credit.granular(grown, moved.flatten()), out, atol=1e-4)


def test_granular_of_one_stride_is_siblings():
    grown = grow(plan.granular(GRID, steps=[0, 2], children=4, strides=(2,), eta=0.7), 2)
    r = torch.randn(16)
    assert torch.equal(credit.granular(grown, r, ddof=0, eps=1e-4), credit.siblings(grown, r))


def test_an_invalid_leaf_leaves_its_stride_and_not_its_branch():
    grown = grow(plan.granular(GRID, steps=[1], children=3, strides=(1, 2), eta=0.7), 1)
    r = torch.tensor([1.0, NAN, 2.0, 10.0, 3.0, 40.0])
    out = credit.granular(grown, r, ddof=0, eps=0.0)
    # stride 2: (10, 40) -> -1, 1
    assert out.tolist() == pytest.approx([-(1.5**0.5), -1.0, 1.5**0.5 + 1], abs=1e-6)
    assert torch.equal(
        credit.granular(grown, torch.nan_to_num(r, 7.0), valid=~r.isnan(), ddof=0, eps=0.0), out
    )


# --- nothing to say


RULES = {
    "spread": credit.spread,
    "siblings": credit.siblings,
    "td": credit.td,
    "granular": credit.granular,
    "tree_backup": credit.tree_backup,
    "branch": lambda grown, leaf: credit.branch(grown, make(leaf)).transition,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*FORESTS, "granular"])
def test_invalid_leaves_alone_give_zero(name, rule):
    """All of them, then all of the second prompt: the first is scored as if it were alone."""
    p, copies = FORESTS.get(name) or (plan.granular(GRID, steps=[0, 2], children=2, eta=0.7), 2)
    both, one = grow(p, copies, prompts=2), grow(p, copies)
    n = len(one.leaf)
    assert RULES[rule](both, torch.full((2 * n,), NAN)).tolist() == [0.0] * len(both.src)
    leaf = torch.cat([torch.randn(n), torch.full((n,), NAN)])
    one = replace(one, log_prob=both.log_prob[: len(one.src)])
    assert torch.equal(
        RULES[rule](both, leaf), torch.cat([RULES[rule](one, leaf[:n]), torch.zeros(len(one.src))])
    )
    assert credit.decisiveness(both, torch.full((2 * n,), NAN)) == dict.fromkeys(
        credit.decisiveness(both, torch.ones(2 * n)), 0.0
    )


@pytest.mark.parametrize("rule", ["spread", "siblings", "td", "granular", "tree_backup"])
def test_a_plan_without_transitions_has_no_credit(rule):
    grown = grow(plan.ode(GRID), 3)
    assert (
        RULES[rule](grown, torch.randn(3)).shape == (0,)
        and credit.decisiveness(grown, torch.randn(3)) == {}
    )


# --- where nothing branches


@pytest.mark.parametrize("sde_steps", [range(5), range(1, 4)], ids=["full", "window"])
@pytest.mark.parametrize(
    "rule", ["spread", "tree_backup", "branch", "branch path", "branch recursive", "spread + td"]
)
def test_one_child_everywhere_is_plain_grpo_under_every_rule(rule, sde_steps):
    """Trees with K = 1 have one leaf each: over the roots of the prompt, every edge has the
    advantage of its leaf, as on plain paths."""
    start, size = sde_steps[0], len(sde_steps)
    if rule.startswith("branch"):
        p = plan.branch(GRID, splits=[start], children=1, noisy=sde_steps, eta=0.7, sde="flow_sde")
    else:
        p = plan.tree(GRID, start=start, depth=size, children=1, eta=0.7)
    trees, paths = (
        grow(p, 4, prompts=2),
        grow(plan.window(GRID, start=start, size=size, eta=0.7), 4, prompts=2),
    )
    reward = torch.randn(8)
    adv = credit.group_relative(reward, trees.group)
    if rule.startswith("branch"):
        weighting = rule.removeprefix("branch").strip() or "mean"
        out = credit.branch(
            trees, make(reward), weighting=weighting, scope="prompt", ddof=0, eps=1e-4
        ).transition
    elif rule == "spread + td":
        out = credit.spread(trees, adv) + credit.td(trees, adv)
    else:
        out = RULES[rule](trees, adv)
    plain = credit.spread(paths, credit.group_relative(reward, paths.group))
    assert torch.allclose(out, plain, atol=1e-6) and float(plain.abs().min()) > 0
    assert torch.equal(trees.edge, paths.edge) and torch.equal(trees.noise_key, paths.noise_key)


def test_one_child_and_one_x_T_make_the_first_step_plain_grpo():
    """Roots that share x_T are siblings there: siblings gives the group's z-score at the first step
    and 0 below, td the centred reward."""
    grown = grow(plan.tree(GRID, start=0, depth=3, children=1, eta=0.7, init="group"), 4, prompts=2)
    reward = torch.randn(8)
    first = grown.parent < 0
    z, difference = credit.siblings(grown, reward), credit.td(grown, reward)
    assert torch.allclose(
        z[first], credit.group_relative(reward, grown.group), atol=1e-6
    ) and not bool(z[~first].any())
    centred = credit.group_relative(reward, grown.group, std=None)
    assert torch.allclose(difference[first], centred, atol=1e-6) and not bool(
        difference[~first].any()
    )


@pytest.mark.parametrize(
    "ways", [{"weighting": "path", "beta": 0.0}, {"weighting": "mean"}], ids=["beta 0", "mean"]
)
def test_branch_with_beta_zero_values_a_root_at_its_mean_leaf(ways):
    """Steps 0 and 1 come before the split: their one edge a tree stands for the root, z-scored over
    three trees."""
    grown = grow(plan.branch(GRID, splits=[2], children=3, eta=0.3), 3)
    reward = torch.randn(9)
    out = credit.branch(grown, make(reward), **ways)
    roots = credit.group_relative(reward.view(3, 3).mean(1), torch.zeros(3), ddof=1, eps=1e-8)
    depth = grown.plan.depth[grown.edge]
    assert torch.allclose(out.transition[depth == 0], roots, atol=1e-5) and torch.allclose(
        out.transition[depth == 1], roots, atol=1e-5
    )
    other = credit.branch(grown, make(reward), weighting="path", beta=1.0)
    assert not torch.allclose(other.transition[depth == 0], roots, atol=1e-2)


@pytest.mark.parametrize("scope", ["prompt", "tree"])
@pytest.mark.parametrize("weighting", ["mean", "path", "recursive"])
def test_an_edge_after_the_last_split_has_the_advantage_of_its_leaf(weighting, scope):
    grown = grow(plan.branch(GRID, splits=[0, 2], children=2, eta=0.3), 2, prompts=2)
    out = credit.branch(grown, make(torch.randn(16)), weighting=weighting, scope=scope)
    depth = grown.plan.depth[grown.edge]
    for b in range(16):
        late = [e for e in walk(grown, b) if depth[e] >= 2]
        assert len(late) == 3 and torch.allclose(
            out.transition[late], out.leaf[b].expand(3), atol=1e-5
        )


def test_equal_log_probs_make_every_weighting_the_mean():
    """Every child has as many leaves, so the mean over children is that over leaves; log-probs of
    ways of one length add up to the same."""
    grown = grow(plan.branch(GRID, splits=[0, 2], children=3, eta=0.3), 2)
    grown = replace(grown, log_prob=torch.full_like(grown.log_prob, -1.25))
    reward = make(torch.randn(18))
    mean_of = credit.branch(grown, reward).transition
    for weighting in ("path", "recursive"):
        assert torch.allclose(
            credit.branch(grown, reward, weighting=weighting).transition, mean_of, atol=1e-5
        ), weighting


# --- best of N
