"""Text encoders that are trained: what is encoded by which weights, and with which gradient."""

import json

import pytest
import small
import tiny
import torch

from flowrl.policy import load_policy
from flowrl.policy.replay.encoders import Answers
from flowrl.policy.replay.errors import UnreplayableError
from flowrl.training.train import train

PROMPTS = ["a red circle", "two blue squares", "a red circle"]
LORA = {"rank": 2, "alpha": 4}
TEXT, BOTH = ["text_encoder"], ["denoiser", "text_encoder"]


def policy_of(name="sd15", parts=TEXT, lora=LORA, **options):
    torch.manual_seed(0)
    return tiny.policy(name, lora=lora, parts=parts, **options)


def at(policy, sigma=0.5):
    """(x, sigma, rows) of three rows, one prompt twice."""
    x = torch.randn(3, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    return x, torch.full((3,), sigma), torch.tensor([2, 0, 1])


def moved(policy, part="text_encoder", size=0.05):
    """Another adapter in place of the first one, which changes nothing."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in policy.parts[part].values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def latents(name, pipe):
    """What a pipeline makes of a prompt, with one noise."""
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        prompt=PROMPTS[0],
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
        output_type="latent",
        **tiny.CALLS[name],
    )[0]


def same_pictures(name, pipe, other):
    return torch.allclose(latents(name, pipe), latents(name, other), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "flux", "qwenimage", "wan21"])
def test_the_gradient_is_that_of_the_pipelines_own_loop(name):
    policy = policy_of(name)
    moved(policy)
    x, _, _ = at(policy)
    sigma = policy.schedule(8).sigmas[2].item()
    cond, rows = policy.encode(PROMPTS), torch.arange(3)
    parameters = policy.parts["text_encoder"]
    found = []
    for velocity in (
        lambda: policy.velocity(x, sigma, cond, rows),
        lambda: policy.reentry(x, sigma, PROMPTS),
    ):
        velocity().square().sum().backward()
        found.append({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})
        for parameter in parameters.values():
            parameter.grad = None
    ours, own = found
    assert own and ours.keys() >= own.keys()
    norm = torch.stack([g.norm() for g in own.values()]).norm()
    gap = torch.stack([(ours[n] - own[n]).norm() for n in own]).norm()
    assert norm > 0 and gap / norm < 1e-4


def test_a_new_lora_changes_nothing():
    base, policy = policy_of(parts=["denoiser"]), policy_of(parts=BOTH)
    x, sigma, rows = at(base)
    expected = base.velocity(x, sigma, base.encode(PROMPTS), rows, guidance=3.0)
    found = policy.velocity(x, sigma, policy.encode(PROMPTS), rows, guidance=3.0)
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("parts", "components"),
    [(TEXT, {"text_encoder"}), (BOTH, {"unet", "text_encoder"}), (["denoiser"], {"unet"})],
)
def test_only_what_is_trained_has_a_gradient(parts, components):
    policy = policy_of(parts=parts)
    assert policy.trainable.part_names == list(policy.parts) == parts
    x, sigma, rows = at(policy)
    policy.velocity(x, sigma, policy.encode(PROMPTS), rows).square().sum().backward()
    named = [
        (part, name, parameter)
        for part, module in policy.pipe.components.items()
        if isinstance(module, torch.nn.Module)
        for name, parameter in module.named_parameters()
    ]
    with_gradient = {part for part, _, p in named if p.grad is not None and p.grad.any()}
    assert with_gradient == components
    assert {part for part, _, p in named if p.requires_grad} == components


def test_prompts_follow_the_weights_that_are_in_use():
    policy = policy_of()
    x, sigma, rows = at(policy)
    cond = policy.encode(PROMPTS)
    with torch.no_grad():
        before = policy.velocity(x, sigma, cond, rows)
        policy.trainable.add_view("old")
        moved(policy)
        after = policy.velocity(x, sigma, cond, rows)
        assert torch.equal(after, policy.velocity(x, sigma, policy.encode(PROMPTS), rows))
        assert not torch.allclose(after, before, atol=1e-4)
        for view in ("old", "reference"):
            with policy.view(view):
                assert torch.equal(policy.velocity(x, sigma, cond, rows), before)
        # an encoding of the old policy is not taken for one of the new policy
        with policy.view("old"):
            old = policy.encode(PROMPTS)
        assert torch.equal(policy.velocity(x, sigma, old, rows), after)
    with_gradient = policy.velocity(x, sigma, cond, rows)
    assert with_gradient.requires_grad and torch.allclose(with_gradient, after, atol=1e-5)


def test_the_unconditional_branch_moves_too():
    policy = policy_of()
    x, sigma, rows = at(policy)
    cond = policy.encode(PROMPTS)
    with torch.no_grad():
        before = policy.velocity(x, sigma, cond, rows, guidance=0.0)
        moved(policy)
        assert (policy.velocity(x, sigma, cond, rows, guidance=0.0) - before).abs().max() > 1e-4


def test_prompts_are_encoded_once_for_as_long_as_the_weights_stay(monkeypatch):
    policy = policy_of()
    x, sigma, rows = at(policy)
    cond, calls = policy.encode(PROMPTS), []
    encode = policy.encodings.encode
    monkeypatch.setattr(
        policy.encodings, "encode", lambda *given: calls.append(given[1]) or encode(*given)
    )
    with torch.no_grad():
        for _ in range(3):
            policy.velocity(x, sigma, cond, rows)
            with policy.view("reference"):
                policy.velocity(x, sigma, cond, rows)
        assert calls == [False]  # for the reference; the first ones are as they were encoded
        moved(policy)
        for _ in range(3):
            policy.velocity(x, sigma, cond, rows)
        assert calls == [False, False]
    for _ in range(2):
        policy.velocity(x, sigma, cond, rows)
    assert calls == [False, False, True, True]


def test_all_weights_of_a_text_encoder_are_trained_in_full_mode():
    policy = policy_of(lora=None)
    x, sigma, rows = at(policy)
    cond = policy.encode(PROMPTS)
    policy.trainable.add_view("reference")
    with torch.no_grad():
        before = policy.velocity(x, sigma, cond, rows)
        moved(policy)
        after = policy.velocity(x, sigma, cond, rows)
        assert not torch.allclose(after, before, atol=1e-4)
        with policy.view("reference"):
            assert torch.equal(policy.velocity(x, sigma, cond, rows), before)
        assert torch.equal(policy.velocity(x, sigma, cond, rows), after)
    assert set(policy.parts) == {"text_encoder"}


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "flux"])
@pytest.mark.parametrize("parts", [TEXT, BOTH], ids=["text", "both"])
def test_diffusers_loads_what_is_saved(tmp_path, name, parts):
    policy = policy_of(name, parts)
    for part in parts:
        moved(policy, part)
    policy.save_lora(tmp_path)
    other = policy_of(name, parts)
    other.load_lora(tmp_path)
    state = policy.state()
    assert all(torch.equal(value, state[key]) for key, value in other.state().items())
    pipe = tiny.pipeline(name)
    assert not same_pictures(name, pipe, policy.pipe)
    pipe.load_lora_weights(str(tmp_path))
    assert same_pictures(name, pipe, policy.pipe)


def test_a_pipeline_without_a_place_for_it_keeps_it_in_a_file_of_flowrls(tmp_path):
    policy = policy_of("wan21", BOTH)
    moved(policy)
    policy.save_lora(tmp_path)
    other = policy_of("wan21", BOTH)
    other.load_lora(tmp_path)
    state = policy.state()
    assert all(torch.equal(value, state[key]) for key, value in other.state().items())


def test_a_text_lora_composes_with_any_denoiser_lora(tmp_path):
    text, denoiser, both = policy_of(), policy_of(parts=["denoiser"]), policy_of(parts=BOTH)
    moved(text)
    moved(denoiser, "denoiser")
    text.save_lora(tmp_path / "text")
    denoiser.save_lora(tmp_path / "denoiser")
    both.trainable.load("default", {**text.state(), **denoiser.state()})
    for order in (["text", "denoiser"], ["denoiser", "text"]):
        pipe = tiny.pipeline("sd15")
        for name in order:
            pipe.load_lora_weights(str(tmp_path / name), adapter_name=name)
        pipe.set_adapters(order)
        assert same_pictures("sd15", pipe, both.pipe)


# ------------------------------------------------------------------------------------------ runs


def test_a_run_trains_the_text_encoder_alone_and_goes_on_as_if_never_stopped(tmp_path):
    own = {"train__parts": "[text_encoder]", "optimizer__lr": "1e-2"}
    whole = small.trainer(tmp_path / "whole", iterations="2", **own)
    run = whole.run()
    saved = [name for name in small.weights(run.path) if name.startswith("policy/")]
    assert saved and all(name.startswith("policy/text_encoder") for name in saved)
    first = small.trainer(tmp_path / "half", iterations="2", **own)
    for _ in first:
        break
    first.save()
    again = train(resume=tmp_path / "half")
    assert small.weights(again.path).keys() == small.weights(run.path).keys()
    for name, value in small.weights(run.path).items():
        assert torch.equal(value, small.weights(again.path)[name]), name
    settings = json.loads((run.path / "lora/flowrl.json").read_text())
    assert settings["parts"] == ["text_encoder"]
    assert small.numbers(run.path)[0]["policy/grad_norm"] > 0


@pytest.mark.parametrize("algorithm", ["flow_grpo", "nft"])
def test_the_ratio_is_1_before_the_first_update(tmp_path, algorithm):
    """Else the run stops: rollout and loss encode their prompts by the same weights."""
    made = small.trainer(
        tmp_path, algorithm, iterations="1", train__parts="[denoiser,text_encoder]"
    )
    metrics = next(iter(made)).metrics
    assert metrics["policy/grad_norm"] > 0


# ------------------------------------------------------------------------------------- bad input


def test_prompts_that_were_encoded_before_are_refused():
    embeds = torch.zeros(1, 8, 32)
    with pytest.raises(ValueError, match="negative_prompt_embeds holds prompts that were encoded"):
        policy_of(negative_prompt_embeds=embeds)
    policy = policy_of()
    with pytest.raises(ValueError, match="prompt_embeds holds prompts that were encoded before"):
        policy.encode(["a circle"], [{"prompt_embeds": embeds}])


def test_what_has_no_text_encoder_is_refused():
    pipe = tiny.pipeline("sd15")
    with pytest.raises(ValueError, match="an nn.Module policy has no text encoder to train"):
        load_policy(pipe.unet, shape=(4, 8, 8), parts=TEXT)
    with pytest.raises(ValueError, match=r"parts=\['vae'\] should be a list of some of denoiser"):
        load_policy(pipe, parts=["vae"])
    policy = load_policy(pipe, lora=LORA, height=16, width=16)
    with pytest.raises(ValueError, match=r"which trains denoiser: set train.parts=\[denoiser\]"):
        load_policy(policy, parts=BOTH)


def test_a_pipeline_that_encodes_without_a_gradient_is_refused():
    pipe = tiny.pipeline("sd15")
    with_gradient = pipe.encode_prompt
    pipe.encode_prompt = torch.no_grad()(with_gradient)
    with pytest.raises(UnreplayableError, match="encodes its prompts without a gradient"):
        load_policy(pipe, lora=LORA, parts=TEXT, **tiny.CALLS["sd15"])


def test_targets_that_one_of_the_networks_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"text_encoder has no Linear layer that ends in one of"):
        policy_of(parts=BOTH, lora={**LORA, "targets": ["to_q"]})
    policy = policy_of(parts=BOTH, lora={**LORA, "targets": ["to_q", "q_proj"]})
    layers = policy.trainable.targets
    assert all(name.endswith("to_q") for name in layers["unet"])
    assert all(name.endswith("q_proj") for name in layers["text_encoder"])


def test_a_frozen_network_behind_a_trained_encoder_passes_the_gradient_on():
    """LTX-2's connectors: what was computed without a gradient is no answer where one passes."""
    frozen = torch.nn.Linear(3, 2).requires_grad_(False)
    answers, given = Answers(), torch.randn(4, 3)
    with answers.of({"connectors": frozen}):
        kept = frozen(given)
        followed = frozen(given.clone().requires_grad_())
    assert not kept.requires_grad and followed.requires_grad
    assert torch.equal(kept, followed.detach()) and len(answers.kept) == 1
