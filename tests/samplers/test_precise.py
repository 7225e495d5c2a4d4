"""Precise steps: limits, composition, what they equal, and the exact spread of a Gaussian chain."""

import math

import pytest
import torch

from flowrl.samplers import (
    cps,
    dance_precise,
    dance_sde,
    flow_sde,
    langevin,
    ode,
    precise,
    sigmas,
)

X, V = torch.tensor([[1.0, -1.0]], dtype=torch.float64), torch.tensor([[0.2, 0.4]])
S, T = torch.tensor(0.75, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)


def step(module, s=S, t=T, **options):
    made = module.transition(V.double(), X, torch.as_tensor(s), torch.as_tensor(t), **options)
    return made.mean.double(), made.std.double()


def close(one, other, tolerance=1e-6):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, check_dtype=False)


def test_by_hand():
    mean, std = step(precise, eta=0.7)
    rho = (0.5 * 0.25 / (0.75 * 0.5)) ** 0.245
    assert rho == pytest.approx(0.764021, abs=1e-6) and float(std) == pytest.approx(0.322596)
    assert mean[0].tolist() == pytest.approx([0.826111, -0.993809], abs=1e-6)
    mean, std = step(dance_precise, eta=0.3)
    assert float(std) == pytest.approx(0.5 * math.sqrt(1 - 0.970446**2), abs=1e-5)


@pytest.mark.parametrize("module", [precise, dance_precise])
def test_limits(module):
    mean, std = step(module, t=0.0, eta=0.7)
    assert float(std) == 0 and torch.allclose(mean, X - S * V)  # the clean prediction
    mean, std = step(module, t=0.0, eta=0.0)
    assert float(std) == 0 and torch.isfinite(mean).all()
    # to first order in the length of the step it is Euler's
    euler = {precise: flow_sde, dance_precise: dance_sde}[module]
    extra = {"sigma_cap": 1.0} if euler is flow_sde else {}
    for length in (1e-2, 1e-3, 1e-4):
        close(
            step(module, t=0.75 - length, eta=0.7),
            step(euler, t=0.75 - length, eta=0.7, **extra),
            4 * length**1.5,
        )


def test_at_the_noisiest_level_precise_draws_fresh_noise_and_needs_no_cap():
    mean, std = step(precise, s=1.0, eta=0.7)
    assert float(std) == 0.5 and torch.allclose(mean, 0.5 * (X - V))
    assert float(step(dance_precise, s=1.0, eta=0.7)[1]) < 0.5


@pytest.mark.parametrize(("s", "t"), [(1.0, 0.6), (0.75, 0.5), (0.5, 0.25), (0.2, 0.0)])
@pytest.mark.parametrize("eta", [0.0, 0.7, 1.5])
def test_a_langevin_step_is_an_ode_step_and_a_correction_by_its_score(s, t, eta):
    """xp = x - (s - t) v, y = xp + h score + sqrt(2h) z with h = t^2 (1 - rho), by hand; without
    noise it is the ODE. The mean is that of precise, the variance 2 / (1 + rho) times as large."""
    mean, std = step(langevin, s=s, t=t, eta=eta)
    eps = X + (1 - s) * V
    h = t**2 * (1 - (t * (1 - s) / (s * (1 - t))) ** (eta**2 / 2))
    score = -eps / t if t else torch.zeros_like(eps)
    close((mean, std), (X - (s - t) * V + h * score, torch.tensor(math.sqrt(2 * h))))
    exact, less = step(precise, s=s, t=t, eta=eta)
    rho = 1 - h / t**2 if t else 1.0
    close((mean, std), (exact, less * math.sqrt(2 / (1 + rho))))


@pytest.mark.parametrize("module", [precise, dance_precise])
def test_two_steps_of_one_clean_prediction_are_one(module):
    """With x0 and eps as they are predicted at the start, rho multiplies: so do the parts of eps in
    the mean, and what is left of the variance."""
    x0, eps = X - S * V, X + (1 - S) * V

    def rho(s, t):
        mean, _ = step_of(s, t)
        return ((mean - (1 - t) * x0) / (t * eps)).mean()

    def step_of(s, t):
        x, v = (1 - s) * x0 + s * eps, eps - x0
        made = module.transition(v, x, torch.tensor(s), torch.tensor(t), eta=0.7)
        return made.mean.double(), made.std.double()

    whole, parts = rho(0.75, 0.25), rho(0.75, 0.5) * rho(0.5, 0.25)
    assert float(whole) == pytest.approx(float(parts), rel=1e-5)
    assert float(step_of(0.75, 0.25)[1]) == pytest.approx(
        0.25 * math.sqrt(1 - float(whole) ** 2), rel=1e-5
    )


@pytest.mark.parametrize(
    ("module", "eta", "expected"),
    [
        (ode, 0.0, [0.14055, 0.19090, 0.22500, 0.24353]),
        (flow_sde, 0.7, [0.22395, 0.21871, 0.23551, 0.24639]),
        (cps, 0.7, [0.13225, 0.16768, 0.19020, 0.20464]),
        (precise, 0.7, [0.13822, 0.18544, 0.21979, 0.24144]),
        (precise, 1.5, [0.13155, 0.16935, 0.20328, 0.23368]),
        (dance_precise, 0.3, [0.13973, 0.18714, 0.21847, 0.23887]),
    ],
)
def test_final_spread_of_a_gaussian(module, eta, expected):
    """x0 ~ N(.7, .25^2) with its exact velocity: the chain is affine, so its spread is exact."""
    for steps, value in zip((10, 20, 50, 200), expected, strict=True):
        grid = sigmas.shifted(steps, 3.0)
        extra = {"sigma_cap": grid[1]} if module is flow_sde else {}
        var, x = (
            float(grid[0]) ** 2 + (1 - float(grid[0])) ** 2 * 0.0625,
            torch.tensor([[0.0], [1.0]]),
        )
        for s, t in zip(grid[:-1], grid[1:], strict=True):
            scale = (s - (1 - s) * 0.0625) / ((1 - s) ** 2 * 0.0625 + s**2)
            v = scale * (x.double() - (1 - s) * 0.7) - 0.7
            made = module.transition(v, x, s, t, eta=eta, **extra)
            var = float(made.mean[1] - made.mean[0]) ** 2 * var + float(made.std) ** 2
        assert math.sqrt(var) == pytest.approx(value, abs=2e-5), steps
