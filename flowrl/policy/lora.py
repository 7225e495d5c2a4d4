"""LoRA files in diffusers' format, written and read through the pipeline, so that `pipe.load_lora_weights(folder)` works."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch import Tensor

FILE = "pytorch_lora_weights.safetensors"


def file_of(name: str, known: Any) -> str:
    """Networks that the pipeline's file has no place for (Wan 2.2's second) get one of their own, as diffusers expects."""
    return FILE if f"{name}_lora_layers" in known else f"{name}_lora_weights.safetensors"


def save(pipe: Any, modules: dict[str, Any], folder: str | Path) -> Path:
    """Write adapter "default" of every network through pipe.save_lora_weights; rank and alpha travel as metadata."""
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft import get_peft_model_state_dict

    known = inspect.signature(pipe.save_lora_weights).parameters
    files: dict[str, dict[str, Any]] = {}
    for name, module in modules.items():
        weights = get_peft_model_state_dict(module, adapter_name="default")
        weights = convert_state_dict_to_diffusers(weights) if name.startswith("unet") else weights
        file = file_of(name, known)
        slot = name if file == FILE else next(k for k in ("transformer", "unet") if name.startswith(k))
        given = files.setdefault(file, {})
        given[f"{slot}_lora_layers"] = {k: v.contiguous().cpu() for k, v in weights.items()}
        if f"{slot}_lora_adapter_metadata" in known:
            given[f"{slot}_lora_adapter_metadata"] = module.peft_config["default"].to_dict()
    for file, given in files.items():
        pipe.save_lora_weights(str(folder), weight_name=file, **given)
    return Path(folder) / FILE


def read(pipe: Any, modules: dict[str, Any], path: str | Path) -> dict[str, Tensor]:
    """State of view "default" from a folder or file in diffusers' format."""
    path, known, state = Path(path), inspect.signature(pipe.save_lora_weights).parameters, {}
    folder, first = (path, FILE) if path.is_dir() else (path.parent, path.name)
    for file in dict.fromkeys(file_of(name, known) for name in modules):
        actual = first if file == FILE else file
        if not (folder / actual).is_file():
            raise ValueError(
                f"no LoRA file {folder / actual}; a folder written by save_lora holds "
                f"{', '.join(sorted({file_of(n, known) for n in modules}))}"
            )
        weights = type(pipe).lora_state_dict(str(folder), weight_name=actual, local_files_only=True)
        weights = weights[0] if isinstance(weights, tuple) else weights
        name = next(n for n in modules if file_of(n, known) == file)
        for key, value in weights.items():
            part, rest = key.split(".", 1)
            part = part if file == FILE else name
            state[f"{part}.{rest.replace('.lora.down.', '.lora_A.').replace('.lora.up.', '.lora_B.')}"] = value
    return state
