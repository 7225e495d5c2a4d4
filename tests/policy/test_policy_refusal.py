"""Loops written for these tests: an ordinary one replays with no code of its own, odd ones are
refused with a sentence."""

import copy
from dataclasses import replace

import pytest
import tiny
import tiny_parts
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from flowrl.policy import UnreplayableError, load_policy
from flowrl.policy.replay import hints
from flowrl.policy.replay.hints import register


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(8, 4)

    def forward(self, sample, step, text, scale=1.0):
        step = step.reshape(-1, 1).expand(len(sample), 1)
        return (self.mix(torch.cat([sample, step / 1000, text], -1)) * scale,)


class Vae(torch.nn.Module):
    dtype = torch.float32

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 12)

    def decode(self, z, return_dict=True):
        return (torch.tanh(self.up(z)).reshape(-1, 3, 2, 2),)


class Loop(DiffusionPipeline):
    """The smallest diffusers pipeline; `odd` names what is unusual about it."""

    def __init__(self, transformer, scheduler, vae):
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)

    @torch.no_grad()
    def __call__(
        self,
        prompt,
        num_inference_steps=4,
        output_type="pt",
        return_dict=True,
        generator=None,
        guidance=3.0,
        odd="",
    ):
        text = torch.cat([tiny.toy_cond(prompt, 3), torch.zeros(len(prompt), 3)])
        x, time = torch.randn(len(prompt), 4, generator=generator), torch.zeros(())
        self.scheduler.set_timesteps(num_inference_steps)
        for i, t in enumerate(self.scheduler.timesteps):
            inputs = {"square": x**2, "flip": x.flip(0), "add": x + torch.randn(4)}.get(odd, x)
            text = text * 1.3 if odd == "drift" else text
            scale = 1.0 + i if odd == "number" else 1.0
            if odd == "switch" and i > 5:
                out = self.transformer(torch.cat([inputs] * 2), t, text)[0]
            else:
                out = self.transformer(
                    torch.cat([inputs] * 2),
                    time.copy_(t) if odd == "in place" else t,
                    text,
                    scale=scale,
                )[0]
            c, u = out.chunk(2)
            strength = guidance * t / 500 if odd == "dynamic" else guidance
            mixed = u.add_(strength * (c - u)) if odd == "in place" else u + strength * (c - u)
            if odd == "twice":
                self.scheduler.step(mixed, t, x, return_dict=False)
                self.scheduler._step_index -= 1
            stepped = self.scheduler.step(mixed, t, x, return_dict=False)[0]
            x = x.copy_(stepped) if odd == "in place" else stepped
            if odd == "edit":
                x = x * 0.5 + torch.randn(4)
            x = x * 0.9 if odd == "shrink" else x
        if output_type == "latent":
            return (x,)
        return (self.vae.decode(2 * x[:, [3, 1, 0, 2]] + 0.5, return_dict=False)[0] * 0.5 + 0.5,)


def loop():
    return Loop(
        tiny_parts.randomise(Net()),
        FlowMatchEulerDiscreteScheduler(shift=2.0),
        tiny_parts.randomise(Vae(), 1),
    )


def test_a_pipeline_nobody_has_seen_replays_with_no_code_of_its_own():
    policy = load_policy(loop(), lora={"rank": 2, "targets": ["mix"]})
    check = policy.self_check()
    assert max(check.errors.values()) <= 1e-4 and check.wrong_rows > 0.05
    assert policy.latent_shape == (4,) and policy.replay.regimes[0].guidance.weights == (3.0, -2.0)
    x = torch.randn(3, 4)
    assert policy.decode(x).shape == (3, 3, 2, 2)
    expected = (
        torch.tanh(policy.pipe.vae.up(2 * x[:, [3, 1, 0, 2]] + 0.5)).reshape(3, 3, 2, 2) * 0.5 + 0.5
    )
    assert torch.allclose(policy.decode(x), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        (
            "flip",
            "argument sample: rows are ordered [1, 0, 1, 0], which is not blocks x rows x repeats",
        ),
        ("add", "argument sample mixes latents and time"),
        (
            "drift",
            (
                "argument text changes from step to step, but not as a function of t or sigma that"
                " could be fitted"
            ),
        ),
        (
            "number",
            (
                "argument scale changes from step to step, but not as a function of t or sigma that"
                " could be fitted"
            ),
        ),
        ("edit", "argument sample mixes latents and time"),
    ],
)
def test_an_unreplayable_loop_is_refused_with_a_sentence_that_names_the_argument(odd, sentence):
    with pytest.raises(UnreplayableError) as refused:
        load_policy(loop(), odd=odd)
    # why its own loop body fails, too, may follow, and then what else can be done
    said, _, advice = str(refused.value).rpartition("; hints can declare what is not inferred ")
    assert said.partition("; Loop: ")[0] == sentence and issubclass(UnreplayableError, ValueError)
    assert advice.startswith("(docs/policies.md), and a network can be given without its pipeline")


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ("square", "argument sample: it is not linear in the latents"),
        ("switch", "regimes: the networks change between times 446.169 and 252.618"),
    ],
)
def test_a_loop_that_no_call_stands_for_is_run_itself(odd, why):
    policy = load_policy(loop(), odd=odd, lora={"rank": 2, "targets": ["mix"]})
    assert max(policy.self_check().errors.values()) <= 1e-4
    assert "the loop's own body" in policy.describe() and why in policy.describe()
    cond, x, rows = policy.encode(tiny.PROMPTS), torch.randn(3, 4), torch.tensor([1, 0, 1])
    sigma = torch.tensor([0.7, 0.2, 0.2], dtype=torch.float64)
    together = policy.velocity(x, sigma, cond, rows)
    for k in range(3):
        own = policy.reentry(x[k : k + 1], sigma[k], [tiny.PROMPTS[rows[k]]])
        assert torch.allclose(together[k], own[0], atol=1e-5)
    together.square().sum().backward()
    assert all(p.grad is not None for part in policy.parts.values() for p in part.values())
    assert policy.branches("pipeline") == 2
    with pytest.raises(ValueError, match="guidance=none: Loop is run by its own loop body"):
        policy.velocity(x, sigma, cond, rows, guidance="none")


def test_a_step_that_only_converts_is_told_from_the_one_that_moves_the_latents():
    policy, plain = load_policy(loop(), odd="twice"), load_policy(loop())
    assert policy.prober.runner.pattern.updates == (False, True)
    assert max(policy.self_check().errors.values()) <= 1e-4
    assert policy.describe() == plain.describe()


def test_latents_changed_beside_the_scheduler_look_like_an_input_scale_and_are_refused():
    """Inference reads x * 0.9 as the scale of an argument; the pipeline's own predictions show that
    the state itself was changed."""
    policy = load_policy(loop(), odd="shrink")
    with pytest.raises(
        UnreplayableError,
        match="^Loop: the replay differs in predictions for swapped prompts at the latents",
    ):
        policy.self_check()


@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_a_callback_that_changes_latents_is_refused_and_one_that_only_looks_is_not(factor):
    """The same loop of Stable Diffusion 3, with and without the planted change."""

    def callback(pipe, i, t, values):
        return {"latents": values["latents"] * factor}

    policy = tiny.policy("sd3", callback_on_step_end=callback)
    if factor == 1.0:
        assert max(policy.self_check().errors.values()) <= 1e-4
        return
    with pytest.raises(
        UnreplayableError,
        match=("^StableDiffusion3Pipeline: the replay differs in predictions for swapped prompts"),
    ):
        policy.self_check()


def test_a_loop_that_works_in_place_is_recorded_as_it_was():
    """One buffer for all times, outputs and latents edited in place: what was recorded must not
    change later."""
    policy, plain = load_policy(loop(), odd="in place"), load_policy(loop())
    assert max(policy.self_check().errors.values()) <= 1e-4
    assert policy.describe() == plain.describe()
    x, rows = torch.randn(2, 4), torch.arange(2)
    with torch.no_grad():
        assert torch.equal(
            *(p.velocity(x, 0.7, p.encode(tiny.PROMPTS), rows) for p in (policy, plain))
        )


def test_guidance_that_follows_time_is_combined_at_the_sigma_of_each_row():
    """guidance = 3 t / 500: 3.24 at sigma .54, 1.2 at .2. Rows at both in one call, and each
    alone."""
    policy, plain = load_policy(loop(), odd="dynamic"), load_policy(loop())
    assert policy.replay.regimes[0].guidance.rule == "pipeline"
    x, sigma, rows = (
        torch.randn(3, 4),
        torch.tensor([0.54, 0.2, 0.54], dtype=torch.float64),
        torch.tensor([1, 0, 0]),
    )
    cond = policy.encode(tiny.PROMPTS)
    with torch.no_grad():
        together = policy.velocity(x, sigma, cond, rows)
        for k, s in enumerate(sigma.tolist()):
            assert torch.allclose(
                together[k], policy.velocity(x[k : k + 1], s, cond, rows[k : k + 1])[0], atol=1e-5
            )
            by_hand = plain.velocity(
                x[k : k + 1], s, plain.encode(tiny.PROMPTS), rows[k : k + 1], guidance=6 * s
            )
            assert torch.allclose(together[k], by_hand[0], atol=1e-4)
    assert policy.self_check().errors["mixed"] <= 1e-4
    at_the_first = policy.replay.combine
    policy.replay.combine = lambda which, outs, request: at_the_first(
        which, outs, replace(request, sigma=request.sigma.reshape(-1)[:1].expand(len(outs[0])))
    )
    with pytest.raises(UnreplayableError, match="differs in rows at different sigmas in one call"):
        policy.self_check()


def test_arguments_the_pipeline_does_not_take_are_named():
    with pytest.raises(ValueError, match="takes no argument 'heigth'; choose from .*odd"):
        load_policy(loop(), heigth=8)


def test_recording_leaves_the_pipeline_as_it_was():
    pipe = loop()
    before = (type(pipe.scheduler), dict(pipe.transformer.__dict__), dict(pipe.vae.__dict__))
    load_policy(pipe).self_check()
    assert type(pipe.scheduler) is before[0]
    assert set(pipe.transformer.__dict__) == set(before[1]) and set(pipe.vae.__dict__) == set(
        before[2]
    )
    with pytest.raises(UnreplayableError):  # a failing run restores too
        load_policy(pipe, odd="flip")
    assert type(pipe.scheduler) is before[0] and "forward" not in pipe.transformer.__dict__


def test_self_check_notices_wrong_guidance_wrong_rows_and_prompts_that_say_nothing():
    policy = load_policy(loop())
    good = copy.copy(policy.replay.regimes[0].guidance)
    policy.replay.regimes[0].guidance.weights = (3.01, -2.01)
    with pytest.raises(UnreplayableError, match="differs in predictions for swapped prompts"):
        policy.self_check()
    policy.replay.regimes[0].guidance = good
    rows = policy.replay.regimes[0].calls[0].rows[0]
    rows.gather, real = (
        (lambda kept, r, blocks: type(rows).gather(rows, kept, r.flip(0), blocks)),
        rows.gather,
    )
    with pytest.raises(UnreplayableError, match="differs in"):
        policy.self_check()
    rows.gather = real
    policy.self_check()
    deaf = loop()
    deaf.transformer.mix.weight.data[:, 5:] = 0  # the text has no effect
    with pytest.raises(UnreplayableError, match="swapping the two prompts .* says nothing"):
        load_policy(deaf).self_check()


def test_hints_override_one_inference_each(monkeypatch):
    monkeypatch.setattr(hints, "_HINTS", dict(hints._HINTS))
    register("Loop", guidance="norm")
    with pytest.raises(UnreplayableError, match="hint says 'norm'"):
        load_policy(loop())
    register(
        "Loop",
        guidance="pipeline",
        denoisers=["transformer"],
        decode=lambda pipe, x: pipe.vae.decode(x)[0],
    )
    policy = load_policy(loop())
    assert policy.replay.regimes[0].guidance.rule == "pipeline"
    assert max(policy.self_check().errors.values()) <= 1e-4
    x = torch.randn(2, 4)
    assert torch.equal(policy.decode(x), policy.pipe.vae.decode(x)[0])
    register("Loop", boundary=500.0)
    with pytest.raises(UnreplayableError, match="the boundary is 500"):
        load_policy(loop(), odd="switch")
    with pytest.raises(ValueError, match="'linear', 'norm' and 'pipeline'"):
        register("Loop", guidance="std")


def test_a_folder_loads_like_the_live_pipeline_and_networks_can_be_wrapped(tmp_path):
    """policy.modules is what runs: a trainer may replace it (sharded, compiled), and call counting
    must see every call."""
    pipe = tiny.pipeline("sd3")
    pipe.save_pretrained(tmp_path)
    live, policy = (
        load_policy(pipe, **tiny.CALLS["sd3"]),
        load_policy(tmp_path, **tiny.CALLS["sd3"]),
    )
    x, rows, seen = torch.randn(2, 4, 8, 8), torch.arange(2), []

    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, **kwargs):
            seen.append(kwargs["hidden_states"].shape[0])
            return self.inner(**kwargs)

    policy.modules["transformer"] = Wrapped(policy.modules["transformer"])
    with torch.no_grad():
        a = live.velocity(x, 0.5, live.encode(tiny.PROMPTS), rows)
        b = policy.velocity(x, 0.5, policy.encode(tiny.PROMPTS), rows)
    assert torch.allclose(a, b, atol=1e-5) and seen == [4]


@pytest.mark.parametrize("name", ["sd3", "qwenimage"])
def test_prompts_encoded_in_chunks_are_the_same(name, monkeypatch):
    from flowrl.policy.replay import bind

    policy = tiny.policy(name)
    prompts = [*tiny.PROMPTS, "one green circle", "a purple square", "a red triangle"]
    x, rows = torch.randn(5, *policy.latent_shape), torch.arange(5)
    with torch.no_grad():
        whole = policy.velocity(x, 0.5, policy.encode(prompts), rows)
        monkeypatch.setattr(bind, "CHUNK", 2)
        parts = policy.velocity(x, 0.5, policy.encode(prompts), rows)
    assert torch.allclose(whole, parts, atol=1e-4)
