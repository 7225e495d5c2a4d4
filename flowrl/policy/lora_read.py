"""Read a LoRA file, whoever trained it: the layers that it changes, and A and B of each.

Names are looked up unchanged, with any prefix and separator, then by the layouts of the model's
family, and then in the form that diffusers' own converter for the pipeline gives them. A file means
W + scale B A: the scale is multiplied into B, so that adapters of any alpha can hold it. A file
with anything that a LoRA on Linear layers cannot do is refused, with the name of that thing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flowrl.policy.weights.lora as lora
from flowrl.policy.text import text_encoders
from flowrl.policy.weights import layouts
from flowrl.policy.weights.layouts import PREFIXES, split, squashed
from flowrl.policy.weights.parts import TEXT, Place, TrainedParts, part_of
from flowrl.policy.weights.targets import ending, weighted
from flowrl.runtime.log import logger, quiet
from flowrl.runtime.store.side_files import shortened
from flowrl.runtime.text import printable

KINDS = {  # pattern of keys -> kind of file that a LoRA on Linear layers cannot express
    "dora_scale|lora_magnitude_vector": "DoRA (use_dora)",
    r"(hada|lokr|oft|boft|ia3)_": "LoHa, LoKr, OFT or IA3",
    r"lora_(B|up)\S*\.bias$": "a bias of B (lora_bias)",
    "lora_mid|lora_embedding": "lora_mid or lora_embedding",
    r"\.diff(_b)?$|_ip[._]|ip_adapter": "whole differences or an IP-Adapter",
    "string_to_param|emb_params|^clip_[lg]$|^<": "a textual inversion",
}
# Fields of peft's config without effect here: they choose layers, which the weights tell, act in
# training alone or on other layers than Linear ones, or are read by `_scale`. All other fields
# change the result.
IDLE = """task_type peft_type auto_mapping peft_version base_model_name_or_path revision r
    inference_mode target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out use_rslora
    init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_core
    loftq_config eva_config corda_config lora_ga_config runtime_config ensure_weight_tying
    qalora_group_size"""
PLAIN = {  # values with which B A is the whole difference; other inits change the base
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}
ONLY = (
    "flowrl trains LoRA of Linear layers, on the weights as they were loaded; merge it into the"
    " model, or load it into a live pipeline before (pipe.load_lora_weights), where it stays on"
)


def read(parts: TrainedParts, path: str | Path, pipe: Any = None) -> dict[str, Tensor]:
    """Return a state of the view "default" that has the effect of the LoRA in a folder or file;
    layers that it does not change, and ranks beyond those of a layer, add nothing."""
    own = parts.tensors("default")
    state = {k: v * 0 if ".lora_B." in k else v.clone() for k, v in own.items()}
    rank, factor = parts.options["rank"], parts.scale
    found = layers_of(path, parts.modules, pipe)
    _check_places(found, parts, state, path, pipe)
    widest = max(len(a) for a, _ in found.values())
    if widest != rank:
        raise ValueError(
            f"{path} was trained with rank={widest}, and this policy's adapters have rank={rank};"
            f" set train.lora.rank={widest}, or load_policy(lora={{'rank': {widest}}})"
        )
    for (part, layer), (new_a, new_b) in found.items():
        a, b = (state[f"{part}.{layer}.lora_{half}.weight"] for half in "AB")
        if (new_a.shape[1], len(new_b)) != (a.shape[1], len(b)):
            raise ValueError(
                f"{path} holds weights that belong to another model or size: {part}.{layer} is"
                f" {len(new_b)} x {new_a.shape[1]} there and {len(b)} x {a.shape[1]} here"
            )
        a[: len(new_a)], b[:, : len(new_a)] = new_a, new_b / factor
    logger.info(f"{path} is read: a LoRA of rank {widest} on {len(found)} layers")
    return state


def fitting(
    pipe: Any, denoisers: Mapping[str, nn.Module], path: Path
) -> tuple[dict[str, Any], list[str]]:
    """Return arguments of load_policy for adapters that a file fits: lora and parts."""
    found = layers_of(path, denoisers, pipe)
    rank = max(len(a) for a, _ in found.values())
    own = {"rank": rank, "alpha": rank, "targets": sorted({name for _, name in found})}
    return own, sorted({part_of(part) for part, _ in found})


def layers_of(
    path: str | Path, modules: Mapping[str, nn.Module], pipe: Any = None
) -> dict[Place, tuple[Tensor, Tensor]]:
    """Return A (r, in) and B (out, r), with the scale, of each layer that a folder or file changes.
    modules: networks that have files; other components of the pipeline are known as well."""
    out: dict[Place, tuple[Tensor, Tensor]] = {}
    names = lora.files_of(pipe, modules)
    components = {**getattr(pipe, "components", {}), **dict.fromkeys(names)}
    others = {part: m for part, m in components.items() if isinstance(m, nn.Module)}
    for name in dict.fromkeys(names.values()):
        file = lora.found(Path(path), name)
        networks = {part: modules[part] for part in names if names[part] == name} | others
        raw, configs = lora.opened(file)
        _check(file, raw, configs)
        places = _places(networks, names)
        # layer -> its A, B and perhaps alpha, whose keys may lie anywhere in the file
        halves: dict[Place, dict[str, Tensor]] = {}
        for key, tensor in _placeable(file, raw, places, pipe).items():
            layer, half = split(key)
            halves.setdefault(places[squashed(layer)], {})[half] = tensor.float()
        for (part, layer), own in halves.items():
            if not {"A", "B"} <= own.keys():
                raise ValueError(f"{file} has A or B of {layer} alone; copy or export it again")
            module = networks[part].get_submodule(layer)
            module = module.get_base_layer() if hasattr(module, "get_base_layer") else module
            if not isinstance(module, nn.Linear):
                raise ValueError(f"{file} changes {layer}, a {type(module).__name__}: {ONLY}")
            a, b = own["A"].flatten(1), own["B"].flatten(1)
            named = (part, lora.slot_of(part), "module", "")
            config = next((configs[before] for before in named if before in configs), {})
            out[part, layer] = a, b * _scale(layer, len(a), config, own.get("alpha"))
    return out


def _scale(layer: str, rank: int, config: Mapping[str, Any], alpha: Tensor | None) -> float:
    """Return the factor of B A of a layer: alpha / rank, and 1 without an alpha, the same as in
    diffusers. An alpha in the weights holds for its layer alone."""
    from peft.utils.other import get_pattern_key

    if alpha is not None:
        return alpha.item() / rank
    pattern = config.get("alpha_pattern") or {}
    own = pattern.get(get_pattern_key(pattern, layer), config.get("lora_alpha"))
    over = math.sqrt(rank) if config.get("use_rslora") else rank
    return 1.0 if own is None else float(own) / over


def _check(file: Path, raw: Iterable[str], configs: Mapping[str, Mapping[str, Any]]) -> None:
    """ValueError for a file that is not a LoRA of Linear layers, judged by its keys, or by a field
    of its config that changes the result and is not followed."""
    for pattern, kind in KINDS.items():
        if key := next((key for key in raw if re.search(pattern, key)), None):
            raise ValueError(f"{file} holds {kind}, as {printable(key, 80)}: {ONLY}")
    for name, value in (field for config in configs.values() for field in config.items()):
        plain = value in PLAIN[name] if name in PLAIN else name in IDLE.split() or not value
        if value is not None and not plain:
            raise ValueError(f"{file} was trained with {name}={shortened(value)}: {ONLY}")


# ---------------------------------------------------------------------------
# names


def _places(networks: Mapping[str, nn.Module], denoisers: Collection[str]) -> dict[str, Place]:
    """Return the layers that names in files may mean: with every prefix of a component, and by the
    names of older layouts."""
    out: dict[str, Place] = {}
    for part, network in networks.items():
        before = [part]
        if part.startswith(TEXT):
            number = part.removeprefix("text_encoder_") if part != "text_encoder" else "1"
            before += [f"lora_te{number}", *["lora_te", "base_model_model"] * (number == "1")]
        elif part in denoisers or _denoises(part):
            before += [lora.slot_of(part), *PREFIXES]
        for name, _ in weighted(network):
            alike = {name, re.sub(r"\bto_out\.0$", "to_out", name)}
            if part.startswith(TEXT):
                plain = name.removeprefix("text_model.")
                alike = {plain, re.sub(r"\b(q|k|v|out)_proj$", r"to_\1", plain)}
                alike |= {f"text_model.{other}" for other in alike}
            for start in before:
                for other in alike:
                    out.setdefault(squashed(f"{start}_{other}" if start else other), (part, name))
    return out


def _placeable(
    file: Path, raw: dict[str, Tensor], places: Mapping[str, Place], pipe: Any
) -> dict[str, Tensor]:
    """Return the weights of a file under names that are known here: their own, those of the
    family's layouts, or those that diffusers' converter gives them."""
    parts = getattr(pipe, "components", {})
    family = layouts.family_of({name: type(part).__name__ for name, part in parts.items()})
    if family and _lost(raw, places):
        layers = [place for place in dict.fromkeys(places.values()) if _denoises(place[0])]
        raw = layouts.in_our_names(raw, family, layers)
    lost, why = _lost(raw, places), ""
    if lost and hasattr(pipe, "lora_state_dict"):
        config = getattr(getattr(pipe, "unet", None), "config", None)
        unknown = {key: raw[key] for key in lost}
        try:
            with quiet():
                made = type(pipe).lora_state_dict(unknown, unet_config=config, return_alphas=True)
        except Exception as error:  # each of diffusers' converters raises errors of its own
            why = f" (it fails with {printable(error, 120)})"
        else:
            weights, alphas = made if isinstance(made, tuple) else (made, None)
            for key, alpha in (alphas or {}).items():
                weights[f"{key.removesuffix('.alpha')}.alpha"] = torch.as_tensor(alpha)
            if weights and len(left := _lost(weights, places)) < len(lost):
                known = {key: raw[key] for key in raw if key not in lost}
                raw, lost = known | weights, left
    if lost:
        raise ValueError(f"{file} {_wrong(raw, lost, why, pipe)}")
    return raw


def _denoises(part: str) -> bool:
    return lora.slot_of(part) in lora.SLOTS


def _lost(raw: Mapping[str, Tensor], places: Mapping[str, Place]) -> list[str]:
    """List keys whose layer is not known."""
    return [key for key in raw if squashed(split(key)[0]) not in places]


def _wrong(raw: Mapping[str, Tensor], lost: list[str], why: str, pipe: Any) -> str:
    """Say what is wrong with a file some of whose keys are not known. why: the error of diffusers'
    converter, if it failed."""
    first, some = printable(lost[0], 80), len(lost) < len(raw)
    if odd := [key for key in lost if not split(key)[0]]:
        return f"holds {printable(odd[0], 80)}, which is no LoRA (modules_to_save?): {ONLY}"
    if re.match(r"(unet|transformer|text_encoder|prior)\w*\.", lost[0]) or (some and not why):
        none = f"{len(lost)} of {len(raw)} do not have" if some else "none has"
        return (
            f"holds weights that belong to another model: {none} a name that"
            f" {type(pipe).__name__} knows, {first} first"
        )
    return (
        f"names its layers in another way, {first} first, which diffusers' converter for"
        f" {type(pipe).__name__} does not know either{why}; if it was trained for this model, give"
        " its keys diffusers' names (transformer.<layer>.lora_A.weight)"
    )


def _check_places(
    found: Iterable[Place],
    parts: TrainedParts,
    state: Mapping[str, Tensor],
    path: str | Path,
    pipe: Any,
) -> None:
    """ValueError if layers of a file have no adapter here; it names the setting that adds one."""
    places = list(found)
    for part in (part for part, _ in places if part not in parts.modules):
        known = text_encoders(pipe) if part.startswith(TEXT) else lora.SLOTS
        wanted = ", ".join(sorted({*parts.part_names, part_of(part)}))
        fix = f": set train.parts=[{wanted}] (load_policy(parts=[...]))"
        if lora.slot_of(part) not in known:
            fix = f" by flowrl: {ONLY}"
        raise ValueError(f"{path} changes layers of the {part}, which is not trained{fix}")
    bare = [name for part, name in places if f"{part}.{name}.lora_A.weight" not in state]
    if bare:
        endings = ", ".join(sorted({ending(name) for _, name in places}))
        raise ValueError(
            f"{path} changes {len(bare)} layers that have no adapter here, {bare[0]} first: set"
            f" train.lora.targets=[{endings}] (load_policy(lora={{'targets': [...]}}))"
        )
