"""Which layouts of LoRA files `flowrl export` writes, and who reads them back to the bit.

    python scripts/bench/exports.py [--lycoris] [--page]

A LoRA is drawn on a tiny pipeline of each family of flowrl/policy/weights/layouts.yaml
(tests/helpers/zoo), exported in each layout, and read by diffusers' own importer
(`lora_state_dict`) and by flowrl. A row says "equal" where every A and B comes back to the bit,
ranks that add nothing left out, and "by source, not run" where diffusers does not import that
layout; an importer that returns something else ends the command with exit code 1. Fused layers of
FLUX.1, HunyuanVideo and Lumina 2 are drawn at their real width, which diffusers' importer takes for
granted. --lycoris: the kohya file of SD1.5 is merged by lycoris-lora, if it is installed, and
compared with base + B A. --page writes the table into docs/export.md.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flowrl.cli.common import echo
from flowrl.policy import lora_read
from flowrl.policy.weights.layouts import Family, families, family_of, halves_of, split, written
from flowrl.runtime.log import quiet

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from zoo import cases  # noqa: E402

PAGE, MARK = ROOT / "docs/export.md", "<!-- table of scripts/bench/exports.py -->"
CASES = {  # family -> case of the zoo
    "SDXL": "sdxl",
    "SD1.5": "sd15",
    "SD3 and SD3.5": "sd3",
    "FLUX.1": "flux",
    "FLUX.2": "flux2",
    "Qwen-Image": "qwenimage",
    "Z-Image": "z_image",
    "Lumina 2": "lumina2",
    "Wan 2.1 and 2.2": "wan21",
    "LTX-Video": "ltx",
    "LTX-2": "ltx2",
    "HunyuanVideo": "hyvideo",
    "HiDream-I1": "hidream",
    "PixArt": "pixart_sigma",
    "AuraFlow": "auraflow",
}
# layouts that no importer of diffusers reads
NOT_IMPORTED = {("SD3 and SD3.5", "kohya"), ("HunyuanVideo", "kohya"), ("PixArt", "comfyui")}
# parts of a fused layer -> rows of one part
ROWS = {7: 3072, 5: 768}
LAYERS = (
    r"\bto_(q|k|v|out\.0|add_out)$|add_[qkv]_proj$|\bff|ffn|linear_(in|out)|proj_(mlp|out)$"
    r"|\bfeed_forward\.linear|norm1\.linear$"
)
Halves = dict[str, dict[str, Tensor]]


def sdxl_unet() -> nn.Module:
    """A tiny UNet with SDXL's numbers of blocks, which its names in kohya's layout count."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        block_out_channels=(32, 32, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2,
        transformer_layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
        use_linear_projection=True,
    )


@functools.cache
def pipeline(family: str) -> Any:
    with quiet():
        pipe = cases()[CASES[family]].make()
    if family == "SDXL":
        pipe.register_modules(unet=sdxl_unet())
    return pipe


def denoiser(pipe: Any) -> tuple[str, nn.Module]:
    name = "unet" if hasattr(pipe, "unet") else "transformer"
    return name, getattr(pipe, name)


def drawn(family: Family, rank: int = 4) -> dict[str, Tensor]:
    """A LoRA on all layers that attend or feed forward and have a key in the family's layouts."""
    part, network = denoiser(pipeline(family.name))
    generator, out = torch.Generator().manual_seed(0), {}
    for name, layer in network.named_modules():
        if not isinstance(layer, nn.Linear) or not re.search(LAYERS, name):
            continue
        place = family.place(name)
        if family.native and place is None:
            continue
        rows = layer.out_features
        # linear1 of a single block: q, k, v, and 4 times as much; or q of 24 heads, k and v of 8
        if place and place.whole in ROWS:
            rows = ROWS[place.whole] * (place.high - place.low)
        out[f"{part}.{name}.lora_A.weight"] = torch.randn(
            rank, layer.in_features, generator=generator
        )
        out[f"{part}.{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    return out


def plain(found: Mapping[str, Mapping[str, Tensor]]) -> Halves:
    """A and B of each layer, without ranks that add nothing."""
    out: Halves = {}
    for layer, halves in found.items():
        a, b = halves["A"].flatten(1), halves["B"].flatten(1)
        used = b.any(0)
        out[re.sub(r"\bto_out$", "to_out.0", layer)] = {"A": a[used], "B": b[:, used]}
    return out


def same(one: Halves, other: Halves) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[layer][half], other[layer][half]) for layer in one for half in "AB"
    )


def importer(family: Family, file: Path) -> Halves:
    """The file as diffusers' importer of the pipeline gives it, the scale of its alphas in B."""
    pipe = pipeline(family.name)
    config = getattr(getattr(pipe, "unet", None), "config", None)
    with quiet():
        read = type(pipe).lora_state_dict(str(file), unet_config=config, return_alphas=True)
    weights, alphas = read if isinstance(read, tuple) else (read, None)
    halves = halves_of(weights)
    for key, alpha in (alphas or {}).items():
        own = halves[split(key)[0]]
        own["B"] = own["B"] * (float(alpha) / len(own["A"]))
    return plain(halves)


def imported(family: Family, file: Path, wanted: Halves) -> bool:
    """Whether diffusers' importer gives the weights, where it may not know the layout."""
    try:
        return same(importer(family, file), wanted)
    except (AttributeError, KeyError, RuntimeError, ValueError):
        return False


def own_reader(family: Family, file: Path) -> Halves:
    """The file as flowrl reads it."""
    pipe = pipeline(family.name)
    part, network = denoiser(pipe)
    found = lora_read.layers_of(file, {part: network}, pipe)
    return plain({f"{p}.{name}": {"A": a, "B": b} for (p, name), (a, b) in found.items()})


def proof(family: Family, layout: str) -> str:
    """What a layout's row says; AssertionError where a reader returns other weights."""
    if not getattr(family, layout):
        return "no layout known"
    weights = drawn(family)
    wanted = plain(halves_of(weights))
    assert (
        wanted
        and family_of(
            {name: type(m).__name__ for name, m in pipeline(family.name).components.items()}
        )
        is family
    ), family.name
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.safetensors"
        made = written(weights, family, layout)
        save_file({k: v.contiguous() for k, v in made.items()}, file)
        assert same(own_reader(family, file), wanted), f"flowrl reads {family.name}, {layout}"
        if (family.name, layout) in NOT_IMPORTED:
            assert not imported(family, file, wanted), (
                f"diffusers reads {family.name}, {layout}, now"
            )
            return "by source, not run"
        assert same(importer(family, file), wanted), f"diffusers reads {family.name}, {layout}"
    return "equal"


def lycoris() -> float:
    """Largest difference between lycoris-lora's merged SD1.5 and base + B A, of all layers."""
    from lycoris.kohya import LycorisNetworkKohya, create_network_from_weights

    family = next(f for f in families() if f.name == "SD1.5")
    part, network = denoiser(pipeline("SD1.5"))
    weights = drawn(family)
    layers = dict(network.named_modules())
    wanted = {
        name.removeprefix(f"{part}."): layers[name.removeprefix(f"{part}.")].weight.detach()
        + halves["B"] @ halves["A"]
        for name, halves in halves_of(weights).items()
    }
    file = written(weights, family, "kohya")
    # its usual targets name some layers twice in a network of diffusers
    LycorisNetworkKohya.apply_preset(
        {"unet_target_name": [], "unet_target_module": ["Transformer2DModel"]}
    )
    made, _ = create_network_from_weights(1.0, None, None, [], network, weights_sd=dict(file))
    made.merge_to([], network, file, torch.float32, "cpu")
    return max(float((layers[name].weight - w).abs().max()) for name, w in wanted.items())


def table() -> str:
    lines = [
        "| family | ComfyUI: key | read by diffusers | kohya: key | read by diffusers | source |",
        "|---|---|---|---|---|---|",
    ]
    for family in families():
        cells = [family.name]
        for layout in ("comfyui", "kohya"):
            key = getattr(family, layout)
            cells += [f"`{key}`" if key else "-", proof(family, layout) if key else "-"]
        lines.append(f"| {' | '.join([*cells, family.source])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lycoris", action="store_true", help="ask lycoris-lora, too")
    parser.add_argument("--page", action="store_true", help="write the table into docs/export.md")
    args = parser.parse_args()
    try:
        found = table()
    except AssertionError as error:
        sys.exit(f"not equal: {error}")
    echo(found)
    if args.lycoris:
        echo(f"lycoris-lora, SD1.5: largest difference {lycoris():.2g}")
    if args.page:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
        after = rest.partition(MARK)[2]
        PAGE.write_text(f"{before}{MARK}\n\n{found}\n\n{MARK}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
