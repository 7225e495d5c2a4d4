"""What load_policy is given and cannot take is refused in a sentence."""

import diffusers
import pytest
import torch
from safetensors.torch import save_file
from zoo import cases

import flowrl


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (3, "lora=3 should be a mapping"),
        ("x", "lora='x' should be a mapping"),
        ({"rank": "4"}, "rank='4' should be a number above 0"),
        ({"rank": True}, "rank=True should be"),
        ({"rank": 0.5}, "rank=0.5 should be"),
        ({"alpha": -1}, "alpha=-1 should be"),
        ({"targets": "to_q"}, "targets='to_q' should be a list of names"),
        ({"targets": []}, r"targets=\[\] should be a list"),
    ],
)
def test_wrong_lora_options_are_one_sentence(lora, said):
    with pytest.raises(ValueError, match=said):
        flowrl.load_policy(torch.nn.Linear(4, 4), shape=(4,), lora=lora)


def test_what_is_no_model_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="StableDiffusionPipeline is a class; give an object of"):
        flowrl.load_policy(diffusers.StableDiffusionPipeline)
    with pytest.raises(ValueError, match="policy is StableDiffusionPipeline, a class; give an"):
        flowrl.train({"output": str(tmp_path)}, policy=diffusers.StableDiffusionPipeline)
    with pytest.raises(ValueError, match="Sequential has no parameters; there is nothing to train"):
        flowrl.load_policy(torch.nn.Sequential(), shape=(4,))
    for shape in (3, "3,8", (3, -8), (2.5,)):
        with pytest.raises(ValueError, match="should be whole numbers above 0, such as"):
            flowrl.load_policy(torch.nn.Linear(4, 4), shape=shape)
    with pytest.raises(ValueError, match="a part of a pipeline is trained by giving the pipeline"):
        flowrl.load_policy(torch.nn.Linear(4, 4))


def test_a_lora_in_a_format_that_is_not_the_pipelines_is_one_sentence(tmp_path):
    case = cases()["sd15"]
    policy = flowrl.load_policy(case.make(), lora={"rank": 2, "alpha": 2}, **case.call)
    odd = {f"lora_unet_odd_{k}.lora_down.weight": torch.zeros(2, 4) for k in range(50)}
    file = tmp_path / "pytorch_lora_weights.safetensors"
    save_file(odd, file)
    with pytest.raises(ValueError) as caught:
        policy.load_lora(tmp_path)
    assert len(str(caught.value)) < 700 and str(file) in str(caught.value)


@pytest.mark.parametrize("size", ["abc", -8, 0, 16.0, True])
def test_a_size_that_is_no_whole_number_is_one_sentence(size):
    with pytest.raises(ValueError, match=f"height={size!r} should be a whole number from 1"):
        flowrl.load_policy(cases()["sd15"].make(), height=size, width=16)


def test_a_size_that_the_pipeline_does_not_make_is_said(caplog):
    policy = flowrl.load_policy(cases()["sd15"].make(), height=32)  # it asks for both or none
    media = flowrl.generate(policy, "a fox", steps=2)
    assert media.shape[-2:] == (16, 16)
    assert "the pipeline makes 16 x 16 (height x width), and was asked for 32 x 16" in caplog.text


def test_frames_that_the_pipeline_does_not_make_are_said(caplog):
    """Wan makes 4 k + 1 frames."""
    policy = flowrl.load_policy(cases()["wan21"].make(), num_frames=7, height=16, width=16)
    assert flowrl.generate(policy, "a fox", steps=2).shape[1] == 5
    assert "the pipeline makes num_frames=5, and was asked for num_frames=7" in caplog.text
