"""One-step transitions against closed forms: a 1-D Gaussian, point masses, limits, diffusers."""

import math

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from flowrl.runtime import registry
from flowrl.samplers import cps, dance_sde, ddim, dpmpp, flow_sde, ode, sde, sigmas
from flowrl.types import Transition

M, C = 0.7, 0.25  # mean and variance of the data


def exact_velocity(x, s, c=C):
    """v(x, s) of x0 ~ N(M, c): A (x - (1-s) M) - M, A = (s - (1-s) c) / V(s), V(s) = (1-s)^2 c +
    s^2."""
    a = (s - (1 - s) * c) / ((1 - s) ** 2 * c + s**2)
    return a * (x - (1 - s) * M) - M


def moments(transition, grid, c=C):
    """Mean and variance after every step: each is affine, x -> alpha x + beta + std z, so both
    recursions are exact."""
    mean, var, out = 0.0, float(grid[0]) ** 2 + (1 - float(grid[0])) ** 2 * c, []
    x = torch.tensor([[0.0], [1.0]])
    for s, s_next in zip(grid[:-1], grid[1:], strict=True):
        step = transition(exact_velocity(x.double(), s, c), x, s, s_next)
        beta, alpha = float(step.mean[0]), float(step.mean[1] - step.mean[0])
        mean, var = alpha * mean + beta, alpha**2 * var + float(step.std) ** 2
        out.append((mean, var))
    return out


def with_eta(module, eta, grid=None):
    extra = {} if grid is None else {"sigma_cap": grid[1]}
    return lambda v, x, s, t: module.transition(v, x, s, t, eta=eta, **extra)


SAMPLERS = {
    "ode": lambda grid: with_eta(ode, 0.0),
    "flow": lambda grid: with_eta(flow_sde, 0.7, grid),
    "dance": lambda grid: with_eta(dance_sde, 0.3),
    "cps": lambda grid: with_eta(cps, 0.8),
}


@pytest.mark.parametrize(
    ("kappa", "steps", "expected"),
    [
        (1, 10, {"ode": 0.185574, "flow": 0.229962, "dance": 0.194974, "cps": 0.123754}),
        (1, 100, {"ode": 0.242700, "flow": 0.250388, "dance": 0.243801, "cps": 0.156106}),
        (1, 1000, {"ode": 0.249260, "flow": 0.250918, "dance": 0.249372, "cps": 0.162145}),
        (3, 10, {"ode": 0.136672, "flow": 0.180080, "dance": 0.148362, "cps": 0.098961}),
    ],
)
def test_final_variance_of_a_gaussian_is_the_affine_recursion(kappa, steps, expected):
    grid = sigmas.shifted(steps, kappa)
    for name, value in expected.items():
        mean, var = moments(SAMPLERS[name](grid), grid)[-1]
        assert var == pytest.approx(value, abs=2e-6 if steps <= 100 else 2e-5), name
        assert mean == pytest.approx(M, abs=1e-5), name


def test_flow_and_dance_sde_keep_the_marginal_and_cps_does_not():
    grid = sigmas.linear(1000)
    final = {name: moments(make(grid), grid)[-1][1] for name, make in SAMPLERS.items()}
    assert abs(final["flow"] - C) < 2e-3 and abs(final["dance"] - C) < 2e-3
    assert final["cps"] < 0.2


@pytest.mark.parametrize("module", [cps, ddim])
@pytest.mark.parametrize("eta", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("steps", [4, 10])
def test_cps_and_ddim_keep_the_marginal_of_a_point_mass_at_every_step(eta, steps, module):
    """x_s = (1 - s) M + s eps: mean (1 - s) M and variance s^2, whatever eta and the number of
    steps are; eta = 0 is the ODE."""
    grid = sigmas.shifted(steps, 3)
    for (mean, var), s in zip(
        moments(with_eta(module, eta), grid, c=0.0), grid[1:].tolist(), strict=True
    ):
        assert var == pytest.approx(s**2, abs=1e-6) and mean == pytest.approx((1 - s) * M, abs=1e-6)


@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_ddim_keeps_the_marginal_of_a_gaussian_as_steps_grow(eta):
    gaps = [
        C - moments(with_eta(ddim, eta), sigmas.linear(steps))[-1][1] for steps in (10, 100, 1000)
    ]
    assert abs(gaps[2]) < 2e-3 and gaps[0] > 5 * gaps[1] > 25 * gaps[2] > 0  # first order
    mean, _ = moments(with_eta(ddim, eta), sigmas.linear(100))[50]
    assert mean == pytest.approx(0.51 * M, abs=1e-5)


def test_dpmpp_keeps_the_marginal_of_a_gaussian_better_than_euler():
    """The map of a deterministic solver is affine too: variance alpha^2, mean beta. Second order:
    .2505 where Euler has .2427."""
    x, grid = torch.tensor([[0.0], [1.0]]), sigmas.linear(100)
    for order, variance in ((1, 0.242700), (2, 0.250549)):
        beta, one = (
            dpmpp.sample(lambda x, s: exact_velocity(x.double(), s), x, grid, order)
            .flatten()
            .tolist()
        )
        assert (one - beta) ** 2 == pytest.approx(variance, abs=2e-6) and beta == pytest.approx(
            M, abs=1e-5
        )


def test_flow_sde_overshoots_a_point_mass():
    """At the first step of T = 10, kappa = 3 the variance is 1.00737 instead of
    .92985."""
    grid = sigmas.shifted(10, 3)
    out = moments(with_eta(flow_sde, 0.7, grid), grid, c=0.0)
    assert out[0][1] == pytest.approx(1.00737, abs=1e-5) and float(grid[1]) ** 2 == pytest.approx(
        0.92985, abs=1e-5
    )
    assert out[-1][1] == pytest.approx(0.0519, abs=5e-5)
    flat = sigmas.linear(10)
    assert moments(with_eta(flow_sde, 0.7, flat), flat, c=0.0)[-1][1] == pytest.approx(
        0.00686, abs=5e-6
    )


def test_flow_sde_with_constant_diffusion_is_dance_sde():
    """eta_flow = eta sqrt((1-s)/s) makes g = eta."""
    x, v = torch.randn(6, 4), torch.randn(6, 4)
    s, t = torch.linspace(0.95, 0.2, 6).double(), torch.linspace(0.8, 0.1, 6).double()
    a = flow_sde.transition(v, x, s, t, eta=0.3 * ((1 - s) / s).sqrt())
    b = dance_sde.transition(v, x, s, t, eta=0.3)
    assert torch.allclose(a.mean, b.mean, atol=1e-6) and torch.allclose(a.std, b.std, atol=1e-7)


@pytest.mark.parametrize("module", [flow_sde, dance_sde, cps, ddim])
def test_without_noise_every_transition_is_the_ode_step(module):
    x, v, s, t = (
        torch.randn(5, 3),
        torch.randn(5, 3),
        torch.tensor([0.99, 0.8, 0.5, 0.3, 0.1]),
        torch.tensor([0.9, 0.5, 0.4, 0.1, 0.0]),
    )
    step, straight = module.transition(v, x, s, t, eta=0.0), ode.transition(v, x, s, t)
    assert torch.allclose(step.mean, straight.mean, atol=1e-6) and bool((step.std == 0).all())
    assert torch.allclose(straight.mean, x - (s - t)[:, None] * v, atol=1e-6)


def test_scalar_row_and_expanded_sigmas_agree():
    x, v = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4)
    for module in (flow_sde, dance_sde, cps, ddim):
        rows = module.transition(
            v, x, torch.full((3,), 0.6), torch.full((3,), 0.5), eta=torch.full((3,), 0.5)
        )
        wide = module.transition(
            v, x, torch.full((3, 1, 1, 1), 0.6), torch.full((3, 1, 1, 1), 0.5), eta=0.5
        )
        single = module.transition(v, x, torch.tensor(0.6), torch.tensor(0.5), eta=0.5)
        assert (
            rows.std.shape == (3, 1, 1, 1)
            and single.std.shape == ()
            and rows.mean.dtype == torch.float32
        )
        assert torch.equal(rows.mean, wide.mean) and torch.allclose(
            rows.mean, single.mean, atol=1e-6
        )


def test_cps_noise_and_kept_noise_make_the_next_level():
    """Coefficient of the predicted noise squared plus std^2 = s'^2; eta = 1 swaps all of it."""
    s, t = torch.tensor(0.7).double(), torch.tensor(0.4).double()
    x0, x1 = torch.zeros(1, 1), torch.ones(1, 1)
    for eta in (0.2, 0.8, 1.0):
        step = cps.transition(x1 - x0, (1 - s) * x0 + s * x1, s, t, eta=eta)
        assert float(step.mean) ** 2 + float(step.std) ** 2 == pytest.approx(0.16, abs=1e-6)
    assert float(step.mean) == pytest.approx(0, abs=1e-7)
    assert float(cps.transition(x1, x1, s, torch.tensor(0.0), eta=0.8).std) == 0


@pytest.mark.parametrize("eta", [0.3, 0.8, 1.0])
def test_ddim_noise_and_kept_noise_make_the_next_level(eta):
    """In flow coordinates coefficient^2 + std^2 = s'^2; std^2 s'^-2 = eta^2 (1 - abar / abar') / (1
    - abar), the textbook's variance."""
    for s, t in ((1.0, 0.9), (0.7, 0.4), (0.2, 0.1), (0.3, 0.0)):
        abar, after = ((1 - u) ** 2 / ((1 - u) ** 2 + u**2) for u in (s, t))
        eps = torch.ones(1, 1)  # x0 = 0: x = s eps, v = eps
        step = ddim.transition(
            eps, s * eps, torch.tensor(s).double(), torch.tensor(t).double(), eta=eta
        )
        assert float(step.std) ** 2 == pytest.approx(
            t**2 * eta**2 * (1 - abar / after) / (1 - abar), abs=1e-7
        )
        assert float(step.mean) ** 2 + float(step.std) ** 2 == pytest.approx(t**2, abs=1e-6)
        # x0 = 1, eps = 0
        data = ddim.transition(
            -eps, (1 - s) * eps, torch.tensor(s).double(), torch.tensor(t).double(), eta=eta
        )
        assert float(data.mean) == pytest.approx(1 - t, abs=1e-6)


def test_cps_log_prob_has_no_variance():
    step = Transition(mean=torch.tensor([[1.0, 2.0]]), std=torch.tensor(0.5))
    # -(1 + 4) / 2
    assert float(cps.log_prob(step, torch.tensor([[2.0, 4.0]]))) == pytest.approx(-2.5)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_ddim_in_flow_coordinates_is_diffusers_ddim(eta):
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        set_alpha_to_one=False,
    )
    scheduler.set_timesteps(20)
    for t in scheduler.timesteps.tolist():
        x, e, z = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)
        theirs = scheduler.step(e, t, x, eta=eta, variance_noise=z if eta else None).prev_sample
        now = scheduler.alphas_cumprod[t].double()
        last = scheduler.final_alpha_cumprod
        after = (scheduler.alphas_cumprod[t - 50] if t >= 50 else last).double()
        (a, b), (a2, b2) = ((q.sqrt(), (1 - q).sqrt()) for q in (now, after))
        v = e - (x - b * e) / a
        step = ddim.transition(v, x / (a + b), b / (a + b), b2 / (a2 + b2), eta=eta)
        ours = step.sample(z) * (a2 + b2)
        assert (ours - theirs).norm() / theirs.norm() < 1e-6


def test_log_prob_is_the_mean_gaussian_log_density():
    step = Transition(mean=torch.randn(3, 2, 5), std=torch.full((3, 1, 1), 0.4))
    y = torch.randn(3, 2, 5)
    reference = torch.distributions.Normal(step.mean, step.std).log_prob(y)
    assert torch.allclose(step.log_prob(y), reference.flatten(1).mean(1), atol=1e-6)
    assert torch.allclose(step.log_prob(y, reduction="sum"), reference.flatten(1).sum(1), atol=1e-5)


def test_log_ratio_is_linear_in_the_noise_and_quadratic_in_the_shift():
    """lp_theta - lp_old = (1/D)(eps . delta - |delta|^2 / 2), delta = (mu_theta -
    mu_old) / std."""
    eps, delta, std = torch.randn(4, 7), 0.1 * torch.randn(4, 7), torch.tensor(0.3)
    old = Transition(mean=torch.randn(4, 7), std=std)
    new = Transition(mean=old.mean + delta * std, std=std)
    y = old.sample(eps)
    expected = (eps * delta - 0.5 * delta**2).mean(1)
    assert torch.allclose(new.log_prob(y) - old.log_prob(y), expected, atol=1e-6)


def test_log_prob_of_a_deterministic_step_is_refused():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="deterministic"):
        ode.transition(x, x, torch.tensor(0.5), torch.tensor(0.4)).log_prob(x)


def test_flow_sde_at_pure_noise_asks_for_a_cap():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="sigma_cap"):
        flow_sde.transition(x, x, torch.tensor(1.0), torch.tensor(0.9), eta=0.7)


def test_every_sde_is_found_by_name_and_a_misspelt_one_is_answered():
    assert set(sde.SDES) <= set(registry.choices("flowrl.samplers"))
    with pytest.raises(ValueError, match='did you mean "flow_sde"'):
        sde.find("flow_sda")


def test_sd3_schedule_is_shifted_twice():
    golden = [1, 0.96013, 0.91335, 0.85769, 0.79037, 0.70728, 0.60215, 0.46488, 0.27805, 0.00893, 0]
    assert sigmas.sd3(10).tolist() == pytest.approx(golden, abs=6e-6)


@pytest.mark.parametrize("steps", [4, 10, 28])
def test_sd3_schedule_is_diffusers_own(steps):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    assert torch.allclose(sigmas.sd3(steps), scheduler.sigmas.double(), atol=1e-6)


# mu = .5 + .65 (1024 - 256) / 3840 at 512 x 512; e^mu / (e^mu + 1/u - 1) is shift(u, e^mu)
FLUX = sigmas.shifted(6, math.exp(0.63))
SD3 = (0.7, 0.7430, 0.5362, 0.4459, 0.3918, 0.3528)  # first standard deviations of Flow-GRPO
MIX = (0.7, 0.7145, 0.5087, 0.4182, 0.3646, 0.3282)  # and of MixGRPO


def test_flux_schedule_is_diffusers_dynamic_shift():
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(
        sigmas=torch.linspace(1, 1 / 6, 6).tolist(), mu=0.5 + 0.65 * (1024 - 256) / 3840
    )
    assert torch.allclose(FLUX, scheduler.sigmas.double(), atol=1e-6)
    assert FLUX.tolist() == pytest.approx(
        [1, 0.90374, 0.7897, 0.65249, 0.48422, 0.273, 0], abs=6e-6
    )


@pytest.mark.parametrize(
    ("module", "eta", "grid", "expected"),
    [
        # Flow-GRPO's SD3, and its FLUX at 512 x 512
        (flow_sde, 0.7, sigmas.sd3(10), [*SD3, 0.3191, 0.2820, 0.2254, 0.0063]),
        (flow_sde, 0.9, FLUX, [0.9, 0.9312, 0.6460, 0.5059, 0.4008, 0.2882]),
        (flow_sde, 0.7, sigmas.shifted(25, 3), [*MIX, ..., 0.0825]),
        # the other way: noise grows towards the image
        (dance_sde, 0.3, sigmas.shifted(16, 3), [0.0442, ..., 0.1225]),
    ],
)
def test_published_stds(module, eta, grid, expected):
    x = torch.zeros(len(grid) - 1, 1)
    cap = {"sigma_cap": grid[1]} if module is flow_sde else {}
    std = module.transition(x, x, grid[:-1], grid[1:], eta=eta, **cap).std.flatten().tolist()
    first = expected.index(...) if ... in expected else len(expected)
    assert std[:first] == pytest.approx(expected[:first], abs=6e-5) and std[-1] == pytest.approx(
        expected[-1], abs=6e-5
    )
    if module is dance_sde:
        assert std == sorted(std)
    else:  # dt = 1 - sigma_1, which is the cap
        assert std[0] == pytest.approx(eta, abs=1e-7)


def test_shift_is_the_identity_at_one_and_moves_the_middle():
    u = sigmas.linear(4)
    assert torch.equal(sigmas.shift(u, 1), u)
    assert float(sigmas.shifted(2, 3)[1]) == pytest.approx(0.75)  # 3/2 / (1 + 2/2)
    assert math.isclose(float(sigmas.shifted(7, 5)[0]), 1) and float(sigmas.shifted(7, 5)[-1]) == 0
