"""The weights of a run, written as LoRA files of a layout or as a whole pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

import flowrl.policy.weights.lora as lora
from flowrl.config.build import DTYPES, trained
from flowrl.export import card
from flowrl.export.words import Order
from flowrl.policy import Policy
from flowrl.policy.weights import layouts
from flowrl.policy.weights.layouts import Family
from flowrl.runtime.log import logger
from flowrl.runtime.store import checkpoint, files
from flowrl.training.budget import architecture


def export(order: Order) -> list[Path]:
    """Write what is asked for, and a model card -> the files of weights, or the folder of the
    pipeline."""
    if "initial_noise" in order.cfg.train.parts:
        logger.warning("the trained initial noise (dsrl) is left out: no other program reads it")
    folder = order.output.parent if order.file else order.output
    if order.form == "merged":
        with files.replacing_folder(folder) as place:
            policy, pipe = _policy(order)
            pipe.save_pretrained(place)
        written, kinds = [folder], kinds_of(pipe)
    else:
        written, kinds = _write_lora(order, folder)
    text = card.render(order, kinds, [path.name for path in written])
    files.write(order.output.with_suffix(".md") if order.file else folder / "README.md", text)
    return written


def kinds_of(pipe: Any) -> dict[str, str]:
    """Return the class of each part of a pipeline, that of the pipeline as "", and that of the
    blocks of a modular one as "blocks"."""
    parts = {name: type(part).__name__ for name, part in pipe.components.items()}
    blocks = {"blocks": type(pipe.blocks).__name__} if hasattr(pipe, "blocks") else {}
    return {"": type(pipe).__name__, **blocks, **parts}


def _kinds(source: str) -> dict[str, str] | None:
    """Return `kinds_of` by a model's config files; None where only the pipeline itself knows."""
    try:
        read = architecture.read(source)
    except ValueError:
        return None
    parts = {name: str(config["_class_name"]) for name, config in read.parts.items()}
    blocks = read.settings.get("_blocks_class_name")
    return {"": read.pipeline, **({"blocks": blocks} if blocks else {}), **parts}


def layout(kinds: Mapping[str, str], form: str) -> Family | None:
    """Return the family whose keys a format needs; None: diffusers' own. ValueError where no keys
    of the format are known."""
    if form not in ("comfyui", "kohya"):
        return None
    family = layouts.family_of(kinds)
    if family is None or not getattr(family, form):
        what = family.name if family else kinds.get("", "this pipeline")
        raise ValueError(
            f"no {form} layout of {what} is known; use --format diffusers, or --format merged"
        )
    return family


def _write_lora(order: Order, folder: Path) -> tuple[list[Path], dict[str, str]]:
    kinds, source = _kinds(order.cfg.model.source), order.source
    with TemporaryDirectory() as scratch:
        if kinds is not None:
            _check_readable(order, kinds)  # before the model is loaded, which takes minutes
        if kinds is None or _is_step(source):
            policy, pipe = _policy(order)
            kinds = kinds_of(pipe)
            _check_readable(order, kinds)
            source = policy.save_lora(scratch).parent if _is_step(source) else source
        made = {path.name: _converted(path, order, kinds) for path in source.glob("*.safetensors")}
    if order.file and len(made) > 1:
        raise ValueError(
            f"the LoRA of two networks is two files ({', '.join(made)}); give --output a folder"
        )
    own = lora.FILE if order.form == "diffusers" else f"{order.run.resolve().name}.safetensors"
    places = {
        name: order.output if order.file else folder / name.replace(lora.FILE, own)
        for name in sorted(made)
    }
    return [lora.write(place, made[name]) for name, place in places.items()], kinds


def _converted(path: Path, order: Order, kinds: Mapping[str, str]) -> bytes:
    """Return the bytes of a file of the run's LoRA in the layout and type that are asked for."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save

    weights: dict[str, Tensor] = load_file(str(path))
    with safe_open(str(path), "pt") as content:
        header = content.metadata() or {}
    if family := layout(kinds, order.form):
        weights, header = layouts.written(weights, family, order.form), {}
    if order.dtype:
        to = DTYPES[order.dtype]
        weights = {key: t if key.endswith(".alpha") else t.to(to) for key, t in weights.items()}
    return save({key: t.contiguous() for key, t in weights.items()}, metadata=header or None)


def _check_readable(order: Order, kinds: Mapping[str, str]) -> None:
    """ValueError where a format has no place for what the run trained."""
    import diffusers

    layout(kinds, order.form)
    pipeline = getattr(diffusers, kinds.get("", ""), None)
    if order.form != "diffusers" or pipeline is None:
        return
    places = lora.placed_in(pipeline)
    if not places:
        raise ValueError(
            f"diffusers' {kinds['']} reads no LoRA files; use --format merged, or flowrl generate"
        )
    if "text_encoder" in order.cfg.train.parts and not any(p.startswith("text") for p in places):
        raise ValueError(
            f"the run trained the text encoder, whose LoRA diffusers' {kinds['']} does not read;"
            " use --format merged"
        )


def _is_step(source: Path) -> bool:
    return (source / checkpoint.META).is_file()


def _policy(order: Order) -> tuple[Policy, Any]:
    """Load the policy with the weights that are asked for, and its pipeline."""
    saved, step = None, order.source
    if _is_step(step):
        tensors, meta = checkpoint.load(step)
        saved = checkpoint.Checkpoint(folder=step, tensors=tensors, meta=meta, damaged={})
    changes: dict[str, Any] = {"quantize": "none", "offload": "none"}
    if order.dtype:
        changes["dtype"] = order.dtype
    policy = trained(order.run, {}, saved=saved, **changes)
    pipe = getattr(policy, "pipe", None)
    if pipe is None:
        raise ValueError(
            f"the model of {order.run} is no diffusers pipeline, and other programs do not read its"
            " weights; load them in Python: flowrl.load_policy"
        )
    for name, network in pipe.components.items():
        # layers with a LoRA were loaded in this type, and are merged before they are rounded to it
        whole = order.cfg.train.mode == "full" or name not in policy.trainable.modules
        if order.dtype and isinstance(network, nn.Module) and whole:
            network.to(DTYPES[order.dtype])
    return policy, pipe
