"""The calls that are written down for a budget are those that are inferred from the pipelines."""

import json

import long
import pytest
import tiny
import torch
import zoo
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

import flowrl
from flowrl.policy import folder, modular
from flowrl.training.budget import call_shapes
from flowrl.training.budget.architecture import read
from flowrl.training.budget.modelled import ModelledPolicy

TINY = ["sd15", "sdxl", "sd3", "flux", "qwenimage", "wan21"]
ZOO = zoo.cases()
NAMES = [*TINY, "z_image", "flux2_klein", "sana", "wan22_5b", "cosmos25"]
EDITING = ["qwen_edit_plus", "flux_kontext"]  # each prompt brings a picture


def described(value):
    """An argument by its shape and type."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, list):
        return [described(entry) for entry in value]
    if isinstance(value, dict):
        return {key: described(entry) for key, entry in value.items()}
    return value


def calls(policy, device, prompts=tiny.PROMPTS, conditions=None):
    """What the network is given for a velocity of two rows, and what comes back."""
    seen, (network,) = [], policy.networks.values()
    cond = policy.encode(list(prompts), conditions)
    hook = network.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(described(kwargs)), with_kwargs=True
    )
    x = torch.zeros(2, *policy.latent_shape, device=device)
    rows = torch.tensor([0, 1], device=device)
    with torch.no_grad():
        v = policy.velocity(x, 0.5, cond, rows)
        media = policy.decode(x)
    hook.remove()
    return seen, described(v), described(media)


@pytest.mark.parametrize("name", NAMES)
def test_a_modelled_policy_calls_its_network_as_the_pipeline_does(name, tmp_path, monkeypatch):
    monkeypatch.setattr(call_shapes, "EMPTY_QWEN", 5)  # of the tiny tokenizer
    case = ZOO[name]
    real = flowrl.load_policy(case.make(), lora={"rank": 2, "alpha": 2}, **case.call)
    real.pipe.save_pretrained(tmp_path)
    modelled = ModelledPolicy(
        read(str(tmp_path)),
        case.call,
        lora={"rank": 2, "alpha": 2},
        dtype=torch.float32,
        decoder=torch.float32,
    )
    assert modelled.latent_shape == real.latent_shape
    assert modelled.branches("pipeline") == real.branches("pipeline")
    ours, theirs = calls(modelled, "meta"), calls(real, "cpu")
    assert ours[1:] == theirs[1:]
    for mine, its in zip(ours[0], theirs[0], strict=True):
        for call in (mine, its):  # a budget takes the longest prompt
            if "cap_feats" in call:
                call["cap_feats"] = [(shape[1:], dtype) for shape, dtype in call["cap_feats"]]
        assert mine == its
    weights = {key: tuple(w.shape) for key, w in real.trainable.named().items()}
    assert {key: tuple(w.shape) for key, w in modelled.trainable.named().items()} == weights


def test_a_time_for_each_token_is_the_pipelines_choice_and_not_its_vaes():
    """shapes-wan has the VAE of Wan 2.2 5B, and one time a row."""
    call = {"height": 64, "width": 64, "num_frames": 9, "max_sequence_length": 16}
    real = flowrl.load_policy("shapes-wan", **call)
    dtypes = {"dtype": torch.float32, "decoder": torch.float32}
    modelled = ModelledPolicy(read("package:flowrl.shapes/wan"), call, lora=None, **dtypes)
    assert calls(modelled, "meta") == calls(real, "cpu")


@pytest.mark.parametrize("name", long.but(EDITING, {"qwen_edit_plus"}))
def test_a_picture_is_called_behind_the_latents(name, tmp_path, monkeypatch):
    """Two prompts of one length, for a budget takes all texts to be the longest. The tiny tokenizer
    makes other numbers of tokens than Qwen's, and pictures are smaller than real ones."""
    for constant, value in {"EMPTY_QWEN": 5, "PICTURE_QWEN": 7, "PICTURE": 256}.items():
        monkeypatch.setattr(call_shapes, constant, value)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 256**2)
    case = ZOO[name]
    call = {"max_sequence_length": 7, **case.call}
    real = flowrl.load_policy(case.make(), example=case.conditions[0], **call)
    real.pipe.save_pretrained(tmp_path)
    modelled = ModelledPolicy(
        read(str(tmp_path)), call, lora=None, dtype=torch.float32, decoder=torch.float32
    )
    assert modelled.latent_shape == real.latent_shape
    assert modelled.branches("pipeline") == real.branches("pipeline")
    given = [tiny.PROMPTS[0]] * 2, case.conditions
    ours, theirs = calls(modelled, "meta", *given), calls(real, "cpu", *given)
    assert ours == theirs
    kept, its = (policy.encode(*given).groups[0].kept[0] for policy in (modelled, real))
    assert described(kept) == described(its)  # and what a prompt keeps of its picture
    assert ours[0][0]["hidden_states"][0][1] > real.latent_shape[0]


def test_a_picture_has_the_size_to_which_the_pipelines_bring_it():
    side, qwen = call_shapes.PICTURE, pipeline_qwenimage_edit_plus
    assert side**2 == qwen.VAE_IMAGE_SIZE
    assert (side, side) in pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
    across = round(qwen.CONDITION_IMAGE_SIZE**0.5 / 28)  # Qwen2.5-VL: 28 x 28 pixels a token
    assert across**2 + 5 + 2 == call_shapes.PICTURE_QWEN


def test_a_modular_folder_is_budgeted_as_the_classic_one(tmp_path):
    """Its index says where each component is, which may be another folder."""
    ZOO["sd3"].make().save_pretrained(tmp_path / "classic")
    modular.as_pipeline(ZOO["modular_sd3"].make()).save_pretrained(tmp_path / "modular")
    place = tmp_path / "modular" / folder.MODULAR
    index = json.loads(place.read_text())
    index["vae"][2]["pretrained_model_name_or_path"] = str(tmp_path / "classic")
    place.write_text(json.dumps(index))
    (tmp_path / "modular/vae").rename(tmp_path / "vae")
    classic, own = (read(str(tmp_path / name)) for name in ("classic", "modular"))
    assert own.pipeline == classic.pipeline == "StableDiffusion3Pipeline"
    call = ZOO["sd3"].call
    assert call_shapes.call_shapes(own, call) == call_shapes.call_shapes(classic, call)
    assert own.parts == classic.parts
    index["vae"][2]["pretrained_model_name_or_path"] = "somewhere/else"
    place.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="somewhere/else/vae/config.json is missing, of"):
        read(str(tmp_path / "modular"))


@pytest.mark.parametrize("name", [*NAMES, *EDITING])
def test_text_encoders_run_without_values(name, tmp_path):
    pipe = ZOO[name].make()
    pipe.save_pretrained(tmp_path)
    modelled = ModelledPolicy(
        read(str(tmp_path)), ZOO[name].call, lora=None, dtype=torch.float32, decoder=torch.float32
    )
    with torch.no_grad():
        assert len(modelled.encode_one()) == len(modelled.shapes.encoders) > 0
