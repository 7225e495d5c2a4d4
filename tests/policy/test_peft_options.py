"""Options of peft beside rank, alpha, targets and init: those that adapters have, and refusals."""

import math

import pytest
import tiny
import torch

from flowrl.config.load import load_config
from flowrl.config.training import NOT_PEFT, LoraConfig

LORA = {"rank": 4, "alpha": 4}


def test_rslora_scales_by_the_root_of_the_rank_in_the_network_and_in_files(tmp_path):
    rooted = tiny.policy("sd15", lora={**LORA, "peft": {"use_rslora": True}})
    plain = tiny.policy("sd15", lora={**LORA, "alpha": 8})  # 4 / sqrt(4) = 8 / 4
    for policy in (rooted, plain):
        for key, weight in policy.trainable.named().items():
            generator = torch.Generator().manual_seed(len(key) + weight.numel())
            weight.data.copy_(torch.randn(weight.shape, generator=generator))
    assert rooted.trainable.scale == plain.trainable.scale == 2
    assert {layer.scaling["default"] for layer in rooted.trainable.layers} == {2}
    files = [p.save_lora(tmp_path / n) for n, p in (("rooted", rooted), ("plain", plain))]
    read = tiny.policy("sd15", lora=LORA)
    states = [read.load_lora(file.parent) or dict(read.trainable.tensors()) for file in files]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    pipe = tiny.pipeline("sd15")
    pipe.load_lora_weights(str(files[0].parent))  # diffusers finds alpha = rank, the scale is in B
    assert {m.scaling["default_0"] for m in pipe.unet.modules() if hasattr(m, "scaling")} == {1}


def test_layers_are_excluded_and_an_orthogonal_start_changes_nothing():
    options = {"exclude_modules": ["to_v"], "init_lora_weights": "orthogonal"}
    policy = tiny.policy("sd15", lora={**LORA, "peft": options})
    named = policy.trainable.named()
    assert named and not any("to_v" in key for key in named)
    for layer in policy.trainable.layers:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert b.abs().max() > 0 and (b @ a).abs().max() < 1e-5


@pytest.mark.parametrize("name", [*NOT_PEFT, "no_such_option"])
def test_options_that_adapters_do_not_have_are_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=f"train.lora.peft does not take {name}: .{{10,}}"):
        LoraConfig(peft={name: True})


def test_a_value_that_is_not_allowed_is_said():
    words = ["model=shapes-sd3", "train.lora.peft.init_lora_weights=pissa"]
    with pytest.raises(ValueError, match="init_lora_weights=pissa should be orthogonal"):
        load_config(None, words)
    assert math.isclose(LoraConfig(peft={"use_rslora": True}).alpha, 64)
