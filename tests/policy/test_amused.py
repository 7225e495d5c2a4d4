"""aMUSEd's pipeline as a policy: its logits, its pictures, what it refuses, and that it trains."""

from importlib.resources import files

import pytest
import torch
from diffusers import AmusedImg2ImgPipeline, AmusedInpaintPipeline, LLaDA2Pipeline

import flowrl
from flowrl.policy.load import resolve_source
from flowrl.samplers.common.unmasking import MASK

PROMPTS = ["a red circle", "two blue squares"]


@pytest.fixture(scope="module")
def called():
    """(policy, what the pipeline's own call gave its scheduler, its tokens, its pictures)."""
    from diffusers import DiffusionPipeline

    folder = str(files("flowrl.shapes") / "masked")
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    given, step = [], pipe.scheduler.step
    pipe.scheduler.step = lambda **call: (given.append(call), step(**call))[1]
    with torch.no_grad():
        tokens = pipe(
            PROMPTS,
            num_inference_steps=4,
            guidance_scale=3.0,
            negative_prompt=["a circle"] * 2,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        ).images
        pictures = pipe(
            PROMPTS,
            num_inference_steps=1,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
        ).images
    last = given.pop()
    drawn = step(**{**last, "generator": torch.Generator().manual_seed(0)}).prev_sample
    pipe.scheduler.step = step
    own = flowrl.load_policy(pipe, lora={"rank": 2}, guidance_scale=3.0, negative_prompt="a circle")
    return own, given, tokens, drawn, torch.from_numpy(pictures).movedim(-1, 1)


def test_guided_logits_are_those_that_the_pipeline_gives_its_scheduler(called):
    own, given, *_ = called
    cond = own.encode(PROMPTS)
    assert len(given) == 4 and own.branches("pipeline") == 2
    for call in given:
        x = call["sample"]
        states = torch.where(x == own.mask, MASK, x)
        logits = own.velocity(states, 0.5, cond, torch.arange(2)).detach()
        torch.testing.assert_close(logits.movedim(-1, 1), call["model_output"], atol=1e-4, rtol=0)


def test_pictures_are_those_of_the_pipeline(called):
    own, _, tokens, drawn, pictures = called
    assert tokens.shape == (2, 8, 8) and own.latent_shape == (8, 8)
    with torch.no_grad():
        made = own.decode(drawn)
    assert made.shape == (2, 3, 64, 64) and made.dtype == torch.float32
    torch.testing.assert_close(made, pictures, atol=1e-5, rtol=0)


def test_what_the_parts_say_of_schedule_and_type_holds():
    """The scheduler's own shares of masked places; and a VQ autoencoder that fp16 is too narrow
    for."""
    from diffusers import AmusedPipeline

    folder = str(files("flowrl.shapes") / "masked")
    pipe = AmusedPipeline.from_pretrained(folder, torch_dtype=torch.float16)
    pipe.scheduler.register_to_config(masking_schedule="linear")
    pipe.vqvae.register_to_config(force_upcast=True)
    own = flowrl.load_policy(pipe, lora={"rank": 2}, guidance_scale=0.5)
    assert own.schedule(4).sigmas.tolist() == [1, 0.75, 0.5, 0.25, 0]
    assert pipe.vqvae.dtype == torch.float32 and pipe.transformer.dtype == torch.float16
    assert own.branches("pipeline") == 1  # the pipeline guides above 1 alone


@pytest.mark.parametrize("cls", (AmusedImg2ImgPipeline, AmusedInpaintPipeline, LLaDA2Pipeline))
def test_other_pipelines_of_tokens_are_refused(cls):
    pipe = object.__new__(cls)  # its class is looked at first
    with pytest.raises(ValueError, match=f"{cls.__name__} makes tokens, and of such pipelines"):
        flowrl.load_policy(pipe)


def test_the_self_check_passes_and_two_prompts_differ(called):
    assert called[0].self_check(PROMPTS).wrong_rows > 1e-3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_frames": 9}, "model.pipeline.num_frames is no argument.*height, width, guidance_sc"),
        ({"height": 60}, "height=60 and width=64 should be multiples of 8"),
        ({"parts": ["text_encoder"]}, "train.parts: .* leave train.parts out"),
        ({"quantize": "int8"}, "model.quantize: .* leave model.quantize out"),
        ({"hints": {"guidance": "norm"}}, "model.hints: .* leave model.hints out"),
    ],
)
def test_what_it_does_not_have_is_refused(given, said):
    source, _ = resolve_source("shapes-masked")
    with pytest.raises(ValueError, match=said):
        flowrl.load_policy(source, **given)


def test_another_size_has_another_grid():
    own = flowrl.load_policy("shapes-masked", height=32, width=64)
    assert own.latent_shape == (4, 8)
    with torch.no_grad():
        assert own.decode(torch.zeros(1, 4, 8, dtype=torch.int32)).shape == (1, 3, 32, 64)
