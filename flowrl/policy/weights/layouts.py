"""Layouts of LoRA files: the names that other programs give to the layers of a model.

layouts.yaml holds one entry a family of models. Both directions go through it: `written` gives
foreign keys to a LoRA in diffusers' names, `in_our_names` takes foreign keys back. Where a model's
own code has one layer for several of diffusers (q, k and v), their LoRA is one of the sum of ranks,
whose B is zero outside of each layer's own rows and ranks, so that nothing is rounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

import torch
import yaml
from torch import Tensor

HALF = re.compile(
    r"(.+?)\.(?:(lora_A|lora_down|lora\.down|lora_linear_layer\.down)"
    r"|lora_B|lora_up|lora\.up|lora_linear_layer\.up)(?:\.default)?\.weight"
)
# an example: attn1.processor.to_q_lora.up
OLDEST = re.compile(r"(?:\.processor)?\.(\w+)_lora\.(up|down)\.")
PREFIXES = ("", "lora_unet", "lora_transformer", "lycoris", "diffusion_model", "base_model_model")


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """Where a layer of diffusers is in the model's own code: a layer there, or some of its rows."""

    name: str  # name of the layer there
    low: int = 0  # first row, in units of 1/whole of all rows
    high: int = 1  # row after the last, in the same units
    whole: int = 1  # units that the layer has


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models whose layers have the same names."""

    name: str  # plain name, as "FLUX.1"
    components: dict[str, str | list[str]]  # component of the pipeline -> class, or classes
    source: str  # where the keys were looked up
    comfyui: str = ""  # key of a layer in ComfyUI's layout; "": no key is known
    kohya: str = ""  # key of a layer in kohya's layout; "": no key is known
    text: dict[str, str] = field(default_factory=dict)  # text encoder -> how its keys begin
    native: dict[str, str] = field(default_factory=dict)  # name in diffusers -> the model's own

    def place(self, layer: str) -> NativeLayer | None:
        """Return the layer's place in the model's own code; None: it has no name there."""
        for ours, theirs in self.native.items():
            if found := _pattern(ours).fullmatch(layer):
                name, _, rows = theirs.partition(" ")
                groups = iter(found.groups())
                name = re.sub(r"\*+", lambda _: next(groups), name)  # noqa: B023
                return NativeLayer(name, *map(int, re.findall(r"\d+", rows)))
        return None


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*\*", "(.+)").replace(r"\*", r"(\d+)"))


@cache
def families() -> tuple[Family, ...]:
    """Return the families of layouts.yaml, in its order."""
    text = (resources.files(__package__) / "layouts.yaml").read_text(encoding="utf-8")
    return tuple(Family(name=name, **entry) for name, entry in yaml.safe_load(text).items())


def family_of(components: Mapping[str, str]) -> Family | None:
    """Find the family of a pipeline. components: name -> class, of those that are there."""
    for family in families():
        if all(
            components.get(part) in ([kinds] if isinstance(kinds, str) else kinds)
            for part, kinds in family.components.items()
        ):
            return family
    return None


# ---------------------------------------------------------------------------
# keys


def squashed(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def split(key: str) -> tuple[str, str]:
    """Split a key of a file -> (the layer that it names, "A", "B" or "alpha"); ("", "") for a key
    of another kind."""
    whole = OLDEST.sub(r".\1.lora.\2.", key.replace(".processor.", "."))
    alone = whole.removesuffix(".alpha")
    found = HALF.fullmatch(alone)
    if alone != whole:
        return found[1] if found else alone, "alpha"
    return (found[1], "A" if found[2] else "B") if found else ("", "")


def halves_of(weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group the weights of a file by layer: layer -> "A", "B" or "alpha" -> tensor."""
    out: dict[str, dict[str, Tensor]] = {}
    for key, tensor in weights.items():
        layer, half = split(key)
        out.setdefault(layer, {})[half] = tensor
    return out


# ---------------------------------------------------------------------------
# to a foreign layout


def written(weights: Mapping[str, Tensor], family: Family, layout: str) -> dict[str, Tensor]:
    """Return a LoRA in the keys of a layout, "comfyui" or "kohya". weights: in diffusers' keys,
    without alpha, which means alpha = rank. A layer without a key there -> ValueError."""
    groups: dict[str, dict[NativeLayer, dict[str, Tensor]]] = {}
    for name, halves in halves_of(weights).items():
        key, place = _key(name, family, layout)
        groups.setdefault(key, {})[place] = halves
    out: dict[str, Tensor] = {}
    for key, parts in groups.items():
        a, b = _joined(parts)
        if key.startswith("lora_"):
            out |= {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b}
            out[f"{key}.alpha"] = a.new_tensor(float(len(a)))
        else:
            out |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    return out


def _key(name: str, family: Family, layout: str) -> tuple[str, NativeLayer]:
    """Return the key of a layer "component.layer", and its place there."""
    form, (part, _, layer) = getattr(family, layout), name.partition(".")
    place: NativeLayer | None = NativeLayer(layer)
    if part.startswith("text_encoder"):
        form = f"{family.text.get(part)}_" if form.startswith("lora_") else f"{part}."
        layer = f"text_model.{layer.removeprefix('text_model.')}"
        place = NativeLayer(layer) if part in family.text else None
    elif "<native>" in form:
        place = family.place(layer)
    if place is None:
        raise ValueError(
            f"the LoRA changes {name}, which has no key in the {layout} layout of {family.name};"
            " use --format diffusers or merged"
        )
    key = f"{form.partition('<')[0]}{place.name}"
    return key.replace(".", "_") if key.startswith("lora_") else key, place


def _joined(parts: Mapping[NativeLayer, Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return A and B of a layer that holds those of several side by side."""
    ordered = sorted(parts, key=lambda place: place.low)
    if ordered[0].whole == 1:
        return parts[ordered[0]]["A"], parts[ordered[0]]["B"]
    a = torch.cat([parts[place]["A"] for place in ordered])
    first = parts[ordered[0]]["B"]
    unit = len(first) // (ordered[0].high - ordered[0].low)
    b, column = first.new_zeros(unit * ordered[0].whole, len(a)), 0
    for place in ordered:
        own = parts[place]["B"]
        b[unit * place.low : unit * place.high, column : column + own.shape[1]] = own
        column += own.shape[1]
    return a, b


# ---------------------------------------------------------------------------
# from a foreign layout


def in_our_names(
    raw: Mapping[str, Tensor], family: Family, layers: Iterable[tuple[str, str]]
) -> dict[str, Tensor]:
    """Give the weights of a file that bear a model's own names those of diffusers, with the scale
    in B; other weights stay as they are. layers: (component, layer) of the model."""
    known: dict[str, dict[NativeLayer, str]] = {}
    for part, layer in layers:
        if place := family.place(layer):
            for start in PREFIXES:
                key = squashed(f"{start}.{place.name}" if start else place.name)
                known.setdefault(key, {}).setdefault(place, f"{part}.{layer}")
    out = {key: t for key, t in raw.items() if squashed(split(key)[0]) not in known}
    mapped = {key: t for key, t in raw.items() if key not in out}
    for name, halves in halves_of(mapped).items():
        for place, layer in known[squashed(name)].items():
            for half, tensor in _part_of(place, halves).items():
                out[f"{layer}.lora_{half}.weight"] = tensor
    return out


def _part_of(place: NativeLayer, halves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return A and B of one of the layers that a larger one holds; {}: nothing is added to it. A
    file that lacks a half lacks it here, too."""
    if not {"A", "B"} <= halves.keys():
        return {half: tensor for half, tensor in halves.items() if half in "AB"}
    a, b = halves["A"].flatten(1), halves["B"].flatten(1).float()
    if "alpha" in halves:
        b = b * (halves["alpha"].item() / len(a))
    if place.whole == 1:
        return {"A": a, "B": b}
    b = b[len(b) * place.low // place.whole : len(b) * place.high // place.whole]
    used = b.any(0)  # ranks that belong to other layers are zero here
    return {"A": a[used], "B": b[:, used]} if used.any() else {}
