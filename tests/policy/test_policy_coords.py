"""Schedulers as flows: closed forms, both ends of a schedule, exact times on the grid."""

import pytest
import tiny
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
    SCMScheduler,
)

from flowrl.policy import UnreplayableError
from flowrl.policy.replay.coords import Coords, TimeMap

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_velocity_is_eps_minus_x0_for_every_prediction_type(prediction):
    """Make x = a x0 + b eps at a known (a, b), hand the exact prediction over, and read eps - x0
    back."""
    coords = Coords(DDIMScheduler(**SD, prediction_type=prediction))
    x0, eps = torch.randn(3, 4), torch.randn(3, 4)
    alphas = coords_alphas = DDIMScheduler(**SD).alphas_cumprod[[10, 500, 990]].double()
    a, b = alphas.sqrt(), (1 - coords_alphas).sqrt()
    s, x = b / (a + b), (a[:, None] * x0 + b[:, None] * eps) / (a + b)[:, None]
    target = {"epsilon": eps, "sample": x0, "v_prediction": a[:, None] * eps - b[:, None] * x0}[
        prediction
    ]
    assert torch.allclose(
        coords.velocity(target.float(), x.float(), s), eps - x0, atol=2e-4
    )  # 1 / (1 - s) is 15 at t = 990


def test_an_angle_is_a_flow_in_other_clothes():
    """TrigFlow: x = d (cos t x0 + sin t eps), F = d (cos t eps - sin t x0) for data of deviation d.
    At t = pi/4 the two weigh the same: s = 1/2. SCM rounds pi/2 up to 1.5708, which is s = 1."""
    scheduler = SCMScheduler(sigma_data=0.5)
    scheduler.set_timesteps(4, intermediate_timesteps=None)
    coords, times = Coords(scheduler), scheduler.timesteps.double()
    sigmas = coords.sigmas_of(scheduler, times[:-1])
    assert sigmas[0] == 1 and sigmas[-1] == 0
    assert sigmas[2] == pytest.approx(0.5, abs=2e-6)
    assert torch.allclose(coords.time(sigmas), times, atol=5e-6), "pi/2 is 3.7e-6 less"
    x0, eps = torch.randn(2, 5, 3, dtype=torch.float64)
    cos, sin = torch.cos(times)[:, None], torch.sin(times)[:, None]
    x, prediction = 0.5 * (cos * x0 + sin * eps), 0.5 * (cos * eps - sin * x0)
    flow = x / coords.scale(sigmas)[:, None]
    s = sigmas[:, None]
    assert torch.allclose(flow, (1 - s) * x0 + s * eps, atol=1e-5)
    assert torch.allclose(coords.velocity(prediction, flow, sigmas), eps - x0, atol=2e-5)


def test_stable_diffusion_starts_and_ends_inside_the_flow():
    """50 DDIM steps of SD 1.5: t = 981 .. 1. s = b/(a+b) is .929 at the first and .028 after the
    last (alpha of t = 0), not 1 and 0."""
    policy = tiny.policy("sd15")
    schedule = policy.schedule(50)
    assert schedule.times[0] == 981 and schedule.times[-1] == 1
    assert schedule.sigmas[0].item() == pytest.approx(0.929, abs=1e-3)
    assert schedule.sigmas[-1].item() == pytest.approx(0.0283, abs=1e-4)
    a2 = policy.pipe.scheduler.alphas_cumprod[981].double()
    assert schedule.start == pytest.approx(1 / (a2.sqrt() + (1 - a2).sqrt()).item(), rel=1e-6)


def test_sdxl_euler_starts_at_its_own_noise_scale_and_ends_at_zero():
    """Euler: x = x0 + sigma eps, so s = sigma / (1 + sigma); it starts from sqrt(sigma^2 + 1) *
    noise and ends at exactly 0."""
    policy = tiny.policy("sdxl")
    schedule = policy.schedule(50)
    sigma = policy.pipe.scheduler.sigmas[0].double()
    assert schedule.sigmas[0].item() == pytest.approx((sigma / (1 + sigma)).item(), rel=1e-6)
    assert schedule.start == pytest.approx(((sigma**2 + 1).sqrt() / (1 + sigma)).item(), rel=1e-5)
    assert schedule.sigmas[-1] == 0


@pytest.mark.parametrize("name", tiny.NAMES)
def test_grid_sigmas_map_to_the_exact_time_in_both_precisions_and_others_are_not_truncated(name):
    policy = tiny.policy(name)
    for steps in (7, 4):
        schedule = policy.schedule(steps)
        assert (
            (schedule.sigmas.diff() < 0).all()
            and schedule.sigmas.dtype == torch.float64
            and schedule.steps == steps
        )
        assert torch.equal(policy.coords.time(schedule.sigmas[:-1]), schedule.times)
        assert torch.equal(policy.coords.time(schedule.sigmas[:-1].float()), schedule.times)
    middle = 0.5 * (schedule.sigmas[1] + schedule.sigmas[2])
    t = policy.coords.time(middle)
    assert schedule.times[2] < t < schedule.times[1]
    assert policy.coords.time(middle + 1e-5) != t, "a nearby sigma must have another time"


@pytest.mark.parametrize(
    "scheduler",
    [
        PNDMScheduler(**SD, skip_prk_steps=True),
        DPMSolverMultistepScheduler(**SD),
        EulerAncestralDiscreteScheduler(**SD),
    ],
    ids=lambda s: type(s).__name__,
)
def test_other_schedulers_of_the_same_network_replay_too(scheduler):
    """PNDM asks for its second time twice; DPM++ is multistep; the ancestral one draws noise, which
    the check must notice."""
    policy = tiny.policy("sd15", scheduler=scheduler)
    sigmas = policy.schedule(8).sigmas
    assert (sigmas.diff() < 0).all()
    cond, x, rows = policy.encode(tiny.PROMPTS), torch.randn(2, 4, 8, 8), torch.arange(2)
    ddim = tiny.policy("sd15")
    with torch.no_grad():
        mine, reference = (
            policy.velocity(x, 0.5, cond, rows),
            ddim.velocity(x, 0.5, ddim.encode(tiny.PROMPTS), rows),
        )
    assert (mine - reference).abs().max() <= 1e-4 * reference.abs().max(), (
        "one network, one flow, whatever scheduler came with it"
    )
    check = policy.self_check()
    stochastic = "Ancestral" in type(scheduler).__name__
    assert ("draws noise" in str(check)) == stochastic and ("euler" in check.errors) != stochastic


def test_the_final_sigma_of_flow_matching_is_zero_and_time_is_a_thousand_sigma():
    coords = Coords(FlowMatchEulerDiscreteScheduler())
    s = torch.tensor([0.0, 0.25, 0.731, 1.0], dtype=torch.float64)
    assert torch.allclose(coords.time(s), 1000 * s)
    assert torch.equal(coords.scale(s), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "wan21"])
def test_other_schedules_change_neither_where_a_rollout_starts_nor_the_velocity_off_the_grid(name):
    """SD 1.5 starts from .9206 times the noise at 20 steps and .9233 at 30; an evaluation at 30
    must not move a rollout of 20."""
    policy = tiny.policy(name)
    twenty = policy.schedule(20)
    first, off = (
        twenty.sigmas[0].item(),
        0.4 * twenty.sigmas[9].item() + 0.6 * twenty.sigmas[10].item(),
    )
    x, cond, rows = (
        torch.randn(2, *policy.latent_shape),
        policy.encode(tiny.PROMPTS),
        torch.arange(2),
    )
    with torch.no_grad():
        start, v = policy.init(x, first), policy.velocity(x, off, cond, rows)
        policy.schedule(30)
        policy.schedule(21)
        assert torch.equal(policy.init(x, first), start) and torch.equal(
            policy.velocity(x, off, cond, rows), v
        )
        fresh = tiny.policy(name)
        fresh.schedule(30)
        assert torch.equal(fresh.init(x, first), start)
        assert torch.equal(fresh.velocity(x, off, fresh.encode(tiny.PROMPTS), rows), v)
    assert torch.allclose(start, x * twenty.start, rtol=1e-6, atol=0)


@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_euler_starts_as_the_pipeline_does_at_every_number_of_steps(spacing):
    """Noise times sqrt(1 + sigma^2) with leading time steps, times sigma with trailing ones: each
    schedule, from the rule of another."""
    euler = EulerDiscreteScheduler(**SD, timestep_spacing=spacing)
    policy = tiny.policy("sdxl", scheduler=euler)
    for steps in (6, 20, 45):
        schedule = policy.schedule(steps)
        sigma = policy.pipe.scheduler.sigmas[0].double()
        own = sigma if spacing == "trailing" else (sigma**2 + 1).sqrt()
        assert schedule.start == pytest.approx((own / (1 + sigma)).item(), rel=1e-5)
        assert policy.init(
            torch.ones(1, 4, 8, 8), schedule.sigmas[0].item()
        ).mean().item() == pytest.approx(schedule.start, rel=1e-5)


def test_a_registered_time_is_exact_and_moves_no_other():
    """time = 1000 sigma, and a member (.5, 499) as of a scheduler with integer times: .5 +- 1e-7 is
    499, its neighbours stay."""
    time = TimeMap(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1000.0]))
    time.add(torch.tensor([0.5], dtype=torch.float64), torch.tensor([499.0]))
    at = torch.tensor(
        [0.5, 0.5 + 1e-7, 0.5 - 1e-7, 0.5 + 1e-6, 0.25, 0.0, 1.0], dtype=torch.float64
    )
    assert torch.allclose(
        time(at),
        torch.tensor([499.0, 499.0, 499.0, 500.001, 250.0, 0.0, 1000.0], dtype=torch.float64),
        atol=1e-9,
    )
    assert [time.at(s) for s in at.tolist()] == time(at).tolist()
    with pytest.raises(
        UnreplayableError,
        match="^time: the scheduler's model times lie up to 200 beside its noise curve",
    ):
        time.add(torch.tensor([0.3], dtype=torch.float64), torch.tensor([500.0]))
