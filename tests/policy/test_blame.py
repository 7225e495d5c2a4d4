"""A library's error inside a pipeline's call: which call it was, where in it, which of the user's
arguments could matter, and the library's own words."""

import inspect
import re

import long
import pytest
import tiny
import torch
from zoo import cases
from zoo.case import PROMPTS, picture

from flowrl import generate, load_policy
from flowrl.policy.check import relative
from flowrl.policy.load import PipelinePolicy
from flowrl.policy.replay import blame
from flowrl.policy.replay.errors import CallError, TooFewSteps

PICTURE = picture(1)


def refused(pipe, **call):
    with pytest.raises(CallError) as error:
        load_policy(pipe, **call)
    return str(error.value)


def failing(*_, **__):
    raise KeyError("attn")


@pytest.mark.parametrize(
    ("name", "call", "said"),
    [
        ("sd3", {"height": 17}, "in check_inputs: .* divisible by 4 .*: height=17, width=16$"),
        ("sd3", {"negative_prompt": 5}, "in encode_prompt: TypeError: .*: negative_prompt=5$"),
        ("sd15", {"clip_skip": 9}, "in encode_prompt: IndexError: tuple index .*: clip_skip=9$"),
        ("sd3", {"guidance_scale": "a"}, "TypeError: '>' not .*: height=16, .*guidance_scale='a'$"),
        ("sd15_inpaint", {"image": PICTURE}, "in preprocess: .*it may need mask_image: a column"),
        ("flux_fill", {}, "it may need image and mask_image: a column of the prompts"),
        ("sd15_controlnet", {}, "^StableDiffusionControlNetPipeline needs image: a column of the"),
        ("svd", {}, "^StableVideoDiffusionPipeline needs 'image': a column of the prompts"),
    ],
)
def test_the_arguments_that_could_matter_are_named_and_no_others(name, call, said):

    case = cases()[name]
    found = refused(case.make(), **{**case.call, **call})
    assert re.search(said, found) and ("with steps=8 is recorded" in found or " needs " in found)


def test_pictures_are_written_by_number_and_size():
    pipe = tiny.pipeline("sd15")
    given = {"image": [PICTURE] * 9, "last": PICTURE, "height": 16}
    said = blame._advice(pipe, given, "sizes", list(given), given)
    assert said.endswith(
        "image=9 pictures, the first 16 x 16 pixels, last=16 x 16 pixels, height=16"
    )


def test_a_part_that_fails_by_itself_is_no_fault_of_an_argument():
    pipe = tiny.pipeline("sd3")
    pipe.encode_prompt = failing
    assert "in failing: KeyError: 'attn'" in refused(pipe)
    pipe = tiny.pipeline("sd15")
    pipe.text_encoder.forward = failing
    said = refused(pipe, height=16, width=16)
    assert "in encode_prompt (text_encoder): KeyError: 'attn'; " in said
    assert said.endswith(": the prompts") and "height" not in said
    pipe = tiny.pipeline("sd3")
    pipe.vae.decoder.conv_in.weight.data = pipe.vae.decoder.conv_in.weight.data[:, :2]
    said = refused(pipe, **tiny.CALLS["sd3"])
    assert "in vae: RuntimeError: Given groups=1" in said and "do not fit together" in said


def test_what_fails_in_flowrl_itself_is_not_laid_on_the_user(monkeypatch):
    def odd(*_):
        assert not "a loop like this"

    monkeypatch.setattr(PipelinePolicy, "_infer", odd)
    odd.__code__ = odd.__code__.replace(
        co_filename=inspect.unwrap(load_policy).__code__.co_filename
    )
    said = refused(tiny.pipeline("sd3"), **tiny.CALLS["sd3"])
    assert "flowrl's own load.py:" in said and "height" not in said


def test_encoding_and_decoding_say_what_they_are(monkeypatch):
    policy = tiny.policy("sd3")
    with pytest.raises(CallError, match="while prompts and conditions are encoded, in encode_prom"):
        policy.encode(["a", 5])
    with pytest.raises(CallError, match="in encode_prompt .*: negative_prompt=3$"):
        policy.encode(["a", "b"], [{"negative_prompt": 3}] * 2)
    monkeypatch.setattr(policy.pipe.vae, "decode", failing)
    with pytest.raises(
        CallError, match="while media are decoded, in failing: KeyError: 'attn'; no"
    ):
        policy.decode(torch.zeros(1, *policy.latent_shape))


def with_adapter():
    """Stable Diffusion with an IP-Adapter of random weights."""
    pipe, state = tiny.pipeline("sd15"), {}
    shapes = {"proj.weight": (64, 16), "proj.bias": (64,), "norm.weight": (16,), "norm.bias": (16,)}
    crossed = [name for name in pipe.unet.attn_processors if "attn2" in name]
    for k, name in enumerate(crossed):
        layer = pipe.unet.get_submodule(name.rpartition(".")[0])
        for part in "kv":
            state[f"{2 * k + 1}.to_{part}_ip.weight"] = torch.ones(layer.to_k.out_features, 16)
    image_proj = {name: torch.ones(shape) for name, shape in shapes.items()}
    pipe.unet._load_ip_adapter_weights([{"image_proj": image_proj, "ip_adapter": state}])
    return pipe


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({}, "it has an IP-Adapter and no picture for it: give ip_adapter_image"),
        ({"negative_prompt": "a"}, "it has an IP-Adapter and no picture for it"),
        (
            {"ip_adapter_image": PICTURE},
            "in prepare_ip_adapter_image_embeds: .*: ip_adapter_image=",
        ),
        ({"height": 17}, "in check_inputs: .*: height=17"),
    ],
)
def test_a_picture_that_an_adapter_lacks_is_asked_for(call, said):
    with pytest.raises(CallError, match=said):
        load_policy(with_adapter(), **{**tiny.CALLS["sd15"], **call})


LATE = ("sd15_img2img", "sdxl_inpaint", "flux_img2img")


@pytest.mark.parametrize("name", long.but(LATE, LATE[1:]))
def test_a_low_strength_is_recorded_with_more_steps(name):
    """int(8 x 0.1) = 0, and of 40 steps there are 4."""
    case = cases()[name]
    call = {**case.call, "strength": 0.1}
    policy = load_policy(case.make(), example=case.conditions[0], **call)
    assert max(policy.self_check().errors.values()) <= 1e-4
    x = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    cond, sigma = policy.encode([PROMPTS[0]], [case.conditions[0]]), policy.schedule(40).sigmas[1]
    ours = policy.velocity(x, sigma.item(), cond, torch.tensor([0]))
    own = policy.reentry(x, sigma.item(), [PROMPTS[0]], [case.conditions[0]])
    assert len(policy.schedule(40).times) == 4 and relative(ours, own) <= 1e-4
    if name == "flux_img2img":  # makes a step at least
        return
    said = "has no denoising step left .* with steps=4 .*: strength=0.1 leaves out all"
    with pytest.raises(TooFewSteps, match=said):
        generate(policy, [PROMPTS[0]], steps=4, conditions=[case.conditions[0]])


def test_a_strength_without_any_step_is_said_as_what_it_is():
    case = cases()["sd15_img2img"]
    said = refused(case.make(), example=case.conditions[0], strength=0.01)
    assert "with steps=64 is recorded: strength=0.01 leaves out all (strength x steps" in said
