"""The engine: each distinct state once, noise by name, stored steps that give their log-probs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowrl.samplers import dpmpp, flow_sde, keys, plan, sde, sigmas, tree
from flowrl.types import Transition, expand

T = 8
GRID = sigmas.shifted(T, 3)
SHAPE = (3, 2)


class Field:
    """A velocity that depends on x, sigma and row, and counts the rows it sees."""

    def __init__(self):
        self.rows, self.calls = 0, 0

    def __call__(self, x, sigma, rows):
        assert (
            x.dtype == torch.float32 and sigma.dtype == torch.float64 and rows.dtype == torch.int64
        )
        self.rows, self.calls = self.rows + len(x), self.calls + 1
        return torch.tanh(x) * expand(0.5 + sigma, x).float() + 0.3 * expand(rows, x).float()


def noise(k):
    return keys.gaussian(k, SHAPE)


def grow(p, rows, **options):
    return tree.grow(Field(), noise, p, shape=SHAPE, rows=torch.tensor(rows), **options)


PLANS = {
    "full": lambda init: plan.full(GRID, eta=0.7, init=init),
    "ode": lambda init: plan.ode(GRID, init=init),
    "window": lambda init: plan.window(GRID, eta=0.7, start=3, size=2, init=init),
    "cps": lambda init: plan.window(GRID, eta=0.8, start=1, size=3, sde="cps", init=init),
    "branch": lambda init: plan.branch(
        GRID, splits=[0, 2], children=2, eta=0.3, correlation=4.0, init=init
    ),
    "branch-mix": lambda init: plan.branch(
        GRID, splits=[1, 3], children=2, eta=0.3, noisy=[4], init=init
    ),
    "tree": lambda init: plan.tree(GRID, start=2, depth=2, children=3, eta=0.7, init=init),
    "fan": lambda init: plan.fan(GRID, steps=[0, 3, 6], children=2, eta=0.7, init=init),
    "granular": lambda init: plan.granular(GRID, steps=[1, 4, 6], children=2, eta=0.7, init=init),
    "flash": lambda init: plan.compress(
        plan.window(GRID, eta=0.7, start=1, size=2, init=init), tail=0.4
    ),
}


@pytest.mark.parametrize("init", ["sample", "group", "batch"])
@pytest.mark.parametrize("name", PLANS)
def test_network_rows_equal_the_count_on_the_table(name, init):
    p, field = PLANS[name](init), Field()
    grown = tree.grow(field, noise, p, shape=SHAPE, rows=torch.tensor([0, 1, 0, 0]))
    assert field.rows == grown.nfe == plan.nfe(p, 3) + plan.nfe(p, 1)
    assert field.calls == int(p.depth.max()) + 1


def cost_table(s, K):
    """(plan with one x_T a prompt, network rows before the copies part, rows of each copy,
    trained edges, distinct states)."""
    steps = [0, 2, T - 2]
    ode_left = {k: T - 1 - k for k in steps}
    split = [K ** sum(b <= i for b in (0, 2)) for i in range(T - 1)]
    fine = K * sum(1 + sum(math.ceil(n / L) - 1 for L in (1, 2, 3)) for n in ode_left.values())
    shared = {"eta": 0.7, "init": "group"}
    return {
        "Flow-GRPO": (plan.full(GRID, **shared), 1, T - 1, T - 1, T - 1),
        "Mix": (plan.window(GRID, start=s, size=3, **shared), s + 1, T - s - 1, 3, 3),
        "Flash": (
            plan.compress(plan.window(GRID, start=s, size=3, **shared), tail=0.4),
            s + 1,
            2 + math.ceil((T - s - 3) * 0.4),
            3,
            3,
        ),
        "Branch": (
            plan.branch(GRID, splits=[0, 2], children=K, **shared),
            1,
            sum(split),
            sum(split),
            sum([1, *split[:-1]]),
        ),
        "Tree": (
            plan.tree(GRID, start=s, depth=2, children=K, **shared),
            s + 1,
            K + K**2 * (T - s - 2),
            K + K**2,
            1 + K,
        ),
        "TempFlow": (
            plan.fan(GRID, steps=steps, children=K, **shared),
            T - 1,
            K * sum(ode_left.values()),
            3 * K,
            3,
        ),
        "G2RPO": (plan.granular(GRID, steps=steps, children=K, **shared), T - 1, fine, 3 * K, 3),
    }


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize(("start", "children"), [(0, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("name", cost_table(0, 2))
def test_the_engine_spends_what_the_formula_says(name, start, children, copies):
    """Copies share x_T: the first `common` rows serve them all; without sharing every copy pays
    them."""
    p, common, own, trained, states = cost_table(start, children)[name]
    together = grow(p, [0] * copies)
    assert together.nfe == plan.nfe(p, copies) == common + copies * own
    alone = grow(replace(p, init="sample"), [0] * copies)
    assert alone.nfe == plan.nfe(alone.plan, copies) == copies * (common + own)
    assert len(alone.src) == copies * trained and len(alone.src.unique()) == copies * states


@pytest.mark.parametrize("T", [2, 3, 7, 12])
@pytest.mark.parametrize("strides", [(1,), (1, 2, 3), (3, 1), (2, 5), (4, 20)])
@pytest.mark.parametrize("copies", [1, 2])
def test_granulars_formula_is_the_table_is_the_engine(T, strides, copies):
    """max(steps) + 1 + K sum_k (1 + sum_L (ceil((T-1-k)/L) - 1)); strides that reach T at once add
    nothing, alone or together."""
    steps, K = range(0, T - 1, 2), 3
    p = plan.granular(sigmas.shifted(T, 3), steps=steps, children=K, strides=strides, eta=0.7)
    formula = (
        steps[-1]
        + 1
        + K * sum(1 + sum(math.ceil((T - 1 - k) / L) - 1 for L in strides) for k in steps)
    )
    field = Field()
    grown = tree.grow(field, noise, p, shape=SHAPE, rows=torch.tensor([0] * copies))
    assert plan.nfe(p, copies) == grown.nfe == field.rows == copies * formula
    assert (
        len(grown.leaf) == copies * len(steps) * K * len(strides)
        and len(grown.src) == copies * len(steps) * K
    )


def test_strides_share_the_first_call_and_equal_ways_are_one_leaf():
    """T = 8, k = 5: two steps left, so strides 2 and 3 both go 6 -> 8 at once; k = 6: all three do
    the last step."""
    grown = grow(plan.granular(GRID, steps=[5, 6], children=1, eta=0.7), [0])
    a, b, c, d, e, f = grown.leaf.tolist()
    assert a != b and b == c and d == e == f != b
    assert grown.nfe == 7 + 2 + 1  # the trunk, 6 and 7 below k = 5, 7 below k = 6
    assert grown.leaf_edge.tolist() == [0, 0, 0, 1, 1, 1] and len(grown.leaf_key.unique()) == 6


def test_a_stride_is_the_ode_loop_over_its_sub_grid():
    grown = grow(plan.granular(GRID, steps=[1], children=1, eta=0.7), [0])
    row = torch.zeros(1).long()
    for leaf, way in zip(
        grown.leaves, ([2, 3, 4, 5, 6, 7, 8], [2, 4, 6, 8], [2, 5, 8]), strict=True
    ):
        x = grown.states[grown.dst[0]][None]
        for i, j in zip(way[:-1], way[1:], strict=True):
            x = x - (GRID[i] - GRID[j]).float() * Field()(x, GRID[i : i + 1], row)
        assert torch.allclose(x[0], leaf, atol=1e-6)


def test_what_follows_the_window_touches_no_log_prob():
    """Of the stored states only the leaf comes from ODE steps, and no transition reads
    it."""
    grown = grow(PLANS["window"]("sample"), [0, 1])
    moved = replace(grown, states=grown.states.index_fill(0, grown.leaf, 1e3))
    for ends in ("src", "dst"):
        assert torch.equal(
            moved.states[getattr(moved, ends)], grown.states[getattr(grown, ends)]
        ), ends


@pytest.mark.parametrize("name", PLANS)
def test_sharing_saves_calls_but_changes_no_sample(name):
    """Copies with equal x_T that are grown apart give the same leaves as grown together."""
    p = PLANS[name]("group")
    together = grow(p, [0, 1, 0], prompt_keys=torch.tensor([7, 8, 7]))
    apart = [
        grow(p, [r], prompt_keys=torch.tensor([k]), copies=torch.tensor([c]))
        for r, k, c in ((0, 7, 0), (1, 8, 0), (0, 7, 1))
    ]
    assert torch.allclose(together.leaves, torch.cat([a.leaves for a in apart]), atol=1e-6)
    assert torch.equal(together.leaf_key, torch.cat([a.leaf_key for a in apart]))


@pytest.mark.parametrize("name", ["full", "branch", "tree"])
def test_place_in_the_batch_does_not_matter(name):
    p = PLANS[name]("sample")
    a = grow(p, [0, 0, 1], prompt_keys=torch.tensor([5, 5, 6]))
    b = grow(p, [1, 0, 0], prompt_keys=torch.tensor([6, 5, 5]))
    n = p.leaves
    order = torch.cat([torch.arange(n, 2 * n), torch.arange(2 * n, 3 * n), torch.arange(n)])
    assert torch.allclose(a.leaves, b.leaves[order], atol=1e-6)


def test_all_ode_copies_with_shared_noise_are_one():
    grown = grow(PLANS["ode"]("group"), [0, 0, 1, 0])
    assert grown.leaf.tolist() == [0, 0, 1, 0] and len(grown.states) == 2 and grown.log_prob is None


def test_x_T_is_shared_as_asked():
    """eta and velocity aside, with the same rows: copies differ, agree within a prompt, or agree
    everywhere."""

    def starts(init):
        p = plan.full(GRID, eta=0.7, init=init)
        grown = tree.grow(
            lambda x, s, r: 0 * x, noise, p, shape=SHAPE, rows=torch.tensor([0, 0, 1])
        )
        first = torch.nonzero(grown.parent < 0).flatten()
        return grown.states[grown.src[first]]

    a = starts("sample")
    assert not torch.equal(a[0], a[1]) and not torch.equal(a[0], a[2])
    a = starts("group")
    assert torch.equal(a[0], a[1]) and not torch.equal(a[0], a[2])
    a = starts("batch")
    assert torch.equal(a[0], a[1]) and torch.equal(a[0], a[2])


@pytest.mark.parametrize(("init", "distinct"), [("sample", 6), ("group", 3)])
def test_roots_with_equal_noise_and_equal_ode_edges_are_one_node(init, distinct):
    """Two roots of three ODE steps each: 2 x 3 states, or 3 when the roots share x_T."""
    one = plan.ode(sigmas.linear(3), init=init)
    columns = {
        name: getattr(one, name).repeat(2)
        for name in ("sigma", "sigma_next", "kind", "eta", "trained")
    }
    two = replace(
        one,
        parent=torch.tensor([-1, 0, 1, -1, 3, 4]),
        root=torch.tensor([0, 0, 0, 1, 1, 1]),
        **columns,
    )
    field = Field()
    grown = tree.grow(field, noise, two, shape=SHAPE, rows=torch.tensor([0]))
    assert field.rows == plan.nfe(two) == distinct and grown.leaf.tolist() == (
        [0, 1] if init == "sample" else [0, 0]
    )
    assert grown.tree.tolist() == [0, 1]


def test_init_maps_noise_to_the_first_state():
    grown = grow(PLANS["full"]("sample"), [0, 1], init=lambda z, rows: 0 * z + 2)
    assert bool((grown.states[grown.src[grown.parent < 0]] == 2).all())


@pytest.mark.parametrize("name", [n for n in PLANS if n != "ode"])
def test_stored_steps_reproduce_their_log_probs(name):
    grown = grow(PLANS[name]("group"), [0, 1, 0])
    x, y = grown.states[grown.src], grown.states[grown.dst]
    v = Field()(x, grown.state_sigma[grown.src], grown.prompt[grown.src])
    step = sde.transition(grown.plan, v, x, grown.sigma, grown.sigma_next, grown.eta)
    assert torch.allclose(sde.log_prob(grown.plan, step, y), grown.log_prob, atol=1e-6)
    assert torch.equal(grown.state_sigma[grown.src], grown.sigma) and torch.equal(
        grown.state_sigma[grown.dst], grown.sigma_next
    )
    assert torch.equal(grown.prompt[grown.src], grown.prompt[grown.dst])


@pytest.mark.parametrize("name", PLANS)
def test_only_trained_ends_and_leaves_are_stored(name):
    grown = grow(PLANS[name]("sample"), [0, 0, 1])
    used = torch.cat([grown.src, grown.dst, grown.leaf])
    assert torch.unique(used).tolist() == list(range(len(grown.states)))
    if name == "window":  # w + 1 states a sample in the window, and the leaf
        assert len(grown.states) == 3 * (2 + 1 + 1)


@pytest.mark.parametrize("name", PLANS)
def test_parents_lead_from_leaves_to_roots(name):
    grown = grow(PLANS[name]("sample"), [0, 1])
    for b in range(len(grown.leaf)):
        at, below = int(grown.leaf_edge[b]), 0.0
        while at >= 0:
            assert (
                float(grown.sigma_next[at]) >= below
                and grown.prompt[grown.src[at]] == grown.group[b]
            )
            below, at = float(grown.sigma[at]), int(grown.parent[at])
    inner = grown.parent >= 0
    if name in ("full", "branch"):  # every step is stored: a child starts where its parent ends
        assert torch.equal(grown.src[inner], grown.dst[grown.parent[inner]])
    assert torch.unique(grown.noise_key).numel() == grown.noise_key.numel()


def test_one_path_by_hand():
    """The full plan of one copy is the textbook loop over flow_sde with the stored noise."""
    grown = grow(PLANS["full"]("sample"), [0])
    x = grown.states[grown.src[0]]
    for i in range(T - 1):
        v = Field()(x[None], GRID[i : i + 1], torch.zeros(1).long())
        step = flow_sde.transition(v, x[None], GRID[i], GRID[i + 1], eta=0.7, sigma_cap=GRID[1])
        z = keys.gaussian(keys.key("own", grown.noise_key[i : i + 1]), SHAPE)
        x = step.sample(z)[0]
        assert torch.allclose(x, grown.states[grown.dst[i]], atol=1e-6)
    v = Field()(x[None], GRID[-2:-1], torch.zeros(1).long())[0]
    assert torch.allclose(x - GRID[-2].float() * v, grown.leaves[0], atol=1e-6)


def siblings(s, prompts=4000):
    p = plan.branch(sigmas.linear(2), splits=[0], children=2, eta=1.0, correlation=s)
    rows = torch.arange(prompts)
    grown = tree.grow(
        lambda x, t, r: 0 * x, lambda k: keys.gaussian(k, (1,)), p, shape=(1,), rows=rows
    )
    x, y = grown.states[grown.src], grown.states[grown.dst]
    step = sde.transition(p, 0 * x, x, grown.sigma, grown.sigma_next, grown.eta)
    return ((y - step.mean) / step.std).view(prompts, 2)


@pytest.mark.parametrize("s", [0.0, 1.0, 3.0])
def test_correlated_siblings_have_unit_variance_and_covariance_1_over_1_plus_s2(s):
    xi = siblings(s)
    assert xi.var(0).tolist() == pytest.approx([1, 1], abs=0.09)
    assert float((xi[:, 0] * xi[:, 1]).mean()) == pytest.approx(1 / (1 + s * s), abs=0.08)
    if s == 0:
        assert torch.allclose(xi[:, 0], xi[:, 1], atol=1e-5)


def test_one_child_everywhere_is_the_plain_window_or_the_full_plan():
    pairs = [
        (
            plan.tree(GRID, start=2, depth=3, children=1, eta=0.7),
            plan.window(GRID, eta=0.7, start=2, size=3),
        ),
        (
            plan.branch(GRID, splits=[0, 2], children=1, eta=0.7, sde="flow_sde"),
            plan.full(GRID, eta=0.7),
        ),
        (
            plan.fan(GRID, steps=[4], children=1, eta=0.7),
            plan.window(GRID, eta=0.7, start=4, size=1),
        ),
        (
            plan.granular(GRID, steps=[4], children=1, strides=(1,), eta=0.7),
            plan.window(GRID, eta=0.7, start=4, size=1),
        ),
    ]
    for a, b in pairs:
        x, y = grow(a, [0, 1, 0]), grow(b, [0, 1, 0])
        for name in (
            "states",
            "src",
            "dst",
            "log_prob",
            "leaf",
            "leaf_edge",
            "leaf_key",
            "noise_key",
            "group",
            "tree",
        ):
            assert torch.equal(getattr(x, name), getattr(y, name)), name


def test_solver_history_is_inherited_through_the_window():
    """Flash: the first step after the window is already second-order, from the prediction made
    inside the window."""
    p = plan.compress(plan.window(GRID, eta=0.7, start=1, size=2), tail=1.0, solver="dpm2")
    grown = grow(p, [0])
    field, row = Field(), torch.zeros(1).long()
    before, x = grown.states[grown.src[1]][None], grown.states[grown.dst[1]][None]
    x0_prev, s_prev = before - GRID[2].float() * field(before, GRID[2:3], row), GRID[2]
    for i in range(3, T):
        v = field(x, GRID[i : i + 1], row)
        y = dpmpp.step(v, x, GRID[i], GRID[i + 1], x0_prev if i < T - 1 else None, s_prev)
        x0_prev, s_prev, x = x - GRID[i].float() * v, GRID[i], y
    assert torch.allclose(x[0], grown.leaves[0], atol=1e-6)
    straight = grow(
        plan.compress(plan.window(GRID, eta=0.7, start=1, size=2), tail=1.0, solver="euler"), [0]
    )
    assert not torch.allclose(straight.leaves, grown.leaves, atol=1e-4)


def test_keys_are_stable_and_ints_agree_with_tensors():
    assert keys.key(1, 2) != keys.key(2, 1) != keys.key(1, 2, 0)
    assert keys.key("x", torch.tensor([3, -4])).tolist() == [keys.key("x", 3), keys.key("x", -4)]
    # the published first output of splitmix64
    assert keys._mix(np.zeros(1, np.uint64))[0] == 0xE220A8397B1DCDAF
    assert keys.key(0) == -6411193824288604561  # a change here changes every run
    assert len(set(keys.key(torch.arange(20000)).tolist())) == 20000


def test_gaussian_rows_are_functions_of_their_keys():
    k = keys.key(torch.arange(2000))
    z = keys.gaussian(k, (2, 3))
    assert torch.equal(keys.gaussian(k.flip(0), (2, 3)), z.flip(0)) and z.dtype == torch.float32
    assert abs(float(z.mean())) < 0.03 and abs(float(z.var()) - 1) < 0.04


def test_permutations_and_uniforms_are_fair():
    p = keys.permutation(keys.key(torch.arange(6000)), 3)
    assert torch.equal(p.sort(-1).values, torch.arange(3).expand(6000, 3))
    _, counts = torch.unique(p, dim=0, return_counts=True)
    assert len(counts) == 6 and bool(((counts - 1000).abs() < 130).all())
    u = keys.uniform(keys.key(torch.arange(6000)))
    assert float(u.min()) >= 0 and float(u.max()) < 1 and abs(float(u.mean()) - 0.5) < 0.02
    assert sorted(keys.permutation(5, 9).tolist()) == list(range(9))


def test_copies_need_equal_lengths():
    with pytest.raises(ValueError, match="one value per copy"):
        grow(PLANS["full"]("sample"), [0, 1], prompt_keys=torch.tensor([1]))


def test_transition_samples_mean_plus_std_times_noise():
    step = Transition(mean=torch.ones(2, 2), std=torch.tensor(0.5))
    assert step.sample(torch.full((2, 2), 2.0)).tolist() == [[2, 2], [2, 2]]


def test_independent_siblings_are_uncorrelated_and_the_limit_of_large_s():
    """s -> inf and correlation=None give each child its own noise."""
    free, far = siblings(None), siblings(1e6)
    assert free.var(0).tolist() == pytest.approx([1, 1], abs=0.09)
    assert float((free[:, 0] * free[:, 1]).mean()) == pytest.approx(0, abs=4 / 4000**0.5)
    assert torch.allclose(free, far, atol=1e-4) and not torch.allclose(
        free, siblings(3.0), atol=0.1
    )
