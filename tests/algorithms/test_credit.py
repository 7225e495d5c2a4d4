"""Credit on trees: every rule on every plan is its definition, walked node by node in Python."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from flowrl import advantages as credit
from flowrl.samplers import keys, plan, sigmas, tree
from flowrl.types import Rewards

GRID = sigmas.shifted(6, 3)
NAN = math.nan
# name -> (plan, copies of one prompt): equal trees, a shared x_T, unary edges before and between
# splits, branches at several depths, paths
PLANS = {
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
    "granular": (plan.granular(GRID, steps=[0, 2, 3], children=4, strides=(1, 2, 3), eta=0.7), 2),
    "full with a shared root": (plan.full(GRID, eta=0.7, init="group"), 5),
    "window": (plan.window(GRID, start=1, size=2, eta=0.7), 4),
}
SMALL = plan.tree(GRID, start=1, depth=2, children=2, eta=0.7)  # edges 0 1 | 2 3 below 0, 4 5
each_plan = pytest.mark.parametrize("name", PLANS)
some_invalid = pytest.mark.parametrize("holes", [False, True], ids=["all valid", "some invalid"])


def grow(p, copies, prompts=1):
    """A rollout whose log-probs differ by about 1, so that softmax weights are far from equal."""
    rows = torch.arange(prompts).repeat_interleave(copies)
    grown = tree.grow(
        lambda x, s, r: torch.tanh(x), lambda k: keys.gaussian(k, (4,)), p, shape=(4,), rows=rows
    )
    return grown if grown.log_prob is None else replace(grown, log_prob=torch.randn(len(grown.src)))


def leaves_of(grown, holes):
    """Leaf values; with holes a third of them is NaN, and all of the first three."""
    leaf = 2 * torch.randn(len(grown.leaf))
    if holes:
        leaf[:3] = leaf[5::3] = NAN
    return leaf


def weighted(values, logits):
    """Mean of the values that are not NaN, by the softmax of their logits; NaN without any."""
    pairs = [(v, math.exp(l)) for v, l in zip(values, logits, strict=True) if not math.isnan(v)]
    return sum(v * w for v, w in pairs) / sum(w for _, w in pairs) if pairs else NAN


def standardised(values, scope, ddof, eps):
    """z-scores over equal scopes of the values that are not NaN; 0 for a NaN and where nothing
    differs."""
    out = []
    for v, s in zip(values, scope, strict=True):
        peers = [w for w, t in zip(values, scope, strict=True) if t == s and not math.isnan(w)]
        peers = torch.tensor(peers, dtype=torch.float64)
        flat = math.isnan(v) or len(peers) <= ddof or float(peers.std(correction=0)) < 1e-6
        out.append(0.0 if flat else float((v - peers.mean()) / (peers.std(correction=ddof) + eps)))
    return out


class Nodes:
    """The stored transitions of a rollout, as lists to walk over."""

    def __init__(self, grown, leaf):
        self.leaf, self.src, self.log_prob = leaf.tolist(), grown.src.tolist(), grown.log_prob
        self.depth, self.group = grown.plan.depth[grown.edge].tolist(), grown.group.tolist()
        parent, last = grown.parent.tolist(), grown.leaf_edge.tolist()
        self.kids = [[k for k, p in enumerate(parent) if p == e] for e in range(len(parent))]
        self.at = [[b for b, e in enumerate(last) if e == i] for i in range(len(parent))]
        self.tree = grown.tree.tolist()

    def below(self, e):
        """(leaf, log-prob of the way down to it from the end of e)."""
        return [(b, 0.0) for b in self.at[e]] + [
            (b, path + float(self.log_prob[k])) for k in self.kids[e] for b, path in self.below(k)
        ]

    def fused(self, beta=0.0):
        """Value of each transition: its leaves, by the softmax of beta times the way down."""
        out = []
        for e in range(len(self.src)):
            leaves = self.below(e)
            out.append(weighted([self.leaf[b] for b, _ in leaves], [beta * p for _, p in leaves]))
        return out

    def backed_up(self, temperature):
        """Value of each transition: its children, by the softmax of log-prob / temperature."""

        def value(e):
            own, kids = [self.leaf[b] for b in self.at[e]], self.kids[e]
            logits = [float(self.log_prob[k]) / temperature for k in kids] + [0.0] * len(own)
            return weighted([*map(value, kids), *own], logits)

        return [value(e) for e in range(len(self.src))]

    def td(self):
        """Value of each transition minus that of the state that it leaves."""
        leaves = [[b for b, _ in self.below(e)] for e in range(len(self.src))]
        states = {
            s: [self.leaf[b] for e, t in enumerate(self.src) if t == s for b in leaves[e]]
            for s in self.src
        }
        before = {s: weighted(values, [0.0] * len(values)) for s, values in states.items()}
        return [v - before[s] for v, s in zip(self.fused(), self.src, strict=True)]

    def siblings(self):
        return standardised(self.fused(), self.src, 1, 1e-3)

    def granular(self):
        """Sum of z-scores of a transition's leaves, each among the n-th leaves of its siblings."""
        leaves = [(e, n, b) for e, own in enumerate(self.at) for n, b in enumerate(own)]
        scope = [(self.src[e], n) for e, n, _ in leaves]
        scores = standardised([self.leaf[b] for *_, b in leaves], scope, 0, 1e-3)
        out = [0.0] * len(self.src)
        for (e, *_), score in zip(leaves, scores, strict=True):
            out[e] += score
        return [max(-5.0, min(5.0, total)) for total in out]

    def branch(self, values, scope):
        """BranchGRPO: z-scores of values at each depth, then those of the leaves."""
        of_leaf = self.group if scope == "prompt" else self.tree
        where = [(of_leaf[self.below(e)[0][0]], d) for e, d in enumerate(self.depth)]
        return [
            *standardised(values, where, 1, 1e-8),
            *standardised(self.leaf, of_leaf, 1, 1e-8),
        ]


def branch(grown, leaf, valid=None, **options):
    ok = ~leaf.isnan() if valid is None else valid
    reward = Rewards(raw={"r": leaf}, weights={"r": 1.0}, total=leaf, valid=ok)
    out = credit.branch(grown, reward, **options)
    return torch.cat([out.transition, out.leaf])


RULES = {
    "spread": (credit.spread, Nodes.fused),
    "td": (credit.td, Nodes.td),
    "siblings": (partial(credit.siblings, ddof=1, eps=1e-3), Nodes.siblings),
    "granular": (partial(credit.granular, ddof=0, eps=1e-3), Nodes.granular),
    "backup": (credit.tree_backup, lambda nodes: nodes.backed_up(1.0)),
    "cold backup": (partial(credit.tree_backup, temperature=0.5), lambda n: n.backed_up(0.5)),
    "branch": (branch, lambda nodes: nodes.branch(nodes.fused(), "prompt")),
    "branch, trees apart": (
        partial(branch, scope="tree"),
        lambda nodes: nodes.branch(nodes.fused(), "tree"),
    ),
    "branch, path": (
        partial(branch, weighting="path"),
        lambda nodes: nodes.branch(nodes.fused(beta=1.0), "prompt"),
    ),
    "branch, path, beta 0.5, trees apart": (
        partial(branch, weighting="path", beta=0.5, scope="tree"),
        lambda nodes: nodes.branch(nodes.fused(beta=0.5), "tree"),
    ),
    "branch, recursive": (
        partial(branch, weighting="recursive"),
        lambda nodes: nodes.branch(nodes.backed_up(1.0), "prompt"),
    ),
}


@some_invalid
@pytest.mark.parametrize("rule", RULES)
@each_plan
def test_every_rule_on_every_plan_is_its_definition(name, rule, holes):
    """Also where leaves are invalid, by NaN or by a mark; above such leaves alone it is 0."""
    grown = grow(*PLANS[name])
    leaf, (function, definition) = leaves_of(grown, holes), RULES[rule]
    out = function(grown, leaf)
    expected = [0.0 if math.isnan(v) else v for v in definition(Nodes(grown, leaf))]
    assert out.tolist() == pytest.approx(expected, abs=1e-4) and out.dtype == torch.float32
    marked = function(grown, leaf.nan_to_num(55.0), valid=~leaf.isnan())
    assert torch.equal(marked, out)


def test_no_two_rules_are_the_same_on_a_tree():
    grown = grow(*PLANS["tree"])
    leaf = leaves_of(grown, holes=False)
    seen = {name: function(grown, leaf)[: len(grown.src)] for name, (function, _) in RULES.items()}
    del seen["granular"]  # which compares the last transitions alone
    for name, out in seen.items():
        assert all(float((out - o).abs().max()) > 1e-2 for n, o in seen.items() if n != name), name


@pytest.mark.parametrize("rule", RULES)
@each_plan
def test_invalid_leaves_alone_give_zero(name, rule):
    """All of them, then all of the second prompt: the first is scored as if it were alone."""
    (p, copies), (function, _) = PLANS[name], RULES[rule]
    both, one = grow(p, copies, prompts=2), grow(p, copies)
    n, edges = len(one.leaf), len(one.src)
    assert not bool(function(both, torch.full((2 * n,), NAN)).any())
    leaf = torch.cat([torch.randn(n), torch.full((n,), NAN)])
    one = replace(one, log_prob=both.log_prob[:edges])
    found, alone = function(both, leaf)[: 2 * edges], function(one, leaf[:n])[:edges]
    assert torch.equal(found, torch.cat([alone, torch.zeros(edges)]))
    none = credit.decisiveness(both, torch.full((2 * n,), NAN))
    assert none == dict.fromkeys(credit.decisiveness(both, torch.ones(2 * n)), 0.0)


@pytest.mark.parametrize("rule", ["spread", "siblings", "td", "granular", "backup"])
def test_a_plan_without_transitions_has_no_credit(rule):
    grown = grow(plan.ode(GRID), 3)
    assert RULES[rule][0](grown, torch.randn(3)).shape == (0,)
    assert credit.decisiveness(grown, torch.randn(3)) == {}


@pytest.mark.parametrize(
    ("rule", "leaf", "expected"),
    [
        ("spread", [1.0, 2, 5, 8], [1.5, 6.5, 1, 2, 5, 8]),
        ("spread", [1.0, NAN, 5, 8], [1, 6.5, 1, 0, 5, 8]),  # not (1 + 0) / 2
        ("spread", [1.0, 0, 5, 8], [0.5, 6.5, 1, 0, 5, 8]),  # a valid 0 counts
        ("td", [1.0, 2, 5, 8], [-2.5, 2.5, -0.5, 0.5, -1.5, 1.5]),  # the root is worth 4
        ("td", [1.0, NAN, 5, 9], [-4, 2, 0, 0, -2, 2]),  # 5, and its ends 1 and 7
    ],
)
def test_credit_of_a_small_tree_by_hand(rule, leaf, expected):
    assert RULES[rule][0](grow(SMALL, 1), torch.tensor(leaf)).tolist() == expected


def test_equal_log_probs_make_every_weighting_the_mean():
    """Every child has as many leaves, and log-probs of ways of one length add up to the same."""
    grown = grow(*PLANS["branch"])
    grown = replace(grown, log_prob=torch.full_like(grown.log_prob, -1.25))
    leaf = torch.randn(18)
    assert torch.allclose(credit.tree_backup(grown, leaf), credit.spread(grown, leaf), atol=1e-6)
    for weighting in ("path", "recursive"):
        assert torch.allclose(
            branch(grown, leaf, weighting=weighting), branch(grown, leaf), atol=1e-5
        )


# --- td is exactly 0 where nothing can differ


def rounding_leaves(grown, holes):
    """Leaves whose sums round: 1e3 and a little, times 1e-3 to 1e9."""
    leaf = leaves_of(grown, holes).double() * 0.05 + 1e3
    return leaf * torch.logspace(-3, 9, len(grown.leaf), dtype=torch.float64)


@some_invalid
@pytest.mark.parametrize(
    "name",
    ["branch", "branch in seven", "branch with a shared root", "full with a shared root", "window"],
)
def test_td_without_siblings_is_exactly_zero(name, holes):
    """Not just small: transitions with zero advantage are not trained."""
    grown = grow(*PLANS[name])
    leaf = rounding_leaves(grown, holes)
    known, src = [not math.isnan(v) for v in Nodes(grown, leaf).fused()], grown.src.tolist()
    alone = [sum(n for n, t in zip(known, src, strict=True) if t == s) <= 1 for s in src]
    assert any(alone) and not bool(credit.td(grown, leaf)[torch.tensor(alone)].any())


@each_plan
def test_td_of_equal_rewards_is_exactly_zero(name):
    """Also where means are over 2 and 3 leaves: .1 in fp32 adds up exactly in fp64. And siblings
    with equal leaves in another order."""
    grown = grow(*PLANS[name])
    for holes in (False, True):
        leaf = leaves_of(grown, holes)
        assert not bool(credit.td(grown, torch.where(leaf.isnan(), leaf, 0.1)).any())
    turned = grow(plan.tree(GRID, start=1, depth=2, children=3, eta=0.7), 1)
    leaf = torch.tensor([0.1, 0.2, 0.7, 0.7, 0.1, 0.2, 0.2, 0.7, 0.1])
    assert not bool(credit.td(turned, leaf)[:3].any())


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
@pytest.mark.parametrize("name", [name for name in PLANS if name != "granular"])
def test_the_depths_add_up_to_the_variance_of_leaves_around_their_first_state(name, holes):
    """The law of total variance, also where invalid leaves make the tree unequal."""
    grown = grow(*PLANS[name], prompts=2)
    leaf = leaves_of(grown, holes)
    nodes = Nodes(grown, leaf)
    before = [v - d for v, d in zip(nodes.fused(), nodes.td(), strict=True)]
    gaps = []
    for b, value in enumerate(nodes.leaf):
        at = int(grown.leaf_edge[b])
        while int(grown.parent[at]) >= 0:
            at = int(grown.parent[at])
        gaps += [] if math.isnan(value) else [(value - before[at]) ** 2]
    out = credit.decisiveness(grown, leaf)
    assert sum(out.values()) == pytest.approx(sum(gaps) / len(gaps), rel=1e-6, abs=1e-12)
    assert sorted(out) == sorted(set(nodes.depth)) and min(out.values()) >= 0
    assert (sum(gaps) > 1e-9) == (name != "window")


def test_decisiveness_by_hand():
    """Leaves 1 2 | 5 8: depth 1 decides 2.5^2, depth 2 (2 * .5^2 + 2 * 1.5^2) / 4, together their
    variance 7.5; depth 0 is ODE. Without the second the root is worth 5."""
    grown, leaf = grow(SMALL, 1), torch.tensor([1.0, 2.0, 5.0, 8.0])
    assert credit.decisiveness(grown, leaf) == {1: 6.25, 2: 1.25}
    assert float(leaf.var(correction=0)) == 7.5
    unequal = credit.decisiveness(grown, torch.tensor([1.0, NAN, 5.0, 9.0]))
    assert unequal == pytest.approx({1: (16 + 4 + 4) / 3, 2: (0 + 4 + 4) / 3})
    assert sum(unequal.values()) == pytest.approx((16 + 0 + 16) / 3)


def test_decisiveness_of_granular_misses_the_variance_between_strides():
    """Two branches with leaves 0 2 and 4 10: the step decides ((1 - 4)^2 + (7 - 4)^2) / 2; the
    strides' (1 + 9) / 2 is nobody's."""
    grown = grow(plan.granular(GRID, steps=[1], children=2, strides=(1, 2), eta=0.7), 1)
    leaf = torch.tensor([0.0, 2.0, 4.0, 10.0])
    assert credit.decisiveness(grown, leaf) == {1: 9.0} and float(leaf.var(correction=0)) == 9 + 5


# --- clips and reductions


def test_siblings_on_a_fan_are_grpo_at_each_step_and_are_clipped():
    """TempFlow-GRPO: steps 0 and 3, three branches each, of two copies."""
    grown = grow(plan.fan(GRID, steps=[0, 3], children=3, eta=0.7), 2)
    leaf = torch.randn(12)
    plain = credit.group_relative(leaf, torch.arange(12) // 3)
    assert torch.allclose(credit.siblings(grown, leaf), plain, atol=1e-6)
    spiked = torch.tensor([100.0] + [0.0] * 11)
    assert float(credit.siblings(grown, spiked, clip=1.0).max()) == 1
    assert float(credit.siblings(grown, spiked, clip=None).max()) > 1


def test_granular_sums_z_scores_of_each_stride_and_clips_the_sum():
    """One step, branches a b c, strides 1 and 2: rewards of stride 1 are 1 2 3, of stride 2 10 10
    40; z-scores by hand, ddof 0."""
    grown = grow(plan.granular(GRID, steps=[1], children=3, strides=(1, 2), eta=0.7), 1)
    agree, against = torch.tensor([1.0, 10, 2, 10, 3, 40]), torch.tensor([1.0, 40, 2, 10, 3, 10])
    a, b = 1.5**0.5, 0.5**0.5  # (1, 2, 3): -a 0 a; (10, 10, 40): mean 20, std 10 sqrt(2), -b -b 2b
    for leaf, clip, expected in (
        (agree, 5.0, [-a - b, -b, a + 2 * b]),
        (agree, 2.0, [-a - b, -b, 2]),
        (against, 1.0, [2 * b - a, -b, a - b]),
    ):
        out = credit.granular(grown, leaf, ddof=0, eps=0.0, clip=clip)
        assert out.tolist() == pytest.approx(expected, abs=1e-6)


def test_granular_of_one_stride_is_siblings_and_no_scale_of_a_stride_matters():
    grown = grow(plan.granular(GRID, steps=[0, 2], children=4, strides=(2,), eta=0.7), 2)
    r = torch.randn(16)
    assert torch.equal(credit.granular(grown, r, ddof=0, eps=1e-4), credit.siblings(grown, r))
    grown = grow(*PLANS["granular"])
    r = torch.randn(2, 3, 4, 3)  # copy, step, child, stride
    moved = r * (2 * torch.rand(2, 3, 1, 3) + 0.5) + 10 * torch.randn(2, 3, 1, 3)
    one, other = (credit.granular(grown, values.flatten()) for values in (r, moved))
    assert torch.allclose(one, other, atol=1e-4)
