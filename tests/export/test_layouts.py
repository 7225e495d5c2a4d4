"""Layouts of other programs: what is written is read back to the bit."""

import exports
import pytest
import tiny
import torch
from safetensors.torch import save_file

from flowrl.policy import lora_read
from flowrl.policy.weights import layouts
from flowrl.policy.weights.layouts import NativeLayer, families, family_of, halves_of, written

FAMILIES = {family.name: family for family in families()}
QUICK = ("SD1.5", "SD3 and SD3.5", "FLUX.1", "Wan 2.1 and 2.2")  # the others: make long


@pytest.mark.parametrize("layout", ["comfyui", "kohya"])
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in FAMILIES]
)
def test_what_is_written_is_read_back_to_the_bit(name, layout):
    """By diffusers' own importer, where it has one, and by flowrl; other weights -> an error."""
    found = exports.proof(FAMILIES[name], layout)
    source = (name, layout) in exports.NOT_IMPORTED
    known = getattr(FAMILIES[name], layout)
    assert found == ("by source, not run" if source else "equal" if known else "no layout known")


def test_a_fused_layer_holds_those_of_diffusers_side_by_side():
    """qkv of rank 1 + 1: rows of k are zero, as nothing was trained there."""
    a, b = {"A": torch.tensor([[1.0, 2.0]]), "B": torch.tensor([[3.0]])}, {}
    b = {"A": torch.tensor([[5.0, 6.0]]), "B": torch.tensor([[7.0]])}
    start = "transformer.transformer_blocks.0.attn.to_"
    weights = {
        f"{start}{n}.lora_{h}.weight": own[h] for n, own in (("q", a), ("v", b)) for h in "AB"
    }
    made = written(weights, FAMILIES["FLUX.1"], "kohya")
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    assert made.pop(f"{key}.alpha").item() == 2
    assert made[f"{key}.lora_down.weight"].tolist() == [[1, 2], [5, 6]]
    assert made[f"{key}.lora_up.weight"].tolist() == [[3, 0], [0, 0], [0, 7]]


def test_names_go_by_the_rules_of_the_table():
    place = FAMILIES["FLUX.1"].place
    assert place("single_transformer_blocks.11.proj_mlp") == NativeLayer(
        "single_blocks.11.linear1", 3, 7, 7
    )
    assert place("norm_out.linear") is None
    assert FAMILIES["SDXL"].place("mid_block.attentions.0.proj_in") == NativeLayer(
        "middle_block.1.proj_in"
    )
    kolors = {"unet": "UNet2DConditionModel", "text_encoder": "ChatGLMModel"}
    assert family_of(kolors) is None


@pytest.mark.parametrize("scale", [0.5, 3.0])
@pytest.mark.parametrize("names", ["kohya", "one network of qkv"])
def test_trainers_of_native_layers_are_read_with_their_scale(tmp_path, scale, names):
    """The alpha of a file holds for q, k and v; a trainer's shared A is that of each."""
    pipe, family = tiny.pipeline("sd3"), FAMILIES["SD3 and SD3.5"]
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    a, b = torch.randn(2, layer.in_features), torch.randn(3 * layer.out_features, 2)
    key = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    if names != "kohya":
        key = "diffusion_model.joint_blocks.0.x_block.attn.qkv"
    file = {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b}
    file[f"{key}.alpha"] = torch.tensor(2 * scale)
    save_file(file, tmp_path / "a.safetensors")
    found = lora_read.layers_of(tmp_path, {"transformer": pipe.transformer}, pipe)
    for part, name in zip(b.chunk(3), "qkv", strict=True):
        own_a, own_b = found["transformer", f"transformer_blocks.0.attn.to_{name}"]
        assert torch.equal(own_a, a) and torch.equal(own_b, part * scale)
    assert len(found) == 3 and family.kohya


@pytest.mark.parametrize(("name", "layout"), [("sdxl", "kohya"), ("flux", "comfyui")])
def test_text_encoders_have_keys_of_their_own(tmp_path, name, layout):
    pipe = exports.cases()[name].make()
    components = {n: type(m).__name__ for n, m in pipe.components.items()}
    family = family_of(components)
    weights = {}
    for part in family.text:
        for layer, module in getattr(pipe, part).named_modules():
            if layer.endswith(("q_proj", "fc1")):
                start = f"{part}.{layer}"
                weights[f"{start}.lora_A.weight"] = torch.randn(2, module.in_features)
                weights[f"{start}.lora_B.weight"] = torch.randn(module.out_features, 2)
    made = written(weights, family, layout)
    assert all("text_model" in key for key in made)
    save_file(made, tmp_path / "a.safetensors")
    modules = {part: getattr(pipe, part) for part in family.text}
    found = lora_read.layers_of(tmp_path, modules, pipe)
    read = {f"{part}.{layer}": {"A": a, "B": b} for (part, layer), (a, b) in found.items()}
    assert exports.same(exports.plain(read), exports.plain(halves_of(weights)))


def test_what_has_no_key_is_refused_by_name():
    one = torch.ones(2, 2)
    for layer, family, said in (
        (
            "text_encoder_3.encoder.q",
            "SD3 and SD3.5",
            "text_encoder_3.encoder.q, which has no key in",
        ),
        ("transformer.norm_out.linear", "FLUX.1", "norm_out.linear, which has no key in the kohya"),
    ):
        weights = {f"{layer}.lora_{half}.weight": one for half in "AB"}
        with pytest.raises(ValueError, match=said):
            layouts.written(weights, FAMILIES[family], "kohya")
