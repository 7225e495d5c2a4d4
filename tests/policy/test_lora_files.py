"""LoRA files of any trainer: what they did there they do here, or what is not done is named."""

import functools
import json
import re
from dataclasses import fields

import pytest
import tiny
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_parts import unet

from flowrl.policy import lora_read
from flowrl.policy.weights import lora
from flowrl.policy.weights.parts import TrainedParts

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
WAN = [*ATTENTION, "net.0.proj", "net.2"]
FILE = "adapter_model.safetensors"


@functools.cache
def pipe_of(name):
    """A tiny pipeline, whose networks are not changed."""
    return tiny.pipeline(name)


@functools.cache
def made(name, components, targets):
    pipe = tiny.pipeline(name)
    components = components or ("unet" if hasattr(pipe, "unet") else "transformer",)
    options = {"rank": 4, "alpha": 7, "targets": list(targets)}
    return pipe, TrainedParts({part: getattr(pipe, part) for part in components}, options)


def parts_of(name, *components, targets=ATTENTION):
    """A pipeline with new adapters, and these; reading changes neither."""
    return made(name, components, tuple(targets))


def deltas(state, factor):
    """What a state adds to each layer, by name."""
    layers = {key.rsplit(".lora_", 1)[0] for key in state}
    both = {k: (state[f"{k}.lora_A.weight"], state[f"{k}.lora_B.weight"]) for k in layers}
    return {layer: factor * b @ a for layer, (a, b) in both.items()}


def read(parts, path, pipe=None):
    return deltas(lora_read.read(parts, path, pipe), parts.options["alpha"] / parts.options["rank"])


def drawn(layers, rank=4):
    """A and B for each layer of a network, {name: Linear}, and what B A adds."""
    g = torch.Generator().manual_seed(0)
    draw = {
        name: (
            torch.randn(rank, layer.in_features, generator=g),
            torch.randn(layer.out_features, rank, generator=g),
        )
        for name, layer in layers.items()
    }
    return draw, {name: b @ a for name, (a, b) in draw.items()}


def linears(network, targets):
    found = {k: m for k, m in network.named_modules() if isinstance(m, torch.nn.Linear)}
    return {k: m for k, m in found.items() if any(k.endswith(f".{t}") for t in targets)}


# ---------------------------------------------------------------------------
# layouts


def pair(key, a, b, down="lora_A", up="lora_B"):
    return {f"{key}.{down}.weight": a, f"{key}.{up}.weight": b}


def scaled(key, a, b):
    """With an alpha: 1.5 of the rank."""
    made = pair(key, a, b / 1.5, "lora_down", "lora_up")
    return made | {f"{key}.alpha": torch.tensor(1.5 * len(a))}


def kohya(prefix):
    return lambda name, a, b: scaled(f"{prefix}_{name.replace('.', '_')}", a, b)


def before(prefix, *halves):
    return lambda name, a, b: pair(f"{prefix}{name}", a, b, *halves)


def processors(name, a, b):
    head, _, last = name.removesuffix(".0").rpartition(".")
    key = f"unet.{head}.processor.{last}_lora"
    return {f"{key}.down.weight": a, f"{key}.up.weight": b}


def of_wan(name):
    """A layer as Wan's own code names it."""
    name = name.replace("attn1", "self_attn").replace("attn2", "cross_attn")
    name = name.replace("ffn.net.0.proj", "ffn.0").replace("ffn.net.2", "ffn.2")
    for ours, theirs in {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}.items():
        name = name.replace(f".{ours}", f".{theirs}")
    return name


def of_sgm(name):
    """A layer of SDXL as Stability's own code numbers it, with one layer a block."""
    numbers = {
        r"down_blocks\.(\d+)\.attentions\.(\d+)": lambda m: f"input_blocks.{2 * int(m[1]) + 1}.1",
        r"up_blocks\.(\d+)\.attentions\.(\d+)": (
            lambda m: f"output_blocks.{2 * int(m[1]) + int(m[2])}.1"
        ),
        r"mid_block\.attentions\.0": lambda m: "middle_block.1",
    }
    for pattern, number in numbers.items():
        name = re.sub(pattern, number, name)
    return name


LAYOUTS = {
    "kohya": ("sd15", ATTENTION, kohya("lora_unet")),
    "kohya, in sgm's numbers": (
        "sdxl",
        ATTENTION,
        lambda name, a, b: kohya("lora_unet")(of_sgm(name), a, b),
    ),
    "kohya, of a transformer": ("sd3", ATTENTION, kohya("lora_unet")),
    "kohya, of flux": (
        "flux",
        ["to_out.0"],
        lambda name, a, b: scaled(
            f"lora_unet_double_blocks_{name.split('.')[1]}_img_attn_proj", a, b
        ),
    ),
    "OneTrainer": ("sd3", ATTENTION, kohya("lora_transformer")),
    "LyCORIS": ("flux", ATTENTION, kohya("lycoris")),
    "peft": ("sd3", ATTENTION, before("base_model.model.")),
    "peft, unsaved": (
        "sd15",
        ATTENTION,
        before("base_model.model.", "lora_A.default", "lora_B.default"),
    ),
    "no prefix": ("flux", ATTENTION, before("")),
    "ComfyUI": ("qwenimage", ATTENTION, before("diffusion_model.")),
    "ComfyUI, of Wan": (
        "wan21",
        WAN,
        lambda name, a, b: pair(f"diffusion_model.{of_wan(name)}", a, b),
    ),
    "musubi, of Wan": ("wan21", WAN, lambda name, a, b: kohya("lora_unet")(of_wan(name), a, b)),
    "diffusers": ("sd15", ATTENTION, before("unet.", "lora.down", "lora.up")),
    "diffusers, oldest": ("sd15", ATTENTION, processors),
}


QUICK = ("kohya", "kohya, in sgm's numbers", "diffusers, oldest", "peft, unsaved")


def quickly(cases):
    return [c if c in QUICK else pytest.param(c, marks=pytest.mark.long) for c in cases]


@pytest.mark.parametrize("case", quickly(LAYOUTS))
def test_the_layouts_of_trainers_are_read(tmp_path, case, heard, caplog):
    name, targets, layout = LAYOUTS[case]
    pipe, parts = parts_of(name, targets=targets)
    (part,) = parts.modules
    draw, wanted = drawn(linears(getattr(pipe_of(name), part), targets))
    file = {}
    for layer, (a, b) in draw.items():
        file |= layout(layer, a, b)
    save_file({k: v.contiguous() for k, v in file.items()}, tmp_path / "style.safetensors")
    with caplog.at_level("INFO", logger="flowrl"):
        found = read(parts, tmp_path, pipe)
    assert f"is read: a LoRA of rank 4 on {len(wanted)} layers" in caplog.text
    assert found.keys() == {f"{part}.{layer}" for layer in wanted}
    for layer, delta in wanted.items():
        assert torch.allclose(found[f"{part}.{layer}"], delta, atol=1e-4), layer


def test_layers_of_text_encoders_are_read_in_old_and_in_trainers_names(tmp_path):
    """kohya's lora_te1_ and lora_te2_, diffusers' to_q_lora and lora_linear_layer, with text_model
    or without."""
    targets = [*ATTENTION, "q_proj", "fc1"]
    pipe, parts = parts_of("sdxl", "unet", "text_encoder", "text_encoder_2", targets=targets)
    source = pipe_of("sdxl")
    wanted, file = {}, {}
    for part, te in {"text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}.items():
        draw, deltas_of = drawn(linears(getattr(source, part), ["q_proj", "fc1"]))
        wanted |= {f"{part}.{name}": delta for name, delta in deltas_of.items()}
        for k, (name, (a, b)) in enumerate(draw.items()):
            plain = name.removeprefix("text_model.")
            old = plain.replace("q_proj", "to_q")
            file |= [
                scaled(f"{te}_text_model_{plain.replace('.', '_')}", a, b),
                pair(f"{part}.{plain}.lora_linear_layer", a, b, "down", "up"),
                {
                    f"{part}.text_model.{old}_lora.{k}.weight": v
                    for k, v in {"down": a, "up": b}.items()
                }
                if old != plain
                else pair(f"{part}.text_model.{plain}", a, b),
            ][k % 3]
    draw, of_unet = drawn(linears(source.unet, ["to_q"]))
    wanted |= {f"unet.{name}": delta for name, delta in of_unet.items()}
    for name, (a, b) in draw.items():
        file |= kohya("lora_unet")(of_sgm(name), a, b)
    save_file(file, tmp_path / "style.safetensors")
    found = read(parts, tmp_path / "style.safetensors", pipe)
    for layer, delta in wanted.items():
        assert torch.allclose(found[layer], delta, atol=1e-4), layer
    assert all(not found[layer].any() for layer in found.keys() - wanted.keys()), "they add nothing"


# ---------------------------------------------------------------------------
# peft's config


def peft_of(folder, **config):
    """Save peft's adapter of a network, not at its start -> what it adds to each layer."""
    torch.manual_seed(3)
    network = unet(16)
    config = {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION} | config
    model = get_peft_model(network, LoraConfig(init_lora_weights=False, **config))
    model.save_pretrained(folder)
    layers = {k: m for k, m in network.named_modules() if isinstance(m, BaseTunerLayer)}
    return {f"unet.{k}": m.get_delta_weight("default").detach() for k, m in layers.items()}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"alpha_pattern": {"attn1.to_q": 1, "to_v": 9.5}},
        {"rank_pattern": {"attn2.to_k": 2, "to_out.0": 1}},
        {"rank_pattern": {"to_q": 1}, "alpha_pattern": {"to_q": 3}, "use_rslora": True},
        {"target_modules": r".*mid_block.*\.to_q", "lora_dropout": 0.5},
        {"exclude_modules": ["to_k"], "fan_in_fan_out": True},
        {"layers_to_transform": [0], "layers_pattern": "transformer_blocks"},
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["beside", pytest.param("header", marks=pytest.mark.long)])
def test_what_pefts_config_makes_of_the_weights_is_done(tmp_path, config, where):
    wanted = peft_of(tmp_path, **config)
    if where == "header":  # as diffusers writes it, the component before each field
        told = json.loads((tmp_path / lora.BESIDE).read_text())
        (tmp_path / lora.BESIDE).unlink()
        header = {lora.METADATA: json.dumps({f"unet.{k}": v for k, v in told.items()})}
        save_file(load_file(tmp_path / FILE), tmp_path / FILE, header)
    pipe, parts = parts_of("sd15")
    found = read(parts, tmp_path, pipe)
    assert wanted and wanted.keys() <= found.keys()
    for layer, delta in found.items():
        expected = wanted.get(layer, torch.zeros_like(delta))
        assert torch.allclose(delta, expected, atol=1e-5), layer


@pytest.fixture(scope="module")
def saved_by_peft(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft")
    peft_of(folder)
    return folder


ODD = {
    "modules_to_save": ["conv_out"],
    "bias": "all",
    "init_lora_weights": "pissa_niter_4",
    "layer_replication": [[0, 2]],
    "target_parameters": ["weight"],
    "peft_type": "XLORA",
}


@pytest.mark.parametrize("field", sorted({f.name for f in fields(LoraConfig)} - {"runtime_config"}))
def test_every_field_of_pefts_config_is_followed_or_refused_by_name(saved_by_peft, field):
    """A field that peft adds later is refused, too."""
    folder, (pipe, parts) = saved_by_peft, parts_of("sd15")
    told = json.loads((folder / lora.BESIDE).read_text())
    harmless = field in lora_read.IDLE.split() and field not in ODD
    try:
        changed = told | {field: told[field] if harmless else ODD.get(field, True)}
        (folder / lora.BESIDE).write_text(json.dumps(changed))
        if harmless:
            read(parts, folder, pipe)
        else:
            with pytest.raises(ValueError, match=f"was trained with {field}=.*load_lora_weights"):
                read(parts, folder, pipe)
        (folder / lora.BESIDE).write_text(json.dumps(told | {"use_everything": 1}))
        with pytest.raises(ValueError, match="was trained with use_everything=1"):
            read(parts, folder, pipe)
    finally:
        (folder / lora.BESIDE).write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LoraConfig(use_dora=True, target_modules=["to_q"]), r"DoRA \(use_dora\)"),
        (LoraConfig(lora_bias=True, target_modules=["to_q"]), r"a bias of B \(lora_bias\)"),
        (LoHaConfig(target_modules=["to_q"]), "LoHa"),
        (LoKrConfig(target_modules=["to_q"], decompose_both=True), "LoKr"),
        (
            LoraConfig(target_modules=["conv_in", "to_q"]),
            "conv_in, a Conv2d: flowrl trains LoRA of Linear",
        ),
        (LoraConfig(target_modules=["to_q"], modules_to_save=["conv_out"]), "modules_to_save"),
    ],
    ids=lambda c: c if isinstance(c, str) else "",
)
@pytest.mark.parametrize("told", [True, False], ids=["config", "weights alone"])
def test_what_a_lora_on_linear_layers_cannot_do_is_named(tmp_path, config, said, told):
    get_peft_model(unet(16), config).save_pretrained(tmp_path)
    if not told:
        (tmp_path / lora.BESIDE).unlink()
    pipe, parts = parts_of("sd15")
    with pytest.raises(ValueError, match=said) as caught:
        read(parts, tmp_path, pipe)
    assert "where it stays on" in str(caught.value)


# ---------------------------------------------------------------------------
# what does not fit


def saved(folder, layout, name="sd15", part="unet", targets=("to_q",), rank=4):
    draw, _ = drawn(linears(getattr(pipe_of(name), part), targets), rank)
    file = {}
    for layer, (a, b) in draw.items():
        file |= layout(layer, a, b)
    save_file({k: v.contiguous() for k, v in file.items()}, folder / "style.safetensors")
    return folder / "style.safetensors"


PARTS = r"the text_encoder, which is not trained: set train.parts=\[denoiser, text_encoder\]"
WAY = "in another way, .*; if it was trained for this"
TO_Q, OF_SD3 = ("sd15", "unet", ["to_q"]), ("sd3", "transformer", ["to_q"])


@pytest.mark.parametrize(
    ("layout", "source", "said"),
    [
        (before("text_encoder."), ("sd15", "text_encoder", ["q_proj"]), PARTS),
        (kohya("lora_te"), ("sd15", "text_encoder", ["fc1"]), PARTS),
        (before("vae."), ("sd15", "vae", ["to_q"]), "the vae, which is not trained by flowrl"),
        (
            before("unet."),
            ("sd15", "unet", ["to_q", "net.2", "proj"]),
            r"no adapter here, .* first: set train.lora.targets=\[net.2, proj, to_q\]",
        ),
        (before("transformer."), OF_SD3, "another model: none has a name"),
        (before("unet."), ("sdxl", "unet", ["to_k"]), "another model: .* do not|model or size"),
        (kohya("lora_unet_joint"), OF_SD3, WAY),
        (before("odd."), OF_SD3, WAY),
    ],
)
def test_what_has_no_place_is_told_with_the_setting_that_gives_it_one(
    tmp_path, layout, source, said
):
    path = saved(tmp_path, layout, *source)
    pipe, parts = parts_of("sd15")
    with pytest.raises(ValueError, match=said) as caught:
        read(parts, path, pipe)
    assert str(path) in str(caught.value)


def test_a_converter_that_fails_is_quoted_and_no_other_model_is_spoken_of(tmp_path, monkeypatch):
    """Also where some of the layers are known as they stand."""
    pipe, parts = parts_of("sd15")
    file = load_file(saved(tmp_path, before("unet.")))
    file |= {f"odd.place.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}
    save_file(file, tmp_path / "mixed.safetensors")

    def failing(*weights, **how):
        raise KeyError("this layout")

    monkeypatch.setattr(type(pipe), "lora_state_dict", failing)
    with pytest.raises(ValueError, match="in another way, odd.place.*it fails with 'this layout'"):
        read(parts, tmp_path / "mixed.safetensors", pipe)


def test_a_damaged_or_strange_file_is_one_sentence(tmp_path):
    pipe, parts = parts_of("sd15")
    path = saved(tmp_path, before("unet."), rank=2)
    with pytest.raises(ValueError, match="rank=2, and this policy's adapters have rank=4.*rank=2"):
        read(parts, path, pipe)
    whole = load_file(saved(tmp_path, kohya("lora_unet")))
    up = next(key for key in whole if key.endswith("lora_up.weight"))
    for file, header, said in [
        ({k: v for k, v in whole.items() if k != up}, None, "A or B of .* alone"),
        ({"unet.conv_in.weight": torch.ones(2)}, None, "unet.conv_in.weight, which is no LoRA"),
        ({**whole, "note": torch.ones(1)}, None, "holds note, which is no LoRA"),
        (whole, {lora.METADATA: "[1]"}, r"the config of its adapter is \[1\]"),
        ({"<cat>": torch.ones(1, 4)}, None, "a textual inversion"),
    ]:
        save_file(file, path, header)
        with pytest.raises(ValueError, match=said):
            read(parts, path, pipe)
    (tmp_path / "style.bin").touch()
    for missing in (tmp_path / "style.bin", tmp_path / "nowhere", tmp_path / "x.safetensors"):
        with pytest.raises(ValueError, match="no LoRA file .*pickles"):
            read(parts, missing, pipe)
    save_file(whole, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="no LoRA file"):
        read(parts, tmp_path, pipe)


# ---------------------------------------------------------------------------
# what is written


@pytest.mark.parametrize("header", [pytest.param(True, marks=pytest.mark.long), False])
@pytest.mark.parametrize(
    "name", ["sd15", *(pytest.param(n, marks=pytest.mark.long) for n in ("sd3", "wan22"))]
)
def test_readers_with_and_without_the_header_agree(tmp_path, name, header):
    policy = tiny.policy(name, lora={"rank": 4, "alpha": 7})
    for weight in policy.trainable.named().values():
        weight.data = torch.randn(weight.shape)
    wanted = deltas(policy.state(), 7 / 4)
    policy.save_lora(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(str(file), "pt") as opened:
            told = json.loads(opened.metadata()[lora.METADATA])
        assert {v for k, v in told.items() if k.endswith((".r", ".lora_alpha"))} == {4}
        if not header:
            save_file(load_file(file), file)
    pipe = tiny.pipeline(name)
    pipe.load_lora_weights(str(tmp_path), adapter_name="a")
    if name == "wan22":
        pipe.load_lora_weights(
            str(tmp_path),
            adapter_name="a",
            weight_name="transformer_2_lora_weights.safetensors",
            load_into_transformer_2=True,
        )
    for key, delta in wanted.items():
        part, layer = key.split(".", 1)
        made = getattr(pipe, part).get_submodule(layer).get_delta_weight("a")
        assert torch.allclose(made, delta, atol=1e-4)
    other = tiny.policy(name, lora={"rank": 4, "alpha": 1})
    other.load_lora(tmp_path)
    for key, delta in deltas(other.state(), 1 / 4).items():
        assert torch.allclose(delta, wanted[key], atol=1e-4)
