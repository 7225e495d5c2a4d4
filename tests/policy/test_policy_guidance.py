"""Guidance is an explicit argument: "pipeline", "none" or a number; and what guidance by the
reference (RLG) stands for."""

import functools
from types import SimpleNamespace

import pytest
import tiny
import torch

from flowrl.policy import load_policy
from flowrl.policy.replay.errors import UnreplayableError
from flowrl.policy.replay.guidance import Guidance, fit
from flowrl.rollouts import generation
from flowrl.samplers import keys

OFF = {
    "sd15": {"guidance_scale": 1.0},
    "sdxl": {"guidance_scale": 1.0},
    "sd3": {"guidance_scale": 1.0},
    "qwenimage": {"true_cfg_scale": 1.0},
}
OFF |= {"wan21": {"guidance_scale": 1.0}, "wan22": {"guidance_scale": 1.0}}
OTHER = {k: {next(iter(v)): 3.0} for k, v in OFF.items()}


@functools.cache
def loaded(name):
    return tiny.policy(name)


def setup(name, n=3, policy=None, **changes):
    policy = policy or tiny.policy(name, **changes)
    x = torch.randn(n, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    return (
        policy,
        x,
        torch.tensor([0.95, 0.4, 0.7], dtype=torch.float64),
        policy.encode(tiny.PROMPTS),
        torch.tensor([0, 1, 1]),
    )


def close(a, b, tolerance=1e-4):
    return (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("name", list(OFF))
def test_no_guidance_equals_the_pipeline_loaded_without_it(name):
    policy, x, s, cond, rows = setup(name, policy=loaded(name))
    plain, *_ = setup(name, **OFF[name])
    with torch.no_grad():
        assert close(
            policy.velocity(x, s, cond, rows, guidance="none"),
            plain.velocity(x, s, plain.encode(tiny.PROMPTS), rows),
        )
        assert close(
            policy.velocity(x, s, cond, rows, guidance=1.0),
            policy.velocity(x, s, cond, rows, guidance="none"),
        )
        assert not close(
            policy.velocity(x, s, cond, rows),
            policy.velocity(x, s, cond, rows, guidance="none"),
            0.05,
        )


@pytest.mark.parametrize("name", list(OFF))
def test_a_guidance_number_equals_the_pipeline_loaded_with_it(name):
    policy, x, s, cond, rows = setup(name, policy=loaded(name))
    other, *_ = setup(name, **OTHER[name])
    with torch.no_grad():
        assert close(
            policy.velocity(x, s, cond, rows, guidance=3.0),
            other.velocity(x, s, other.encode(tiny.PROMPTS), rows),
        )


@pytest.mark.parametrize("name", ["sd3", "qwenimage"])
def test_no_guidance_runs_half_the_network_rows(name):
    """Three states: 6 rows with two branches (one call of 6 in SD3, two calls of 3 in Qwen-Image),
    3 without guidance."""
    policy, x, s, cond, rows = setup(name)
    with torch.no_grad():
        policy.velocity(x, s, cond, rows)
        assert policy.calls == 6
        policy.velocity(x, s, cond, rows, guidance="none")
        assert policy.calls == 9


@pytest.mark.parametrize("name", ["sd3", "wan21"])
def test_detached_unconditional_branch_keeps_the_value_and_drops_its_gradient(name):
    """v = u + g (c - u): with u detached the gradient is g dc, and that of guidance "none" is
    dc."""
    policy, x, s, cond, rows = setup(name, lora={"rank": 2, "alpha": 2})
    for p in policy.parts["denoiser"].values():
        p.data.normal_(std=0.2, generator=torch.Generator().manual_seed(p.numel()))
    probe = torch.randn_like(x)

    def gradient(**how):
        v = policy.velocity(x, s, cond, rows, **how)
        return v.detach(), torch.autograd.grad(
            (v * probe).sum(), list(policy.parts["denoiser"].values())
        )

    full, with_u = gradient(guidance=4.0)
    same, without_u = gradient(guidance=4.0, detach_uncond=True)
    _, plain = gradient(guidance="none")
    assert close(same, full)
    assert all(close(g, 4.0 * p, 1e-3) for g, p in zip(without_u, plain, strict=True))
    assert not all(close(g, p, 1e-2) for g, p in zip(with_u, without_u, strict=True))


def test_an_embedded_guidance_scale_is_a_constant_and_a_number_is_refused():
    policy, x, s, cond, rows = setup("flux", guidance_scale=3.5)
    other, *_ = setup("flux", guidance_scale=1.0)
    with torch.no_grad():
        assert not close(
            policy.velocity(x, s, cond, rows),
            other.velocity(x, s, other.encode(tiny.PROMPTS), rows),
            1e-3,
        )
        with pytest.raises(ValueError, match="needs an unconditional branch.*true_cfg_scale"):
            policy.velocity(x, s, cond, rows, guidance=4.5)
        with pytest.raises(ValueError, match="'pipeline', 'none' or a number"):
            policy.velocity(x, s, cond, rows, guidance="full")


def test_flux_with_true_cfg_has_both_branches():
    policy, x, s, cond, rows = setup("flux", true_cfg_scale=3.0, negative_prompt="a blue circle")
    plain, *_ = setup("flux")
    with torch.no_grad():
        assert policy.replay.regimes[0].guidance.weights == (3.0, -2.0)
        assert close(
            policy.velocity(x, s, cond, rows, guidance="none"),
            plain.velocity(x, s, plain.encode(tiny.PROMPTS), rows),
        )
    assert max(policy.self_check().errors.values()) <= 1e-4


def test_guidance_without_a_closed_form_is_combined_by_the_pipeline_and_stays_differentiable():
    """guidance_rescale divides by standard deviations over the latents: neither linear nor a norm
    over the last axis."""
    policy, x, s, cond, rows = setup("sd15", guidance_rescale=0.7, lora={"rank": 2, "alpha": 2})
    assert policy.replay.regimes[0].guidance.rule == "pipeline"
    assert max(policy.self_check().errors.values()) <= 1e-4
    policy.velocity(x, 0.5, cond, rows).square().mean().backward()
    assert any(
        p.grad is not None and p.grad.abs().max() > 0 for p in policy.parts["denoiser"].values()
    )
    with pytest.raises(ValueError, match="cannot be changed"):
        policy.velocity(x, s, cond, rows, guidance=2.0)


def test_fit_reads_weights_sign_and_conditional_branch_from_random_outputs():
    """Z-Image negates: prediction = -(u + 4 (c - u)) = 3 u - 4 c, so total = -1 and the conditional
    branch is the second."""
    c, u = torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    found = fit([([u, c], 3 * u - 4 * c)], None)
    assert found == Guidance("linear", (3.0, -4.0), -1.0, 1)
    mixed = u + 2.5 * (c - u)
    rescaled = mixed * c.norm(dim=-1, keepdim=True) / mixed.norm(dim=-1, keepdim=True)
    found = fit([([c, u], rescaled)], None)
    assert (found.rule, found.cond) == ("norm", 0) and found.weights == pytest.approx(
        (2.5, -1.5), abs=1e-4
    )
    assert fit([([c, u], torch.tanh(c) + u**3)], None).rule == "pipeline"


# --- Reinforcement Learning Guidance, v = v_ref + w (v - v_ref): spec other 14 and 18.11


class Gaussian(tiny.GaussianFlow):
    """With a spread that training moves too."""

    def __init__(self):
        super().__init__(2, 0.5)
        self.std = torch.nn.Parameter(torch.tensor(self.std))


def tuned(*, shift=0.0, std=0.5):
    """The policy of N(cond + shift, std^2), whose reference is N(cond, .25)."""
    policy = load_policy(Gaussian(), shape=(2,), cond=tiny.toy_cond)
    policy.trainable.add_view("reference")
    (module,) = policy.modules.values()
    module.shift.data += shift
    module.std.data.fill_(std)
    return policy


def sampled(policy, w, steps=4, n=200):
    """Final states (n, 2) of the first prompt."""
    noise = keys.key("rlg", torch.arange(n))
    return generation.sample(
        policy, [tiny.PROMPTS[0]] * n, noise, steps=steps, guidance="none", rlg=w, micro=n
    )[0]


def test_where_nothing_was_learned_the_weight_of_the_reference_does_not_matter():
    policy = tiny.policy("sd3", lora={"rank": 2, "alpha": 2})  # B = 0: the policy is its reference
    made = [
        generation.sample(
            policy, tiny.PROMPTS, keys.key(0, torch.arange(2)), steps=2, guidance=2.0, rlg=w
        )[0]
        for w in (0, 1, 1.5, 3)
    ]
    assert all(torch.equal(x, made[0]) for x in made) and float(made[0].std()) > 0.1


@pytest.mark.parametrize("w", [0.5, 1.0, 2.0])
def test_a_linear_reward_is_followed_w_times_as_far(w):
    """pi ~ pi_ref exp(r / beta), r = k x, var c: the mean moves by c k / beta, and with beta / w by
    w times that; exact at every level."""
    moved = 0.3
    policy = tuned(shift=moved)
    whole = sampled(policy, 1.0) - sampled(policy, 0.0)
    assert torch.allclose(sampled(policy, w) - sampled(policy, 0.0), w * whole, atol=1e-5)
    far = sampled(policy, w, steps=200) - sampled(policy, 0.0, steps=200)
    assert torch.allclose(far, torch.full_like(far, w * moved), atol=0.01)


@pytest.mark.parametrize("w", [0.5, 2.0])
def test_beta_is_divided_by_w_as_the_noise_goes_to_zero(w, monkeypatch):
    """r = -k (x - m)^2 / 2 adds k / beta to the precision, and w k / beta with beta / w: the
    combined score is that of the sharper law as sigma -> 0 and not at sigma .5 (noised geometric
    mixtures are no mixtures of noised laws). Tweedie: score = ((1-s) x0_hat - x) / s^2.
    """
    policy = tuned(std=0.3)
    mean, precision = tiny.toy_cond(tiny.PROMPTS)[0], 4 + w * (1 / 0.09 - 4)
    x = mean + torch.randn(200, 2)
    monkeypatch.setattr(policy, "init", lambda noise, sigma, cond, rows: x)
    for s in (0.01, 0.5):
        monkeypatch.setattr(
            policy,
            "schedule",
            lambda steps, s=s: SimpleNamespace(sigmas=torch.tensor([s, 0.0], dtype=torch.float64)),
        )
        score = ((1 - s) * sampled(policy, w, steps=1) - x) / s**2  # one step to 0 ends at x0_hat
        expected = -(x - (1 - s) * mean) / ((1 - s) ** 2 / precision + s**2)
        gap = float((score - expected).abs().max() / expected.abs().max())
        assert gap < 0.002 if s == 0.01 else gap > 0.02


@pytest.mark.parametrize(("name", "fewest"), [("wan21", 1), ("wan22", 2), ("qwenimage", 2)])
def test_branches_of_one_shape_are_one_call_of_as_many_rows(name, fewest):
    """Wan calls its network once for each branch; these are joined, and with a detached branch they
    are not. Qwen's empty negative prompt is shorter than its prompts, and stays a call."""
    policy, x, s, cond, rows = setup(name, policy=tiny.policy(name, lora={"rank": 2}))
    weights, calls = list(policy.parts["denoiser"].values()), []
    torch.nn.init.normal_(weights[1], std=0.1, generator=torch.Generator().manual_seed(2))
    for network in policy.modules.values():
        network.register_forward_pre_hook(lambda module, args: calls.append(module))

    def run(apart, **options):
        policy.replay.apart = apart
        calls.clear()
        before = policy.calls
        v = policy.velocity(x, s, cond, rows, **options)
        given = torch.autograd.grad(v.square().sum(), weights, allow_unused=True)
        return v.detach(), given, len(calls), policy.calls - before

    v, grads, once, network_rows = run(False)
    v_apart, grads_apart, twice, as_many = run(True)
    networks = len(policy.modules)
    assert (once, twice, network_rows) == (fewest, 2 * networks, as_many) and as_many == 6
    assert close(v, v_apart, 1e-5)
    for a, b in zip(grads, grads_apart, strict=True):
        assert a is b is None or (a - b).abs().max() <= 1e-5 * b.abs().max() + 1e-9
    assert run(False, detach_uncond=True)[2] == 2 * networks
    assert run(False, guidance="none")[2] == networks


def test_the_self_check_refuses_rows_that_know_of_one_another():
    """Only because it does may two branches share a call."""
    policy = tiny.policy("wan21")
    assert policy.self_check().errors["prediction"] <= 1e-4
    for network in policy.modules.values():
        network.register_forward_hook(
            lambda module, args, out: (out[0] - 0.5 * out[0].mean(0, keepdim=True), *out[1:])
        )
    with pytest.raises(UnreplayableError):
        policy.self_check()
