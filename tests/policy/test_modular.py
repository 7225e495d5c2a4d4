"""Modular pipelines are policies like classic ones: the same velocities, media and training."""

import importlib.util
import re
from pathlib import Path

import diffusers
import pytest
import tiny
import torch
from zoo import cases
from zoo.case import Case
from zoo.modular import of

from flowrl import load_policy
from flowrl.policy.modular import as_pipeline
from flowrl.policy.replay.errors import CallError, UnreplayableError

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("pipelines", ROOT / "scripts/bench/pipelines.py")
pipelines = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pipelines)

# both sides of each pair have one guidance scale and one negative prompt
SAME = {
    "sd3": ({}, {}),
    "sdxl": ({"guidance_scale": 7.5}, {}),
    "flux": ({}, {}),
    "wan21": ({}, {}),
    "qwenimage": ({"negative_prompt": "a"}, {"negative_prompt": "a"}),
}
CASES = {name: cases()[f"modular_{name.replace('wan21', 'wan')}"] for name in SAME}
# the embedded model's own parts, and the call of its config
SHAPES = "shapes-sd3"
SAME[SHAPES] = ({}, {})
CASES[SHAPES] = Case(
    make=lambda: of(
        "StableDiffusion3AutoBlocks",
        lambda: load_policy(SHAPES).pipe,
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
    ),
    call={"max_sequence_length": 12, "negative_prompt": ""},
)


def pair(name, lora=None):
    """(the classic policy, the modular one), with the same weights."""
    classic, own = SAME[name]
    case = CASES[name]
    torch.manual_seed(0)  # of the adapters' first values
    modular = load_policy(case.make(), lora=lora, **case.call, **own)
    torch.manual_seed(0)
    made = (
        load_policy(SHAPES, lora=lora)
        if name == SHAPES
        else tiny.policy(name, lora=lora, **classic)
    )
    return made, modular


@pytest.mark.parametrize("name", SAME)
def test_velocity_and_media_are_those_of_the_classic_pipeline(name):
    """Bit for bit, though a guider asks for the branches in two calls, where a classic pipeline
    puts them in one batch."""
    both, made = pair(name), []
    assert both[1].replay.pipeline.endswith("Blocks")
    for policy in both:
        x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
        cond, rows = policy.encode(list(tiny.PROMPTS)), torch.tensor([0, 1])
        sigmas = policy.schedule(4).sigmas
        with torch.no_grad():
            v = policy.velocity(x, sigmas[1].item(), cond, rows)
            made.append((sigmas, v, policy.decode(x, 0.0, cond, rows)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(made[1], made[0], strict=True))


@pytest.mark.parametrize("key", pipelines.METHODS)
@pytest.mark.parametrize(
    "name", [key if key == "flux" else pytest.param(key, marks=pytest.mark.long) for key in SAME]
)
def test_an_iteration_is_that_of_the_classic_pipeline(name, key, tmp_path):
    weights = []
    for which, policy in enumerate(pair(name, pipelines.LORA)):
        folder = tmp_path / str(which)
        folder.mkdir()
        pipelines.train(policy, CASES[name], pipelines.METHODS[key], folder)
        weights.append([p for part in policy.parts.values() for p in part.values()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*weights, strict=True))


@pytest.fixture(scope="module")
def sd3():
    return CASES["sd3"].make()


def test_the_original_keeps_its_blocks_and_their_progress_bars(sd3):
    made = as_pipeline(sd3)
    assert made.components == sd3.components and type(made).__name__ == "StableDiffusion3AutoBlocks"
    made.set_progress_bar_config(disable=True)
    loop = sd3.blocks.sub_blocks["denoise"].sub_blocks["text2image"].sub_blocks["denoise"]
    assert not hasattr(loop, "_progress_bar_config") and hasattr(type(loop).__call__, "__wrapped__")


def test_a_text_encoder_gets_a_gradient_through_the_blocks(sd3):
    """Replayed, and by the loop's own body: every block computes under no_grad by itself."""
    case = CASES["sd3"]
    policy = load_policy(case.make(), lora=pipelines.LORA, parts=["text_encoder"], **case.call)
    assert pipelines.text(policy, case)["gradient"] <= 1e-5


def test_a_folder_is_loaded_in_the_types_of_a_classic_one(sd3, tmp_path):
    as_pipeline(sd3).save_pretrained(tmp_path / "first")
    assert str(tmp_path) not in (tmp_path / "first/modular_model_index.json").read_text()
    (tmp_path / "first").rename(tmp_path / "moved")
    policy = load_policy(tmp_path / "moved", dtype="bfloat16", device="cpu", **CASES["sd3"].call)
    assert policy.pipe.transformer.dtype == torch.bfloat16
    assert policy.pipe.text_encoder_3.dtype == torch.bfloat16
    assert policy.pipe.vae.dtype == torch.float32
    assert policy.replay.pipeline == "StableDiffusion3AutoBlocks"
    own = policy.pipe.transformer.state_dict()
    for name, weight in sd3.transformer.state_dict().items():
        assert torch.equal(own[name].float(), weight.to(torch.bfloat16).float()), name


def test_parts_that_are_absent_are_named_where_the_call_needs_them(sd3, tmp_path):
    """SD3 does without T5, not without its first text encoder."""
    case = CASES["sd3"]
    pipe = case.make()
    pipe.update_components(text_encoder_3=None, tokenizer_3=None)
    as_pipeline(pipe).save_pretrained(tmp_path)
    assert load_policy(tmp_path, **case.call).pipe.text_encoder_3 is None
    pipe.update_components(text_encoder=None)
    with pytest.raises(CallError, match="it has no text_encoder and no text_encoder_3"):
        load_policy(pipe, **case.call)
    pipe.update_components(scheduler=None)
    with pytest.raises(ValueError, match='has no component named "scheduler"'):
        load_policy(pipe, **case.call)


def test_diffusers_reads_a_lora_where_the_pipeline_has_its_format():
    """Else the lines after a run name no pipe.load_lora_weights."""
    pipe = CASES["sd3"].make()
    modular = load_policy(pipe, lora=pipelines.LORA, **CASES["sd3"].call)
    assert modular.has_lora_format and hasattr(pipe, "load_lora_weights")
    assert not load_policy(tiny.ToyFlow(), shape=(2,), cond=tiny.toy_cond).has_lora_format


def test_a_scale_that_the_guider_holds_is_no_argument_of_the_call(sd3):
    with pytest.raises(ValueError, match="takes no argument 'guidance_scale': its guider has the"):
        load_policy(sd3, guidance_scale=3.0)


def test_blocks_without_components_are_refused(sd3):
    with pytest.raises(ValueError, match="AutoBlocks is blocks without components; give the pipel"):
        load_policy(sd3.blocks)


def test_a_guider_that_remembers_steps_is_no_policy():
    pipe = CASES["sd3"].make()
    momentum = {"adaptive_projected_guidance_momentum": -0.5}
    pipe.update_components(guider=diffusers.AdaptiveProjectedGuidance(**momentum))
    with pytest.raises(UnreplayableError, match="or remembers earlier steps"):
        load_policy(pipe, **CASES["sd3"].call)


def test_inputs_that_no_executed_block_reads_have_no_effect(sd3):
    policy = load_policy(sd3, strength=0.5, **CASES["sd3"].call)
    assert policy.unread(["pipeline"]) == [
        "strength has no effect: the call of StableDiffusion3AutoBlocks never reads it"
    ]


def test_guidance_between_branches_of_one_text_has_no_effect_and_is_refused():
    """Without a negative prompt the blocks of SD3 encode the prompt for both branches."""
    case = CASES["sd3"]
    call = {key: value for key, value in case.call.items() if key != "negative_prompt"}
    policy = load_policy(case.make(), **call)
    cond, rows = policy.encode(list(tiny.PROMPTS)), torch.tensor([0, 1])
    x, sigma = torch.randn(2, *policy.latent_shape), policy.schedule(4).sigmas[1].item()
    with pytest.raises(ValueError, match='guidance=4.0 has no effect: .* negative_prompt=""'):
        policy.velocity(x, sigma, cond, rows, guidance=4.0)
    policy.velocity(x, sigma, cond, rows, guidance="none")
    said = 'the pipeline\'s own guidance has no effect: .* give its call negative_prompt="", or use'
    [sentence] = policy.unread(["none", "pipeline"])
    assert re.match(said, sentence) and not policy.unread(["none"])


def test_a_loop_that_moves_its_latents_itself_is_refused():
    with pytest.raises(UnreplayableError, match='EchoBlocks has no component named "scheduler", w'):
        load_policy(cases()["modular_echo"].make())
