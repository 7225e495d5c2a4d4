"""Loops whose steps differ by their number: runs are those of the pipeline, or are refused."""

import diffusers
import pytest
import tiny
import torch
from zoo import cases

from flowrl import load_policy
from flowrl.policy.replay.errors import UnreplayableError
from flowrl.policy.replay.items import PromptItem, items_of

ZOO = cases()


def guided(**interval):
    """A tiny modular SD3 whose guidance acts in an interval of steps."""
    case = ZOO["modular_sd3"]
    pipe = case.make()
    pipe.update_components(guider=diffusers.ClassifierFreeGuidance(**interval))
    return load_policy(pipe, **case.call)


def off(policy, steps, items):
    """Largest relative difference between an Euler run of the policy, and the pipeline's own."""
    final = []
    count = len(items)
    run = policy.prober.run(
        items, steps, real=range(steps), on_done=lambda x: final.append(x[:count].clone())
    )
    cond = policy.encode([i.prompt for i in items], [i.conditions for i in items])
    rows = torch.arange(count)
    sigmas = policy.schedule(steps).sigmas.tolist()
    x = run[0].sample[:count] / policy.coords.scale(torch.tensor(sigmas[0])).item()
    with torch.no_grad():
        for s, to in zip(sigmas, sigmas[1:], strict=False):
            x = x + (to - s) * policy.velocity(x, s, cond, rows)
    x = x * policy.coords.scale(torch.tensor(sigmas[-1])).item()
    return ((x - final[-1]).abs().max() / final[-1].abs().max()).item()


@pytest.mark.parametrize(
    ("start", "stop", "steps"), [(0.25, 0.75, 12), (0.0, 0.5, 8), (0.5, 1.0, 8)]
)
def test_guidance_in_an_interval_of_steps_acts_in_these_steps(start, stop, steps):
    policy = guided(start=start, stop=stop)
    assert "pipeline_loop_body" in policy.describe()
    policy.self_check()
    assert off(policy, steps, items_of(list(tiny.PROMPTS), None)) < 1e-5


def test_an_interval_that_only_other_numbers_of_steps_show_is_found_when_they_are_asked_for(caplog):
    """At 8 steps the guidance from 0.1 on is that of all steps; at 20 the first two have none."""
    policy = guided(start=0.1)
    items = items_of(list(tiny.PROMPTS), None)
    assert policy.replay.regimes
    assert off(policy, 20, items) < 1e-5
    assert "at 20 steps, iteration 0 does otherwise than the inferred call; from now" in caplog.text
    assert off(policy, 9, items) < 1e-5
    assert off(policy, 20, items) < 1e-5, "the number that was asked for last counts"


@pytest.mark.parametrize(
    "guider",
    [
        diffusers.ClassifierFreeGuidance(start=0.125),
        diffusers.ClassifierFreeZeroStarGuidance(),
    ],
    ids=["late", "zero"],
)
def test_a_first_step_that_does_otherwise_is_refused(guider):
    """Its latents are the loop's own, so that it cannot be entered."""
    case = ZOO["modular_sd3"]
    pipe = case.make()
    pipe.update_components(guider=guider)
    with pytest.raises(UnreplayableError, match="at 8 steps, the loop's first step does otherwise"):
        load_policy(pipe, **case.call)


def test_a_control_that_ends_early_ends_there():
    case = ZOO["sd15_controlnet"]
    items = [PromptItem(tiny.PROMPTS[0], case.conditions[0])]
    policy = load_policy(
        case.make(), **case.call, example=case.conditions[0], control_guidance_end=0.5
    )
    assert off(policy, 8, items) < 1e-5


def test_a_control_computes_once_for_all_steps_before_ours(monkeypatch):
    case = ZOO["sd15_controlnet"]
    policy = load_policy(
        case.make(), **case.call, example=case.conditions[0], control_guidance_end=0.5
    )
    assert not policy.replay.regimes
    cond = policy.encode([tiny.PROMPTS[0]], [case.conditions[0]])
    level = policy.schedule(12).sigmas[5].item()  # the control acts in steps 0 to 5
    x, asked = torch.randn(1, *policy.latent_shape), []
    hook = policy.pipe.controlnet.conv_in.register_forward_hook(lambda *_: asked.append(1))

    def velocity():
        asked.clear()
        with torch.no_grad():
            return policy.velocity(x, level, cond, torch.tensor([0]))

    velocity()  # later ones find the first step's answer in memory
    few, count = velocity(), len(asked)
    answers = type(policy.prober.runner.answers)
    monkeypatch.setattr(
        answers, "_in_loop", lambda _, name, real, args, kwargs: real(*args, **kwargs)
    )
    every = velocity()
    hook.remove()
    assert (count, len(asked)) == (2, 5)
    assert torch.equal(few, every)


def test_a_control_that_begins_late_is_refused():
    case = ZOO["sd15_controlnet"]
    with pytest.raises(
        UnreplayableError, match="the loop's first step does otherwise than a later"
    ):
        load_policy(
            case.make(), **case.call, example=case.conditions[0], control_guidance_start=0.1
        )
