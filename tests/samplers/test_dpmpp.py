"""DPM-Solver++(2M): against diffusers, by order of convergence, and at its ends."""

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from flowrl.samplers import dpmpp, keys, plan, sigmas, tree


def velocity(x, s):
    """Exact flow of x0 ~ N(.7, .25): x_s = (1-s) .7 + sqrt(V(s)) z, so the ODE's solution is
    known."""
    return (s - (1 - s) * 0.25) / ((1 - s) ** 2 * 0.25 + s**2) * (x - (1 - s) * 0.7) - 0.7


def solution(x, s, t):
    def spread(u):
        return ((1 - u) ** 2 * 0.25 + u**2) ** 0.5

    return (1 - t) * 0.7 + spread(t) / spread(s) * (x - (1 - s) * 0.7)


def wavy(x, s):
    return torch.tanh(x) * (0.3 + s) - 0.2 * x.square()


@pytest.mark.parametrize("steps", [5, 12, 20])
def test_equals_diffusers_on_its_own_grid(steps):
    scheduler = DPMSolverMultistepScheduler(
        use_flow_sigmas=True,
        prediction_type="flow_prediction",
        flow_shift=3.0,
        solver_order=2,
        algorithm_type="dpmsolver++",
    )
    scheduler.set_timesteps(steps)
    start = torch.randn(3, 4)
    x = start
    for t, s in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        x = scheduler.step(wavy(x, s), t, x).prev_sample
    ours = dpmpp.sample(lambda x, s: wavy(x, s.float()), start, scheduler.sigmas.double())
    assert torch.allclose(ours, x, atol=2e-6)


@pytest.mark.parametrize(("order", "rate"), [(1, 2.0), (2, 4.0)])
def test_error_falls_with_the_order(order, rate):
    x = torch.tensor([[0.3], [1.9]]).double()
    errors = []
    for steps in (64, 128, 256):
        grid = torch.linspace(0.9, 0.15, steps + 1, dtype=torch.float64)
        errors.append(
            float((dpmpp.sample(velocity, x, grid, order) - solution(x, 0.9, 0.15)).abs().max())
        )
    assert errors[0] / errors[1] == pytest.approx(rate, rel=0.2) and errors[1] / errors[
        2
    ] == pytest.approx(rate, rel=0.2)


def test_first_order_and_the_first_step_are_euler():
    x, grid = torch.randn(4, 3), sigmas.sd3(6)
    seen = []
    dpmpp.sample(lambda x, s: seen.append(x) or wavy(x, s.float()), x, grid)
    assert torch.allclose(
        seen[1], x + (grid[1] - grid[0]).float() * wavy(x, grid[0].float()), atol=1e-6
    )
    y = x
    for s, t in zip(grid[:-1], grid[1:], strict=True):
        y = y + (t - s).float() * wavy(y, s.float())
    assert torch.allclose(
        dpmpp.sample(lambda x, s: wavy(x, s.float()), x, grid, order=1), y, atol=1e-6
    )


def data_prediction_step(v, x, s, t):
    """DPM++1S: y = (t/s) x - (1-t) (e^-h - 1) x0, h = lambda_t - lambda_s, lambda =
    log((1-s)/s)."""
    h = ((1 - t) / t).log() - ((1 - s) / s).log()
    return (t / s) * x - (1 - t) * torch.expm1(-h) * (x - s * v)


def test_data_prediction_form_of_euler_is_exact():
    """A step without history, or with one from pure noise, is DPM++1S = x - (s - t)
    v."""
    x, v, prev = torch.randn(5), torch.randn(5), torch.randn(5)
    for s, t in torch.tensor(
        [[0.99, 0.9], [0.8, 0.55], [0.3, 0.299], [0.05, 0.001]], dtype=torch.float64
    ):
        expected = data_prediction_step(v.double(), x.double(), s, t)
        assert torch.allclose(expected, x.double() - (s - t) * v.double(), atol=1e-14)
        for got in (dpmpp.step(v, x, s, t), dpmpp.step(v, x, s, t, prev, 1.0)):
            assert torch.allclose(got.double(), expected, atol=3e-7)


def test_flash_without_compression_and_of_first_order_is_euler():
    """Ratio 1 and first order give the window's own leaves, which DPM++1S steps
    reach from the window's end."""
    grid, rows = sigmas.shifted(8, 3), torch.arange(3)
    window = plan.window(grid, eta=0.7, start=1, size=2)
    flash = plan.compress(window, tail=1.0, solver="euler")

    def grow(p):
        return tree.grow(
            lambda x, s, r: wavy(x, s[:, None].float()),
            lambda k: keys.gaussian(k, (4,)),
            p,
            shape=(4,),
            rows=rows,
        )

    a, b = grow(flash), grow(window)
    assert torch.equal(a.leaves, b.leaves) and torch.equal(a.log_prob, b.log_prob)
    x = a.states[a.dst[a.edge == 2]].double()  # at the end of the window, sigma_3
    for s, t in zip(grid[3:-2], grid[4:-1], strict=True):
        x = data_prediction_step(wavy(x, s), x, s, t)
    assert torch.allclose(a.leaves.double(), x - grid[-2] * wavy(x, grid[-2]), atol=2e-6)
    second = grow(plan.compress(window, tail=1.0, solver="dpm2"))
    assert not torch.allclose(second.leaves, b.leaves, atol=1e-3)


def test_last_step_returns_the_data_prediction():
    x, v, prev = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
    out = dpmpp.step(v, x, torch.tensor(0.3), torch.tensor(0.0), prev, torch.tensor(0.5))
    assert torch.allclose(out, x - 0.3 * v, atol=1e-6)


def test_rows_with_and_without_history_equal_single_steps():
    x, v, prev = torch.randn(3, 2), torch.randn(3, 2), torch.randn(3, 2)
    s, t, p = (
        torch.tensor([0.9, 0.6, 0.4]).double(),
        torch.tensor([0.8, 0.4, 0.0]).double(),
        torch.tensor([1.0, 0.8, 0.6]).double(),
    )
    rows = dpmpp.step(v, x, s, t, prev, p)
    for i in range(3):
        one = dpmpp.step(v[i : i + 1], x[i : i + 1], s[i], t[i], prev[i : i + 1], p[i])
        assert torch.allclose(rows[i : i + 1], one, atol=1e-6)
    assert torch.allclose(rows[0], x[0] - 0.1 * v[0], atol=1e-6)  # no history: Euler
    assert not torch.allclose(rows[1], x[1] - 0.2 * v[1], atol=1e-3)


def test_the_engine_with_an_ode_plan_is_sample():
    grid, x = sigmas.sd3(8), torch.randn(3, 4)
    for solver, order in (("dpm2", 2), ("euler", 1)):
        grown = tree.grow(
            lambda x, s, r: wavy(x, s[:, None].float()),
            lambda k: x,
            plan.ode(grid, solver=solver),
            shape=(4,),
            rows=torch.arange(3),
        )
        assert torch.allclose(
            grown.leaves, dpmpp.sample(lambda x, s: wavy(x, s.float()), x, grid, order), atol=1e-6
        )


def test_the_last_step_is_first_order_on_a_schedule_that_stops_early():
    """SD1.5's grid runs from .929 to .028 in flow coordinates."""
    grid, x = torch.linspace(0.929, 0.028, 7, dtype=torch.float64), torch.randn(3, 4)
    grown = tree.grow(
        lambda x, s, r: wavy(x, s[:, None].float()),
        lambda k: x,
        plan.ode(grid),
        shape=(4,),
        rows=torch.arange(3),
    )
    assert torch.allclose(
        grown.leaves, dpmpp.sample(lambda x, s: wavy(x, s.float()), x, grid), atol=1e-6
    )
    before = []
    dpmpp.sample(lambda x, s: before.append(x) or wavy(x, s.float()), x, grid)
    last = before[-1] + (grid[-1] - grid[-2]).float() * wavy(before[-1], grid[-2].float())
    assert torch.allclose(grown.leaves, last, atol=1e-6)


def test_an_order_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="choose 1 or 2"):
        dpmpp.sample(wavy, torch.zeros(1), sigmas.linear(3), order=3)
