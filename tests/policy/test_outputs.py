"""What a loop makes of its network's outputs, where that is no choice of entries."""

import pytest
import tiny
import tiny_parts
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from test_policy_refusal import Loop, Net, Vae

from flowrl.policy import UnreplayableError, load_policy
from flowrl.policy.replay import hints
from flowrl.policy.replay.hints import register


class Doubling(Loop):
    """Its prediction is twice the guided output; the unconditional branch comes first."""

    @torch.no_grad()
    def __call__(
        self,
        prompt,
        num_inference_steps=4,
        output_type="pt",
        return_dict=True,
        generator=None,
        factor=2.0,
    ):
        text = torch.cat([torch.zeros(len(prompt), 3), tiny.toy_cond(prompt, 3)])
        x = torch.randn(len(prompt), 4, generator=generator)
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            u, c = self.transformer(torch.cat([x, x]), t, text)[0].chunk(2)
            x = self.scheduler.step(factor * (u + 3 * (c - u)), t, x, return_dict=False)[0]
        if output_type == "latent":
            return (x,)
        return (self.vae.decode(x, return_dict=False)[0] * 0.5 + 0.5,)


def doubling():
    net, vae = tiny_parts.randomise(Net()), tiny_parts.randomise(Vae(), 1)
    return Doubling(net, FlowMatchEulerDiscreteScheduler(shift=2.0), vae)


def test_an_output_that_is_rescaled_is_combined_by_the_pipeline():
    policy = load_policy(doubling())
    rule = policy.replay.regimes[0].guidance
    assert (rule.rule, rule.cond) == ("pipeline", 1)
    assert max(policy.self_check().errors.values()) <= 1e-4
    x, cond, rows = torch.randn(2, 4), policy.encode(tiny.PROMPTS), torch.arange(2)
    with torch.no_grad():
        v = policy.velocity(x, 0.5, cond, rows)
        text = torch.cat([torch.zeros(2, 3), tiny.toy_cond(tiny.PROMPTS, 3)])
        u, c = policy.pipe.transformer(torch.cat([x, x]), torch.tensor(500.0), text)[0].chunk(2)
    assert torch.allclose(v, 2 * (u + 3 * (c - u)), atol=1e-4)


@pytest.mark.parametrize(("factor", "sign"), [(1.0, 1.0), (-1.0, -1.0)])
def test_an_output_up_to_its_sign_is_combined_in_closed_form(factor, sign):
    rule = load_policy(doubling(), factor=factor).replay.regimes[0].guidance
    assert (rule.rule, rule.total, rule.cond) == ("linear", sign, 1)
    assert rule.weights == pytest.approx((-2 * sign, 3 * sign), abs=1e-5)


@pytest.mark.parametrize("rule", ["linear", "norm"])
def test_a_hint_for_a_closed_form_that_does_not_exist_is_refused(rule, monkeypatch):
    monkeypatch.setattr(hints, "_HINTS", dict(hints._HINTS))
    register("Doubling", guidance=rule)
    with pytest.raises(
        UnreplayableError,
        match=f"^guidance: the hint says '{rule}', but what the pipeline makes of an output is no"
        " selection of its entries; hints can declare",
    ):
        load_policy(doubling())
