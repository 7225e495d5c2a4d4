"""Schedulers as flows: closed forms, both ends of a schedule, exact times on the grid."""

import pytest
import tiny
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
)

from flowrl.policy.coords import Coords

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_velocity_is_eps_minus_x0_for_every_prediction_type(prediction):
    """Make x = a x0 + b eps at a known (a, b), hand the exact prediction over, and read eps - x0 back."""
    coords = Coords(DDIMScheduler(**SD, prediction_type=prediction))
    x0, eps = torch.randn(3, 4), torch.randn(3, 4)
    alphas = coords_alphas = DDIMScheduler(**SD).alphas_cumprod[[10, 500, 990]].double()
    a, b = alphas.sqrt(), (1 - coords_alphas).sqrt()
    s, x = b / (a + b), (a[:, None] * x0 + b[:, None] * eps) / (a + b)[:, None]
    target = {"epsilon": eps, "sample": x0, "v_prediction": a[:, None] * eps - b[:, None] * x0}[prediction]
    v = coords.velocity(target.float(), x.float(), s)
    assert torch.allclose(v, eps - x0, atol=2e-4)  # 1 / (1 - s) is 15 at t = 990
    assert torch.allclose(coords.to_prediction(v, x.float(), s), target.float(), atol=1e-5)


def test_stable_diffusion_starts_and_ends_inside_the_flow():
    """50 DDIM steps of SD 1.5: t = 981 .. 1. s = b/(a+b) is .929 at the first and .028 after the last (alpha of t = 0), not 1 and 0."""
    policy = tiny.policy("sd15")
    schedule = policy.schedule(50)
    assert schedule.times[0] == 981 and schedule.times[-1] == 1
    assert schedule.sigmas[0].item() == pytest.approx(0.929, abs=1e-3)
    assert schedule.sigmas[-1].item() == pytest.approx(0.0283, abs=1e-4)
    a2 = policy.pipe.scheduler.alphas_cumprod[981].double()
    assert schedule.start == pytest.approx(1 / (a2.sqrt() + (1 - a2).sqrt()).item(), rel=1e-6)


def test_sdxl_euler_starts_at_its_own_noise_scale_and_ends_at_zero():
    """Euler: x = x0 + sigma eps, so s = sigma / (1 + sigma); it starts from sqrt(sigma^2 + 1) * noise and ends at exactly 0."""
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
        assert (schedule.sigmas.diff() < 0).all() and schedule.sigmas.dtype == torch.float64 and schedule.steps == steps
        assert torch.equal(policy.coords.time(schedule.sigmas[:-1]), schedule.times)
        assert torch.equal(policy.coords.time(schedule.sigmas[:-1].float()), schedule.times)
    middle = 0.5 * (schedule.sigmas[1] + schedule.sigmas[2])
    t = policy.coords.time(middle)
    assert schedule.times[2] < t < schedule.times[1]
    assert policy.coords.time(middle + 1e-5) != t, "a nearby sigma must have another time"


@pytest.mark.parametrize(
    "scheduler",
    [PNDMScheduler(**SD, skip_prk_steps=True), DPMSolverMultistepScheduler(**SD), EulerAncestralDiscreteScheduler(**SD)],
    ids=lambda s: type(s).__name__,
)
def test_other_schedulers_of_the_same_network_replay_too(scheduler):
    """PNDM asks for its second time twice; DPM++ is multistep; the ancestral one draws noise, which the check must notice."""
    policy = tiny.policy("sd15", scheduler=scheduler)
    sigmas = policy.schedule(8).sigmas
    assert (sigmas.diff() < 0).all()
    cond, x, rows = policy.encode(tiny.PROMPTS), torch.randn(2, 4, 8, 8), torch.arange(2)
    ddim = tiny.policy("sd15")
    with torch.no_grad():
        mine, reference = policy.velocity(x, 0.5, cond, rows), ddim.velocity(x, 0.5, ddim.encode(tiny.PROMPTS), rows)
    assert (mine - reference).abs().max() <= 1e-4 * reference.abs().max(), "one network, one flow, whatever scheduler came with it"
    check = policy.self_check()
    stochastic = "Ancestral" in type(scheduler).__name__
    assert ("draws noise" in str(check)) == stochastic and ("euler" in check.errors) != stochastic


def test_the_final_sigma_of_flow_matching_is_zero_and_time_is_a_thousand_sigma():
    coords = Coords(FlowMatchEulerDiscreteScheduler())
    s = torch.tensor([0.0, 0.25, 0.731, 1.0], dtype=torch.float64)
    assert torch.allclose(coords.time(s), 1000 * s)
    assert torch.equal(coords.scale(s), torch.ones(4, dtype=torch.float64))
