"""LoRA files in diffusers' format, written and read through the pipeline, so that
`pipe.load_lora_weights(folder)` works."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from torch import Tensor

FILE = "pytorch_lora_weights.safetensors"
SETTINGS = "flowrl.json"  # beside exported weights: what load_policy(lora=...) takes
METADATA = (  # where diffusers keeps the adapter's config, in the header of the file
    "lora_adapter_metadata"
)


def file_of(name: str, known: Any) -> str:
    """Networks that the pipeline's file has no place for (Wan 2.2's second) get one of their own,
    as diffusers expects."""
    return FILE if f"{name}_lora_layers" in known else f"{name}_lora_weights.safetensors"


def save(pipe: Any, modules: dict[str, Any], folder: str | Path) -> Path:
    """Write adapter "default" of every network through pipe.save_lora_weights; rank and alpha
    travel as metadata."""
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft import get_peft_model_state_dict

    known = inspect.signature(pipe.save_lora_weights).parameters
    files: dict[str, dict[str, Any]] = {}
    for name, module in modules.items():
        weights = get_peft_model_state_dict(module, adapter_name="default")
        weights = convert_state_dict_to_diffusers(weights) if name.startswith("unet") else weights
        file = file_of(name, known)
        slot = (
            name if file == FILE else next(k for k in ("transformer", "unet") if name.startswith(k))
        )
        given = files.setdefault(file, {})
        given[f"{slot}_lora_layers"] = {k: v.contiguous().cpu() for k, v in weights.items()}
        if f"{slot}_lora_adapter_metadata" in known:
            given[f"{slot}_lora_adapter_metadata"] = module.peft_config["default"].to_dict()
    for file, given in files.items():
        pipe.save_lora_weights(str(folder), weight_name=file, **given)
    return Path(folder) / FILE


def metadata(options: dict[str, Any]) -> dict[str, str]:
    """Header that tells rank and alpha, as diffusers writes it."""
    return {
        METADATA: json.dumps({"module.r": options["rank"], "module.lora_alpha": options["alpha"]})
    }


def check(file: Path, options: dict[str, Any]) -> bool:
    """ValueError unless the file is readable and was trained with the rank and alpha of options:
    alpha / rank multiplies its update. Whether alpha is told at all, by its header or by the
    settings beside it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), "pt") as opened:
            header = json.loads((opened.metadata() or {}).get(METADATA, "{}"))
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{file} cannot be read as safetensors ({error}); was it cut off or changed? copy or"
            " export it again"
        ) from error
    told: dict[str, set[float]] = {"rank": set(), "alpha": set()}
    for key, value in header.items():
        name = {"r": "rank", "lora_alpha": "alpha"}.get(key.rsplit(".", 1)[-1])
        if name:
            told[name].add(value)
    beside = file.parent / SETTINGS
    for name, value in json.loads(beside.read_text()).items() if beside.is_file() else ():
        if name in told:
            told[name].add(value)
    for name, values in told.items():
        for value in values - {options[name]}:
            raise ValueError(
                f"{file} was trained with {name}={value:g}, and this policy's adapters have"
                f" {name}={options[name]:g}, which would change its effect; set"
                f" train.lora.{name}={value:g}, or load_policy(lora={{{name!r}: {value:g}}})"
            )
    return bool(told["alpha"])


def read(
    pipe: Any, modules: dict[str, Any], path: str | Path, options: dict[str, Any]
) -> dict[str, Tensor]:
    """State of view "default" from a folder or file in diffusers' format. options: rank and alpha
    of the adapters it is for."""
    path, known, state = Path(path), inspect.signature(pipe.save_lora_weights).parameters, {}
    folder, first = (path, FILE) if path.is_dir() else (path.parent, path.name)
    for file in dict.fromkeys(file_of(name, known) for name in modules):
        actual = first if file == FILE else file
        if not (folder / actual).is_file():
            raise ValueError(
                f"no LoRA file {folder / actual}; a folder written by save_lora holds "
                f"{', '.join(sorted({file_of(n, known) for n in modules}))}"
            )
        told = check(folder / actual, options)
        weights = type(pipe).lora_state_dict(
            str(folder), weight_name=actual, local_files_only=True, use_safetensors=True
        )
        weights, alphas = weights if isinstance(weights, tuple) else (weights, None)
        other = sorted(
            {float(a) for a in (alphas or {}).values()} or {float(options["rank"])}
        )  # diffusers: no alpha means the rank
        if not told and other != [options["alpha"]]:
            raise ValueError(
                f"{folder / actual} does not say its alpha, which diffusers takes as {other[0]:g},"
                f" and this policy's adapters have alpha={options['alpha']:g}; set"
                f" train.lora.alpha={other[0]:g}, or load_policy(lora={{'alpha': {other[0]:g}}})"
            )
        name = next(n for n in modules if file_of(n, known) == file)
        for key, value in weights.items():
            part, rest = key.split(".", 1)
            part = part if file == FILE else name
            state[
                f"{part}.{rest.replace('.lora.down.', '.lora_A.').replace('.lora.up.', '.lora_B.')}"
            ] = value
    return state
