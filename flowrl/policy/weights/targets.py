"""Choose the layers of a network that get LoRA, and their options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from flowrl.runtime.registry import did_you_mean

DEFAULTS = {"rank": 32, "alpha": 64, "targets": None, "init": "gaussian", "peft": {}}
ATTENTION = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
)
TEXT_ATTENTION = (  # names in CLIP, T5, and language models
    *("q_proj", "k_proj", "v_proj", "out_proj", "o_proj"),
    *("SelfAttention.q", "SelfAttention.k", "SelfAttention.v", "SelfAttention.o"),
)


def targets_of(modules: Mapping[str, nn.Module], wanted: list[str] | None) -> dict[str, list[str]]:
    """Return the full names of the Linear layers that get LoRA, by component: those whose name ends
    in `wanted`; by default attention projections, or else every Linear."""
    linear = {
        part: [name for name, layer in weighted(module) if isinstance(layer, nn.Linear)]
        for part, module in modules.items()
    }
    every = [layer for layers in linear.values() for layer in layers]
    kinds = " and ".join(type(module).__name__ for module in modules.values())
    for name in wanted or ():
        if not any(_ends(layer, name) for layer in every):
            raise ValueError(
                f'lora targets: no Linear layer of {kinds} ends in "{name}"'
                f"{did_you_mean(name, {ending(layer) for layer in every})}"
            )
    out = {}
    for part, layers in linear.items():
        usual = TEXT_ATTENTION if part.startswith("text_encoder") else ATTENTION
        out[part] = [name for name in layers if any(_ends(name, w) for w in wanted or usual)]
        if wanted and not out[part]:
            raise ValueError(
                f"lora targets: {part} has no Linear layer that ends in one of"
                f" {', '.join(wanted)}; add an ending of its own, or leave targets out"
            )
        out[part] = out[part] or layers
    return out


def weighted(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield layers that have a weight, by name; for a layer with adapters, the layer below."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    below = "\n"
    for name, layer in module.named_modules():
        if name.startswith(below):
            continue
        if isinstance(layer, BaseTunerLayer):
            below, layer = f"{name}.", layer.get_base_layer()
        if isinstance(getattr(layer, "weight", None), Tensor):
            yield name, layer


def _ends(layer: str, name: str) -> bool:
    return layer == name or layer.endswith("." + name)


def ending(layer: str) -> str:
    """Return the last part of a name that is not a number, and what follows: "to_q", "to_out.0"."""
    parts = layer.split(".")
    last = max((k for k, part in enumerate(parts) if not part.isdigit()), default=0)
    return ".".join(parts[last:])


def options_of(lora: Mapping[str, Any]) -> dict[str, Any]:
    """Return lora with its defaults filled in; ValueError if an option is unknown or of another
    type."""
    own = {**DEFAULTS, **lora}
    unknown = sorted(set(own) - set(DEFAULTS))
    if unknown:
        raise ValueError(f"lora={{...}} takes {', '.join(DEFAULTS)}, not {unknown[0]!r}")
    wanted = own["targets"]
    for name in ("rank", "alpha"):
        number = isinstance(own[name], int | float) and not isinstance(own[name], bool)
        if not number or own[name] <= 0 or (name == "rank" and own[name] != int(own[name])):
            raise ValueError(f"lora={{...}}: {name}={own[name]!r} should be a number above 0")
    if wanted is not None and (isinstance(wanted, str) or not wanted):
        raise ValueError(
            f"lora={{...}}: targets={wanted!r} should be a list of names, such as ['to_q', 'to_v']"
        )
    return own
