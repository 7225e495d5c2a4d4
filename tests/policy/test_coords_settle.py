"""Which flow a scheduler follows, read off its own step: x = a x0 + b eps stays on its line."""

import copy
from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    UniPCMultistepScheduler,
)
from test_policy_refusal import loop

from flowrl.policy import UnreplayableError, load_policy
from flowrl.policy.replay.coords import Coords, started

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
FLOW = {"use_flow_sigmas": True, "flow_shift": 3.0}


class Loud(FlowMatchEulerDiscreteScheduler):
    """Its noise has a deviation of 80, as in Cosmos Predict 2."""

    def set_timesteps(self, *args, **kwargs):
        super().set_timesteps(*args, **kwargs)
        self.sigmas = 80 * self.sigmas


class Half(FlowMatchEulerDiscreteScheduler):
    """Goes half as far as its prediction says."""

    def step(self, model_output, timestep, sample, return_dict=True):
        made = super().step(model_output, timestep, sample, return_dict=False)[0]
        return ((sample + made) / 2,)


def settled(scheduler, steps=6):
    coords = Coords(scheduler)
    scheduler.set_timesteps(steps)
    coords.settle(scheduler, {})
    return coords


@pytest.mark.parametrize(
    ("scheduler", "kind", "prediction"),
    [
        (FlowMatchEulerDiscreteScheduler(shift=3.0), "flow", "flow"),
        (UniPCMultistepScheduler(**FLOW, prediction_type="flow_prediction"), "flow", "flow"),
        (UniPCMultistepScheduler(**FLOW, prediction_type="epsilon"), "flow", "epsilon"),
        (FlowMatchEulerDiscreteScheduler(invert_sigmas=True), "rising", "backward"),
        (DDIMScheduler(**SD, clip_sample=True), "vp", "epsilon"),
        (DDIMScheduler(**SD, prediction_type="sample"), "vp", "sample"),
        (DPMSolverMultistepScheduler(**SD, prediction_type="v_prediction"), "vp", "v_prediction"),
        (EulerDiscreteScheduler(**SD), "ve", "epsilon"),
        (EulerDiscreteScheduler(**SD, prediction_type="v_prediction"), "ve", "v_prediction"),
        (HeunDiscreteScheduler(**SD), "ve", "epsilon"),
        (Loud(), "ve", "epsilon"),
    ],
    ids=lambda v: type(v).__name__ if hasattr(v, "config") else str(v),
)
def test_a_scheduler_keeps_exact_predictions_on_the_line_from_noise_to_data(
    scheduler, kind, prediction
):
    """x' = (1-s) x0 + s eps at each of its levels; its step, given what the network would say of
    this x0 and eps, makes the x' of its next level."""
    coords = settled(scheduler)
    assert (coords.kind, coords.prediction) == (kind, prediction)
    generator = torch.Generator().manual_seed(0)
    x0, eps = torch.randn(2, 1, 4, 4, 4, generator=generator)
    sigmas = coords.sigmas_of(scheduler, scheduler.timesteps.double())
    assert sigmas.dtype == torch.float64 and sigmas.min() >= 0 and sigmas.max() <= 1

    def latents(s):
        return ((1 - s) * x0 + s * eps) * coords.scale(s).item()

    # Heun repeats levels; where only noise is left, its prediction says nothing of x0
    lost = prediction == "epsilon"
    pairs = zip(sigmas, sigmas[1:], strict=False)
    steps = [j for j, (s, s1) in enumerate(pairs) if s1 < s < 1 - 1e-5 * lost + 1e-9]
    for j in steps:
        s, s1 = sigmas[j], sigmas[j + 1]
        r = ((1 - s) ** 2 + s**2).sqrt()
        said = {
            "flow": eps - x0,
            "backward": x0 - eps,
            "epsilon": eps,
            "sample": x0,
            "v_prediction": ((1 - s) * eps - s * x0) / r,
        }[prediction].float()
        own = started(scheduler, j)
        own.register_to_config(**({"clip_sample": False} if "clip_sample" in own.config else {}))
        x, time = latents(s).float(), own.timesteps[j]
        if hasattr(own, "scale_model_input"):
            own.scale_model_input(x, time)
        made = own.step(said, time, x, return_dict=False)[0]
        assert torch.allclose(made, latents(s1).float(), atol=1e-4 * made.abs().max().item())
        v = coords.velocity(said, x / coords.scale(s).item(), s)
        assert torch.allclose(v, eps - x0, atol=1e-3)
    assert len(steps) >= 5


@pytest.mark.parametrize("scheduler", [DDIMScheduler(**SD), EulerDiscreteScheduler(**SD)])
def test_levels_of_a_loop_that_starts_late_are_the_last_of_the_whole_one(scheduler):
    coords = settled(scheduler, 10)
    whole = coords.sigmas_of(scheduler, scheduler.timesteps.double())
    late = coords.sigmas_of(scheduler, scheduler.timesteps[4:].double())
    assert whole.shape == (11,) and torch.equal(late, whole[4:])


@pytest.mark.parametrize(
    "scheduler", [Half(), EulerAncestralDiscreteScheduler(**SD)], ids=lambda s: type(s).__name__
)
def test_a_step_that_no_known_flow_explains_leaves_what_the_config_says(scheduler):
    told = Coords(copy.deepcopy(scheduler))
    coords = settled(scheduler)
    assert (coords.kind, coords.prediction) == (told.kind, told.prediction)


def test_a_scheduler_that_steps_otherwise_than_its_predictions_say_is_refused_by_the_check():
    pipe = loop()
    assert max(load_policy(pipe).self_check().errors.values()) <= 1e-4
    pipe.scheduler = Half.from_config(pipe.scheduler.config)
    with pytest.raises(UnreplayableError, match="^Loop: the replay differs in one step of the pip"):
        load_policy(pipe).self_check()


@pytest.mark.parametrize(
    ("scheduler", "sentence"),
    [
        (
            DDIMScheduler(**SD, prediction_type="score"),
            "DDIMScheduler predicts 'score'; known are flow, epsilon, v_prediction, sample,"
            " trigflow",
        ),
        (
            SimpleNamespace(config={"prediction_type": "epsilon"}),
            "SimpleNamespace has neither sigmas nor alphas_cumprod: its noise levels are unknown",
        ),
    ],
)
def test_a_scheduler_without_a_known_prediction_or_noise_level_is_refused(scheduler, sentence):
    with pytest.raises(UnreplayableError) as refused:
        Coords(scheduler)
    assert str(refused.value) == sentence


def test_the_sigma_of_a_whole_time_is_near_and_its_time_is_whole():
    """Pictures are noised by a table of 1000 times, so a sigma between two of them has none."""
    for scheduler in (DDIMScheduler(**SD), FlowMatchEulerDiscreteScheduler(invert_sigmas=True)):
        time = settled(scheduler).time
        for sigma in (0.2, 0.5003, 0.9):
            whole = time.whole(sigma)
            assert (
                abs(time.at(whole) - round(time.at(whole)))
                < 1e-6
                < abs(time.at(sigma + 1e-4) - round(time.at(sigma + 1e-4)))
            )
            assert abs(time.at(whole) - time.at(sigma)) <= 0.5 + 1e-6
