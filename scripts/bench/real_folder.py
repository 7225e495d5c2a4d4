"""Folders as save_pretrained writes them: the real architectures with random weights."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from random_pipeline import SCHEDULERS
from real_tokenizers import CLASSES, tokenizer

from flowrl.runtime.log import quiet
from flowrl.training.budget.architecture import Architecture

SHARP = 8.0
BLOCK = 1_000_003  # prime: no two rows of a matrix are equal


def with_changes(architecture: Architecture, changes: Mapping[str, Any]) -> Architecture:
    """With other numbers: component -> its changes, which may be nested."""
    parts = {
        name: _merged(config, changes.get(name, {})) for name, config in architecture.parts.items()
    }
    return dataclasses.replace(architecture, parts=parts)


def _merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    nested = {  # a group that the config leaves to its class is taken as it is
        key: _merged(config.get(key, {}), value)
        for key, value in changes.items()
        if isinstance(value, Mapping)
    }
    return {**config, **changes, **nested}


def write(architecture: Architecture, folder: Path, dtype: torch.dtype) -> None:
    """The pipeline's folder, a component at a time, so that no two are in memory together."""
    import diffusers

    index: dict[str, Any] = {
        "_class_name": architecture.pipeline,
        "_diffusers_version": diffusers.__version__,
    }
    torch.manual_seed(0)
    for part, config in architecture.parts.items():
        if part == "safety_checker":  # a network that blanks pictures is left out, as many users do
            continue
        with quiet(), quick_weights(dtype):
            module = architecture.build(part, dtype, "cpu")
        sharpen(module)
        module.save_pretrained(folder / part)
        index[part] = [_library(module), str(config["_class_name"])]
        if part.startswith("text_encoder"):
            key = part.replace("text_encoder", "tokenizer")
            tokenizer(key, str(config["_class_name"]), architecture.config(part)).save_pretrained(
                folder / key
            )
            index[key] = ["transformers", CLASSES[str(config["_class_name"])]]
        del module
        gc.collect()
    scheduler, options = SCHEDULERS[architecture.pipeline]
    getattr(diffusers, scheduler)(**options).save_pretrained(folder / "scheduler")
    index["scheduler"] = ["diffusers", scheduler]
    if architecture.pipeline == "StableDiffusionPipeline":
        index |= {"safety_checker": [None, None], "feature_extractor": [None, None]}
        index["requires_safety_checker"] = False
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))


def sharpen(network: Any) -> None:
    """Let attention choose among tokens of the prompt: untrained, it reads all alike, and ten among
    512 change nothing that bf16 shows."""
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if name.endswith(("attn2.norm_k.weight", "norm_added_k.weight")):
                weight.mul_(SHARP)


def _library(module: Any) -> str:
    return type(module).__module__.partition(".")[0]


@contextmanager
def quick_weights(dtype: torch.dtype) -> Iterator[None]:
    """New weights have this type, and random ones are cut from one block of values: to draw
    billions in bf16 takes minutes."""
    kept = {name: getattr(torch.Tensor, name) for name in ("normal_", "uniform_")}
    normal, uniform = (
        draw(BLOCK, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        for draw in (torch.randn, torch.rand)
    )

    def fill(tensor: torch.Tensor, values: torch.Tensor, scale: float, shift: float) -> Any:
        with torch.no_grad():
            values = (values[: tensor.numel()] * scale + shift).to(tensor.dtype)
            for piece in tensor.detach().view(-1).split(BLOCK):
                piece.copy_(values[: len(piece)])
        return tensor

    def normal_(self: Any, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Any:
        return fill(self, normal, std, mean)

    def uniform_(self: Any, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Any:
        return fill(self, uniform, high - low, low)

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.Tensor.normal_, torch.Tensor.uniform_ = normal_, uniform_  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        for name, own in kept.items():
            setattr(torch.Tensor, name, own)
