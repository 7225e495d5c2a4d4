"""pipe.save_pretrained of a pipeline that is a policy writes what the policy generates."""

import copy

import pytest
import torch
from diffusers import DiffusionPipeline
from zoo import cases

import flowrl

LORA = {"rank": 2, "alpha": 4}


def policy(case, pipe):
    made = flowrl.load_policy(pipe, lora=LORA, **case.call)
    torch.manual_seed(1)
    with torch.no_grad():
        for part in made.parts.values():
            for weight in part.values():
                weight.add_(0.3 * torch.randn_like(weight))
    return made


@pytest.mark.parametrize("name", ["sd15", "flux"])
def test_a_saved_pipeline_generates_what_the_policy_does(tmp_path, name):
    case = cases()[name]
    pipe = case.make()
    base = flowrl.generate(flowrl.load_policy(copy.deepcopy(pipe), **case.call), "a", steps=2)
    trained = policy(case, pipe)
    expected = flowrl.generate(trained, "a", steps=2)
    assert not torch.allclose(expected, base, atol=1e-2)
    names = list(trained.modules.popitem()[1].state_dict())
    pipe.save_pretrained(tmp_path)
    again = DiffusionPipeline.from_pretrained(tmp_path)
    found = flowrl.generate(flowrl.load_policy(again, **case.call), "a", steps=2)
    assert torch.allclose(found, expected, atol=1e-4)
    network = pipe.unet if name == "sd15" else pipe.transformer
    assert list(network.state_dict()) == names and any("lora_A" in key for key in names)


def test_a_copy_saves_its_own_weights_and_the_reference_saves_none_of_lora(tmp_path):
    case = cases()["sd15"]
    trained = policy(case, case.make())
    network = trained.pipe.unet
    other = copy.deepcopy(network)
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    other.save_pretrained(tmp_path / "copy")
    with trained.view("reference"):
        network.save_pretrained(tmp_path / "base")
    zeros, kept = (type(network).from_pretrained(tmp_path / k) for k in ("copy", "base"))
    assert all(not bool(weight.any()) for weight in zeros.parameters())
    held = dict(network.named_parameters())
    for name, weight in kept.named_parameters():
        of_layer = name.rpartition(".")
        inner = f"{of_layer[0]}.base_layer.{of_layer[2]}"
        assert torch.equal(weight, held[inner] if inner in held else held[name])


def test_a_folder_that_was_saved_with_lora_in_its_layers_is_refused_in_a_sentence(tmp_path):
    case = cases()["sd15"]
    trained = policy(case, case.make())
    del trained.pipe.unet.save_pretrained  # diffusers' own again
    trained.pipe.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="files of its unet lack .* saved with LoRA in its layers"):
        flowrl.load_policy(str(tmp_path), **case.call)


def test_a_lora_of_another_model_is_refused_in_a_sentence(tmp_path):
    unet, dit = cases()["sd15"], cases()["flux"]
    policy(unet, unet.make()).save_lora(tmp_path)
    with pytest.raises(ValueError, match="belong to another model: none has a name that"):
        policy(dit, dit.make()).load_lora(tmp_path)
