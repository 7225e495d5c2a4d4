"""A recorded pipeline, replayed: against the pipeline's own latents, its own loop body, its own
decoding."""

import ast
import functools

import pytest
import tiny
import torch
from zoo import cases

import flowrl
from flowrl.policy import SelfCheck
from flowrl.policy import check as checking
from flowrl.policy.replay.items import items_of


@functools.cache
def load(name):
    return tiny.policy(name)


def noise(policy, n, seed=0):
    return torch.randn(n, *policy.latent_shape, generator=torch.Generator().manual_seed(seed))


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("name", tiny.NAMES)
def test_self_check_passes_and_its_prompts_show(name):
    check = load(name).self_check()
    assert isinstance(check, SelfCheck) and check.tolerance == 1e-4
    assert set(check.errors) == {
        "prediction",
        "loop",
        "reentry",
        "mixed",
        "euler",
        "decode",
    }
    assert max(check.errors.values()) <= 1e-4, check
    assert check.wrong_rows > 0.05, (
        "swapped prompts must change the prediction, or the row check proves nothing"
    )


def test_a_scheduler_that_limits_the_clean_latents_is_compared_without_and_named():
    from diffusers import DPMSolverMultistepScheduler

    limits = DPMSolverMultistepScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        thresholding=True,
    )
    check = tiny.policy("sd15", scheduler=limits).self_check()
    assert check.errors["euler"] <= 1e-4 and "(thresholding)" in str(check)
    assert limits.config["thresholding"], "the pipeline's own scheduler keeps its limits"
    assert not load("sd15").self_check().notes


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "flux", "qwenimage"])
def test_euler_steps_in_flow_coordinates_end_at_the_pipelines_own_latents(name):
    """First-order schedulers (DDIM with eta 0, Euler, flow Euler): x' += v (s1 - s0) over the whole
    schedule is the pipeline's loop."""
    policy, steps = load(name), 6
    schedule = policy.schedule(steps)
    start = noise(policy, 2)
    call = policy.prober.runner
    own = call.run(
        [*items_of(tiny.PROMPTS), *call.pad],
        steps,
        latents=torch.cat([start, torch.zeros(len(call.pad), *start.shape[1:])]),
    )[:2]
    cond, rows = policy.encode(tiny.PROMPTS), torch.arange(2)
    x = policy.init(start, schedule.sigmas[0].item())
    with torch.no_grad():
        for s0, s1 in zip(schedule.sigmas, schedule.sigmas[1:], strict=False):
            x = x + policy.velocity(x, s0, cond, rows) * (s1 - s0).item()
    assert relative(x * policy.coords.scale(schedule.sigmas[-1]).item(), own) <= 1e-4


@pytest.mark.parametrize("name", tiny.NAMES)
def test_rows_at_different_sigmas_in_one_call_equal_single_calls_and_reentry(name):
    """Wan 2.2's boundary lies at 0.875: these rows go through both of its networks in one call."""
    policy = load(name)
    sigmas, rows = [0.93, 0.31, 0.88, 0.52], torch.tensor([1, 0, 0, 1])
    x, cond = noise(policy, 4), policy.encode(tiny.PROMPTS)
    with torch.no_grad():
        if policy.coords.kind == "vp":  # integer times only in the pipeline's own loop
            sigmas = [policy.coords.time.sigma[t].item() for t in (981, 310, 800, 503)]
        together = policy.velocity(x, torch.tensor(sigmas, dtype=torch.float64), cond, rows)
        for k, s in enumerate(sigmas):
            alone = policy.velocity(x[k : k + 1], s, cond, rows[k : k + 1])
            referee = policy.reentry(x[k : k + 1], s, [tiny.PROMPTS[rows[k]]])
            assert relative(together[k : k + 1], alone) <= 1e-4
            assert relative(alone, referee) <= 1e-4


@pytest.mark.parametrize("name", tiny.NAMES)
def test_prompts_are_encoded_once_and_gathered_to_any_rows(name):
    """Row r of a five-prompt Cond is that prompt alone, whatever stands beside it."""
    policy = load(name)
    prompts = [
        *tiny.PROMPTS,
        "a yellow circle",
        "three green squares above a red triangle",
        "one purple triangle",
    ]
    cond, rows = policy.encode(prompts), torch.tensor([4, 0, 3, 3, 1, 2, 0])
    x = noise(policy, 1).expand(len(rows), *policy.latent_shape)
    with torch.no_grad():
        v = policy.velocity(x, 0.6, cond, rows)
        for k, r in enumerate(rows.tolist()):
            alone = policy.velocity(x[:1], 0.6, policy.encode([prompts[r]]), torch.tensor([0]))
            assert relative(v[k : k + 1], alone) <= 1e-4
    assert torch.allclose(v[2], v[3], atol=1e-5) and torch.allclose(v[1], v[6], atol=1e-5)
    assert relative(v[0], v[1]) > 1e-2, "different prompts must give different velocities"


@pytest.mark.parametrize("name", tiny.NAMES)
def test_time_prompt_and_guidance_each_change_the_velocity(name):
    """Else equality with anything says nothing of them."""
    policy = load(name)
    x, cond = noise(policy, 1).expand(2, *policy.latent_shape), policy.encode(tiny.PROMPTS)
    with torch.no_grad():
        v = policy.velocity(
            x, torch.tensor([0.9, 0.3], dtype=torch.float64), cond, torch.tensor([0, 0])
        )
        assert relative(v[0], v[1]) > 0.05
        assert relative(policy.velocity(x[:1], 0.3, cond, torch.tensor([1])), v[1:]) > 0.01
        plain = policy.velocity(x[:1], 0.3, cond, torch.tensor([0]), guidance="none")
    assert (relative(plain, v[1:]) > 0.05) == (policy.branches("pipeline") == 2) == (name != "flux")


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_decode_at_the_end_of_a_schedule_is_the_pipelines_own_image(name):
    """DDIM ends at s = .0283, where the pipeline's latents are 1.028 times those in flow
    coordinates."""
    policy = tiny.policy(name, scheduler=tiny.pipeline("sd15").scheduler)
    schedule, start, call = policy.schedule(4), noise(policy, 2), policy.prober.runner
    own = torch.as_tensor(call.run(items_of(tiny.PROMPTS), 4, latents=start, output_type="pt"))
    x, cond, rows = (
        policy.init(start, schedule.sigmas[0].item()),
        policy.encode(tiny.PROMPTS),
        torch.arange(2),
    )
    with torch.no_grad():
        for s0, s1 in zip(schedule.sigmas, schedule.sigmas[1:], strict=False):
            x = x + policy.velocity(x, s0, cond, rows) * (s1 - s0).item()
        end = schedule.sigmas[-1].item()
        assert end == pytest.approx(0.0283, abs=1e-4)
        assert relative(policy.decode(x, end), own) <= 1e-4
        assert relative(policy.decode(x, 0.0), own) > 1e-3, (
            "the level at which the run ended must matter"
        )
        assert torch.equal(
            policy.decode(policy.clean(x, torch.tensor([end, end], dtype=torch.float64))),
            policy.decode(x, end),
        )


@pytest.mark.parametrize("name", tiny.NAMES)
def test_decode_equals_the_pipeline_and_is_differentiable(name):
    policy = load(name)
    call, x = policy.prober.runner, 0.8 * noise(policy, 2)
    full = torch.cat([x, x[:1].expand(len(call.pad), *x.shape[1:])])
    policy.prober.run(items_of(tiny.PROMPTS), 4, latents=lambda j: full, output_type="pt")
    media = policy.decode(x)
    frames = (5, 3, 16, 16) if name.startswith("wan") else (3, 16, 16)
    assert media.shape == (2, *frames) and media.dtype == torch.float32
    assert relative(media, torch.as_tensor(policy.prober.result)[:2]) <= 1e-5
    many = policy.decode(x[torch.tensor([1, 0, 1, 1, 0])])
    assert torch.allclose(many[[1, 0]], media, atol=1e-5)
    x = x.requires_grad_()
    (policy.decode(x) - 0.3).square().mean().backward()
    assert x.grad.abs().max() > 0


@pytest.mark.parametrize("name", tiny.NAMES)
def test_encode_media_inverts_both_maps_around_the_vae(name):
    """Against vae.encode done by hand: pixels in [-1, 1] in, the posterior's mode out, then the
    normalisation that decode undoes."""
    policy = load(name)
    media = policy.decode(0.5 * noise(policy, 2))
    with torch.no_grad():
        pixels = 2 * media - 1
        pixels = (
            pixels.transpose(1, 2)
            if name.startswith("wan")
            else pixels.unsqueeze(2)
            if name == "qwenimage"
            else pixels
        )
        z = policy.pipe.vae.encode(pixels).latent_dist.mode()
        x0 = policy.encode_media(media)
    back = policy.decoder.before(
        x0,
        None if policy.decoder.before.const is None else policy.decoder.before.const[0, :1].float(),
    )
    assert x0.shape == (2, *policy.latent_shape)
    assert relative(back, z) <= 1e-4


@pytest.mark.parametrize("name", tiny.NAMES)
def test_describe_is_python_source(name):
    text = load(name).describe()
    tree = ast.parse(text)
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert set(load(name).modules) <= calls
    assert max(map(len, text.splitlines())) <= 140


@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_the_printed_source_runs_and_gives_the_same_arguments_and_velocity(name):
    """With a dictionary for cond and constants, the network, torch's cat and sqrt, and the
    scheduler's time."""
    policy, calls = load(name), []
    plan, kept = policy.replay.regimes[0].calls[0], policy.encode(tiny.PROMPTS)
    network = policy.modules[plan.module]

    def spied(**kwargs):
        calls.append(kwargs)
        return network(**kwargs)

    names = {
        "cat": torch.cat,
        "sqrt": torch.sqrt,
        plan.module: spied,
        "model_time": lambda s: policy.coords.time(s.flatten()).float(),
        "constants": [{k[0]: v for k, v in plan.shared.items()}],
    }
    cond = [
        {k[0]: v.squeeze(2) for k, v in kept.groups[0].kept[0][0].items()}
    ]  # (blocks, P, 1, ...) -> (blocks, P, ...)
    x, sigma, rows = (
        noise(policy, 3),
        torch.tensor([0.9, 0.3, 0.6], dtype=torch.float64),
        torch.tensor([1, 0, 1]),
    )
    exec(policy.describe(), names)
    with torch.no_grad():
        printed = names["velocity"](x, sigma.float().reshape(-1, 1, 1, 1), cond, rows)
        policy.modules[plan.module] = spied
        try:
            assert relative(printed, policy.velocity(x, sigma, kept, rows)) <= 1e-5
        finally:
            policy.modules[plan.module] = network
    mine, theirs = calls
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        assert (
            torch.allclose(mine[key], value, rtol=1e-5, atol=1e-5)
            if isinstance(value, torch.Tensor)
            else mine[key] == value
        ), key


def test_noise_levels_follow_the_resolution_of_a_dynamic_shift():
    """FLUX shifts by image size: the same number of steps gives other sigmas at another resolution,
    with 256 tokens as at 16."""
    small, large = load("flux").schedule(4), tiny.policy("flux", height=64, width=64).schedule(4)
    assert (small.sigmas[1:4] < large.sigmas[1:4]).all()
    assert torch.equal(small.sigmas[[0, -1]], torch.tensor([1.0, 0.0], dtype=torch.float64))


def test_bfloat16_networks_replay_within_their_rounding():
    policy = tiny.policy("sd3", dtype=torch.bfloat16, lora={"rank": 2, "alpha": 2})
    assert policy.dtype == torch.bfloat16 and all(
        p.dtype == torch.float32 for p in policy.parts["denoiser"].values()
    )
    cond, x = policy.encode(tiny.PROMPTS), noise(policy, 2)
    v = policy.velocity(x, 0.5, cond, torch.arange(2))
    assert v.dtype == torch.float32
    assert (
        relative(v.detach(), tiny_reference(x)) < 0.15
    )  # guidance 7 multiplies bf16 rounding by 13
    check = policy.self_check()
    assert max(check.errors.values()) < check.tolerance < 0.11


def tiny_reference(x):
    policy = load("sd3")
    with torch.no_grad():
        return policy.velocity(x, 0.5, policy.encode(tiny.PROMPTS), torch.arange(2))


def test_a_size_that_the_pipeline_rounds_is_noted():
    case = cases()["flux"]
    policy = flowrl.load_policy(case.make(), **{**case.call, "height": 20, "width": 33})
    (note,) = policy.self_check().notes
    assert note == "the pipeline makes 20 x 32 (height x width), and was asked for 20 x 33"


def test_media_that_are_not_finite_do_not_pass():
    whole = torch.full((2, 3, 4, 4), 0.5)
    torn = whole.clone()
    torn[1, 0, 0, 0] = torch.nan
    assert checking._beside(whole, whole) == 0.0
    assert not checking._beside(torn, whole) <= 1.0 and not checking._beside(whole, torn) <= 1.0
