"""Plans are tables: who is stochastic, who is trained, how many leaves, how many network calls."""

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from flowrl.samplers import flow_sde, plan, sde, sigmas
from flowrl.samplers.common.window import geometric_place, window_start
from flowrl.types import ODE, SDE

T = 10
GRID = sigmas.shifted(T, 3)
SHIPPED = {
    "full": plan.full(GRID, eta=0.7),
    "ode": plan.ode(GRID),
    "window": plan.window(GRID, eta=0.7, start=2, size=3),
    "branch": plan.branch(GRID, splits=[0, 3], children=2, eta=0.3),
    "branch-mix": plan.branch(GRID, splits=[0, 3], children=2, eta=0.3, noisy=[5, 6]),
    "tree": plan.tree(GRID, start=1, depth=3, children=3, eta=0.7),
    "fan": plan.fan(GRID, steps=[0, 2, 8], children=4, eta=0.7),
    "granular": plan.granular(GRID, steps=[0, 2, 8], children=4, eta=0.7),
    "flash": plan.compress(plan.window(GRID, eta=0.7, start=1, size=3), tail=0.4),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_edges_join_descend_and_end_with_an_ode_step(name):
    p = SHIPPED[name]
    inner = p.parent >= 0
    assert bool((p.parent < torch.arange(p.edges)).all())
    assert torch.equal(p.sigma[inner], p.sigma_next[p.parent[inner]]) and bool(
        (p.sigma[~inner] == 1).all()
    )
    assert bool((p.sigma > p.sigma_next).all())
    assert bool((p.kind[p.leaf_edges] == ODE).all()) and bool(
        (p.sigma_next[p.leaf_edges] == 0).all()
    )
    assert torch.equal(p.trained, p.kind == SDE) and torch.equal(p.eta > 0, p.kind == SDE)


def test_leaves_and_trained_edges_by_hand():
    count = {name: (p.leaves, int(p.trained.sum())) for name, p in SHIPPED.items()}
    assert count["full"] == (1, T - 1) and count["ode"] == (1, 0) and count["window"] == (1, 3)
    assert count["branch"] == (4, 2 * 3 + 4 * 6)  # steps 0-2 on 2 paths, steps 3-8 on 4
    assert count["branch-mix"] == (4, 2 + 4 + 4 + 4)  # splits 0 and 3, then steps 5 and 6
    assert count["tree"] == (27, 3 + 9 + 27)
    assert count["fan"] == (12, 12) and count["granular"] == (12 * 3, 12)


def test_only_the_window_is_stochastic():
    p = SHIPPED["window"]
    assert torch.nonzero(p.kind == SDE).flatten().tolist() == [2, 3, 4]


def test_a_window_of_all_steps_but_two_is_mixgrpos_largest():
    p = plan.window(GRID, eta=0.7, start=0, size=T - 2)
    assert int(p.trained.sum()) == T - 2


@pytest.mark.parametrize("copies", [1, 4])
def test_nfe_formulas(copies):
    """G T; Fast with a shared prefix i + 1 + G (T-i-1); Branch sum_i K^#{b < i}; Tree i +
    sum_j<d k^j + k^d (T-i-d)."""
    assert plan.nfe(SHIPPED["full"], copies) == copies * T
    assert plan.nfe(SHIPPED["window"], copies) == copies * T
    for i in (0, 2, 5):
        shared = plan.window(GRID, eta=0.7, start=i, size=2, init="group")
        assert plan.nfe(shared, copies) == i + 1 + copies * (T - i - 1)
    assert plan.nfe(SHIPPED["branch"], copies) == copies * sum(
        2 ** sum(b < i for b in (0, 3)) for i in range(T)
    )
    assert plan.nfe(SHIPPED["tree"], copies) == copies * (1 + (1 + 3 + 9) + 27 * (T - 1 - 3))
    assert plan.nfe(SHIPPED["fan"], copies) == copies * (
        8 + 1 + 4 * sum(T - 1 - k for k in (0, 2, 8))
    )
    assert plan.nfe(plan.ode(GRID, init="group"), copies) == T
    # TempFlow: T + K sum (T-1-k), less the call at the last step
    everywhere = plan.fan(GRID, steps=range(T - 1), children=6, eta=0.7)
    assert plan.nfe(everywhere) == T - 1 + 6 * T * (T - 1) // 2


def walks(p):
    """Per leaf the indices into GRID that its path visits, and the index at which its SDE edge
    starts."""
    out = []
    for e in p.leaf_edges.tolist():
        way, noisy = [T], []
        while e >= 0:
            way.insert(0, GRID.tolist().index(float(p.sigma[e])))
            noisy += way[:1] if p.kind[e] == SDE else []
            e = int(p.parent[e])
        out.append((way, noisy))
    return out


def test_granular_finishes_each_branch_once_per_stride_in_their_order():
    """T = 10, a branch at step 3 ends at 4; six steps are left: all, 4 6 8, and 4 7. Its second
    child walks the same ways."""
    p = plan.granular(GRID, steps=[3], children=2, eta=0.7)
    ways = [[4, 5, 6, 7, 8, 9, 10], [4, 6, 8, 10], [4, 7, 10]]
    assert walks(p) == [([0, 1, 2, 3, *way], [3]) for way in ways] * 2
    assert (
        p.trained.nonzero().flatten().tolist() == [3, 3 + 1 + 6 + 3 + 2]
        and int(p.depth[p.trained].min()) == 3
    )
    late = plan.granular(GRID, steps=[2, 7], children=1, strides=[5, 2], eta=0.7)
    assert walks(late) == [
        ([0, 1, 2, 3, 8, 10], [2]),
        ([0, 1, 2, 3, 5, 7, 9, 10], [2]),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 10], [7]),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 10], [7]),
    ]
    # ceil(.5 of 6, 3, 2 edges) below each branch
    flash = plan.compress(p, tail=0.5, solver="euler")
    assert flash.leaves == 6 and flash.edges == 3 + 2 * (1 + 3 + 2 + 1)


def test_branchgrpos_published_counts():
    """T = 20, splits 0, 3, 6, 9, K = 2: 203 forwards and 16 leaves a tree; 218 edges
    there, 16 of which are our ODE ends."""
    p = plan.branch(sigmas.shifted(20, 3), splits=[0, 3, 6, 9], children=2, eta=0.3)
    assert (plan.nfe(p), p.leaves, p.edges) == (203, 16, 218)


@pytest.mark.parametrize(
    ("count", "tails"), [("paper", {0: 9, 10: 5, 20: 1}), ("code", {0: 7, 10: 3, 20: 1})]
)
def test_flash_step_counts(count, tails):
    """T = 25, w = 4, ratio .4: paper ceil((T-l-w) .4), code int((T-l-w+1) .4) - 1; l = 0
    has 11 calls in code, 13 in the paper."""
    for start, steps in tails.items():
        p = plan.compress(
            plan.window(sigmas.shifted(25, 3), eta=0.7, start=start, size=4), tail=0.4, count=count
        )
        assert p.edges == start + 4 + steps and plan.nfe(p) == p.edges
        assert p.solver == "dpm2" and p.dpm_from == pytest.approx(
            float(sigmas.shifted(25, 3)[start + 4])
        )
        assert int(p.trained.sum()) == 4


def test_flash_with_the_whole_tail_keeps_the_grid():
    window = plan.window(GRID, eta=0.7, start=1, size=3)
    same = plan.compress(window, tail=1.0, solver="euler")
    for name in ("parent", "sigma", "sigma_next", "kind", "eta", "trained"):
        assert torch.equal(getattr(same, name), getattr(window, name)), name


def test_flash_grid_is_uniform_before_the_shift_when_kappa_is_known():
    p = plan.compress(plan.window(GRID, eta=0.7, start=1, size=3), tail=0.5, kappa=3.0)
    tail = p.sigma[4:]
    u = tail / (3 - 2 * tail)
    # steps 4, 6, 8 of 10
    assert torch.allclose(u, torch.tensor([0.6, 0.4, 0.2]).double(), atol=1e-12)
    plain = plan.compress(plan.window(GRID, eta=0.7, start=1, size=3), tail=0.5)
    assert torch.allclose(plain.sigma[4:], GRID[[4, 6, 8]])


def test_flash_of_a_tree_compresses_every_leaf():
    p = plan.compress(plan.tree(GRID, start=1, depth=2, children=2, eta=0.7), tail=0.5)
    assert p.leaves == 4 and p.edges == 1 + 2 + 4 + 4 * 4  # 7 steps left, ceil(3.5) = 4
    assert int(p.trained.sum()) == 6


def starts(schedule, iterations, **options):
    return [window_start(schedule, i, steps=10, size=4, **options) for i in range(iterations)]


def test_progressive_window_moves_every_so_often_and_returns():
    # last: 5 + 4 = 9 < 10
    assert starts("progressive", 14, every=2) == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
        5,
        5,
        0,
        0,
    ]
    assert starts("progressive", 5, every=1, stride=3) == [0, 3, 0, 3, 0]
    assert starts("progressive", 3, every=1, low=1, high=6) == [1, 2, 1]


def test_decay_stays_shorter_and_shorter():
    """T = 10, so M = 8: 10 - 9 l / 8 rounded down is 10, 8, 7, 6, 5, 4 for l = 0..5."""
    out = starts("decay", 41, every=10)
    # 40 iterations and one of the next round
    assert out == [0] * 10 + [1] * 8 + [2] * 7 + [3] * 6 + [4] * 5 + [5] * 4 + [0]
    # M belongs to the schedule, not to the range that is chosen
    narrow = starts("decay", 26, every=10, high=6)
    assert narrow == [0] * 10 + [1] * 8 + [2] * 7 + [0]
    assert window_start("decay", 5, steps=2, size=1) == 0


def test_exp_decay_stays_constant_up_to_the_knee():
    out = [
        window_start("exp_decay", i, steps=25, size=4, every=20, rate=0.1)
        for i in range(20 * 14 + 19)
    ]
    assert [out.count(l) for l in range(15)] == [20] * 14 + [19]  # ceil(20 e^-.1) = 19


def test_random_windows_are_uniform_seeded_and_inside():
    out = starts("random", 3000, low=1, high=8, seed=5)
    assert (
        out
        == starts("random", 3000, low=1, high=8, seed=5)
        != starts("random", 3000, low=1, high=8, seed=6)
    )
    assert all(abs(out.count(l) - 750) < 120 for l in (1, 2, 3, 4)) and set(out) == {1, 2, 3, 4}
    assert set(starts("frozen", 50, low=2)) == {2}


@pytest.mark.parametrize("r", [0.2, 0.5, 0.97])
def test_geometric_windows_have_treegrpos_frequencies(r):
    """T = 10, w = 3 of steps 1..7: starts 1..5, the i-th with probability (1 - r) r^i / (1 -
    r^5)."""
    draws = 6000
    out = [
        window_start("geometric", i, steps=10, size=3, low=1, high=8, rate=r, seed=4)
        for i in range(draws)
    ]
    for i in range(5):
        p = (1 - r) * r**i / (1 - r**5)
        assert abs(out.count(1 + i) / draws - p) < 4 * (p * (1 - p) / draws) ** 0.5, i
    assert set(out) <= {1, 2, 3, 4, 5}


def test_geometric_windows_are_functions_of_seed_and_iteration():
    out = starts("geometric", 200, rate=0.5, seed=1)
    assert (
        out
        == starts("geometric", 200, rate=0.5, seed=1)
        != starts("geometric", 200, rate=0.5, seed=2)
    )
    assert window_start("geometric", 3, steps=5, size=4, rate=0.5) == 0  # one position only


@pytest.mark.parametrize("n", [1, 2, 5, 40])
@pytest.mark.parametrize("r", [1e-9, 0.5, 1 - 1e-9])
def test_the_ends_of_the_geometric_draw_stay_inside(r, n):
    last = geometric_place(1 - 2.0**-53, n, r)
    assert geometric_place(0.0, n, r) == 0 and 0 <= last < n
    assert r < 0.5 or n > 5 or last == n - 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: plan.window(GRID, eta=0.7, start=7, size=3),
            r"steps=\[7, 8, 9\] must be one or more steps in 0..8",
        ),
        (lambda: plan.window(GRID, eta=0.7, start=0, size=0), "size=0"),
        (lambda: plan.branch(GRID, splits=[9], children=2, eta=0.3), r"splits=\[9\].*stays ODE"),
        (lambda: plan.branch(GRID, splits=[0], children=0, eta=0.3), "children=0"),
        (
            lambda: plan.branch(GRID, splits=[0], children=2, eta=0.3, correlation=-1),
            "correlation=-1",
        ),
        (lambda: plan.tree(GRID, start=8, depth=2, children=2, eta=0.7), "stays ODE"),
        (lambda: plan.fan(GRID, steps=[], children=2, eta=0.7), r"steps=\[\]"),
        (lambda: plan.granular(GRID, steps=[9], children=2, eta=0.7), r"steps=\[9\].*stays ODE"),
        (lambda: plan.granular(GRID, steps=[0], children=2, strides=(), eta=0.7), r"strides=\[\]"),
        (
            lambda: plan.granular(GRID, steps=[0], children=2, strides=(2, 0), eta=0.7),
            r"strides=\[2, 0\]",
        ),
        (
            lambda: plan.granular(GRID, steps=[0], children=2, strides=(2, 2), eta=0.7),
            "different numbers",
        ),
        (lambda: plan.full(GRID, eta=-1.0), "eta=-1.0"),
        (lambda: plan.full(GRID, eta=1.2, sde="cps"), "eta=1.2 is too much for cps"),
        (lambda: plan.full(GRID, eta=0.7, sde="flow"), 'unknown sde "flow"'),
        (lambda: plan.full(GRID, eta=0.7, init="prompt"), 'init="prompt"'),
        (lambda: plan.full(GRID.flip(0), eta=0.7), "fall strictly"),
        (lambda: plan.compress(plan.ode(GRID), tail=0.5), "SDE"),
        (lambda: plan.compress(plan.full(GRID, eta=0.7), tail=0.0), "tail=0.0"),
        (lambda: window_start("progressive", 0, steps=10, size=10), "does not fit"),
        (lambda: window_start("slow", 0, steps=10, size=2), "choose progressive"),
        (
            lambda: window_start("geometric", 0, steps=10, size=2, rate=1.0),
            "rate=1.0 of a geometric window",
        ),
        (
            lambda: window_start("geometric", 0, steps=10, size=2, rate=0.0),
            "rate=0.0 of a geometric window",
        ),
    ],
)
def test_bad_arguments_are_answered_with_a_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_without_noise_nothing_is_trained():
    p = plan.full(GRID, eta=0.0)
    assert not bool(p.trained.any()) and not bool((p.kind == SDE).any())


@pytest.mark.parametrize(("steps", "shift"), [(10, 3.0), (20, 3.0), (20, 5.0), (50, 8.0)])
def test_a_grid_that_begins_just_below_one_is_capped_like_one_that_begins_at_one(steps, shift):
    """UniPC's flow sigmas begin at 1 - 1e-6 (Wan): g = eta sqrt(s / (1 - s_1)) at the first step
    and eta sqrt(s / (1 - s)) after it."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    scheduler.set_timesteps(steps)
    grid = scheduler.sigmas.double()
    assert 1 - 1e-5 < float(grid[0]) < 1
    p = plan.full(grid, eta=0.7)
    noisy = p.kind == SDE
    s, t = p.sigma[noisy], p.sigma_next[noisy]
    assert p.sigma_cap == float(grid[1]) and len(s) == steps - 1
    one = torch.ones(steps - 1, 1)
    on_x, on_v = (
        sde.transition(p, v, x, s, t, p.eta[noisy]) for v, x in ((0 * one, one), (one, 0 * one))
    )
    g = 0.7 * (s / (1 - torch.cat([grid[1:2], s[1:]]))).sqrt()
    assert torch.allclose(on_x.std.flatten().double(), g * (s - t).sqrt(), rtol=1e-6)
    assert torch.allclose(on_x.mean.flatten().double(), 1 - g**2 * (s - t) / (2 * s), rtol=1e-6)
    assert torch.allclose(
        on_v.mean.flatten().double(), -(1 + g**2 * (1 - s) / (2 * s)) * (s - t), rtol=1e-6
    )
    assert (
        float(on_x.std[0]) == pytest.approx(0.7, abs=1e-3)
        and float(on_x.std.min()) > 0.1
        and float(on_x.std.max()) < 1
    )


def test_a_grid_that_begins_clearly_below_one_has_no_cap():
    """SD1.5 begins at .929; a cap would change nothing there, and a sigma near 1 without one is
    refused."""
    grid = torch.linspace(0.929, 0.028, 7, dtype=torch.float64)
    assert (
        plan.full(grid, eta=0.7).sigma_cap is None
        and plan.full(GRID, eta=0.7, sde="dance_sde").sigma_cap is None
    )
    x, s, t = torch.ones(1, 2), torch.tensor(0.9).double(), torch.tensor(0.8).double()
    assert torch.equal(
        flow_sde.transition(x, x, s, t, eta=0.7).mean,
        flow_sde.transition(x, x, s, t, eta=0.7, sigma_cap=0.5).mean,
    )
    with pytest.raises(ValueError, match="sigma_cap"):
        flow_sde.transition(x, x, torch.tensor(1 - 1e-6).double(), s, eta=0.7)
    # its second and third sigma are above .999 too: the cap stands in for neither
    fine = sigmas.shifted(1000, 3)
    step = flow_sde.transition(x, x, fine[2], fine[3], eta=0.7, sigma_cap=fine[1])
    assert float(step.std) == pytest.approx(
        0.7 * float((fine[2] / (1 - fine[2]) * (fine[2] - fine[3])).sqrt()), rel=1e-6
    )
