"""LoRA files in diffusers' format, written and read through the pipeline.

`pipe.load_lora_weights(folder)` reads what is written here. The same weights make the same bytes,
so that files can be compared and cached by their hash.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from torch import Tensor

from flowrl.runtime import files as disk
from flowrl.runtime import side_files
from flowrl.runtime.side_files import Stored, shortened
from flowrl.runtime.text import printable

FILE = "pytorch_lora_weights.safetensors"
SETTINGS = "flowrl.json"  # beside exported weights: what load_policy(lora=...) takes
METADATA = "lora_adapter_metadata"  # where a file's header keeps the adapter's config


class Settings(Stored):
    """flowrl.json, written from train.lora and train.parts."""

    model_config = ConfigDict(extra="forbid")

    rank: PositiveInt
    alpha: PositiveFloat
    targets: list[str] | None = None
    init: Literal["gaussian", "kaiming"] = "gaussian"
    parts: list[str] = ["denoiser"]


def file_of(name: str, known: Mapping[str, Any]) -> str:
    """Networks that the pipeline's file has no place for (Wan 2.2's second) get one of their own,
    as diffusers expects. known: parameters of pipe.save_lora_weights."""
    return FILE if f"{name}_lora_layers" in known else f"{name}_lora_weights.safetensors"


def save(pipe: Any, modules: dict[str, Any], folder: str | Path) -> Path:
    """Write adapter "default" of every network, with its config, by pipe.save_lora_weights."""
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft import get_peft_model_state_dict

    known = inspect.signature(pipe.save_lora_weights).parameters
    files: dict[str, dict[str, Any]] = {}
    for name, module in modules.items():
        weights = get_peft_model_state_dict(module, adapter_name="default")
        weights = convert_state_dict_to_diffusers(weights) if name.startswith("unet") else weights
        file = file_of(name, known)
        kind = next((k for k in ("transformer", "unet") if name.startswith(k)), name)
        slot = name if file == FILE else kind
        given = files.setdefault(file, {})
        given[f"{slot}_lora_layers"] = {k: v.contiguous().cpu() for k, v in weights.items()}
        if f"{slot}_lora_adapter_metadata" in known:
            given[f"{slot}_lora_adapter_metadata"] = _config(
                module.peft_config["default"].to_dict()
            )
    with tempfile.TemporaryDirectory() as scratch:
        for file, given in files.items():
            pipe.save_lora_weights(scratch, weight_name=file, **given)
            write(Path(folder) / file, (Path(scratch) / file).read_bytes())
    return Path(folder) / FILE


def _config(told: Mapping[str, Any]) -> dict[str, Any]:
    """An adapter's config without the place of its base model; sets in order."""
    config = {key: sorted(v) if isinstance(v, set) else v for key, v in told.items()}
    return {**config, "base_model_name_or_path": None}


def write(file: Path, content: bytes) -> Path:
    """Write the bytes of a safetensors file with its header in the order of names; the library
    draws the order of metadata anew each time."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if METADATA in (told := header.get("__metadata__", {})):
        told[METADATA] = json.dumps(json.loads(told[METADATA]), sort_keys=True)
    head = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # tensors start at a multiple of 8
    return disk.write(file, len(head).to_bytes(8, "little") + head + content[8 + length :])


def metadata(options: dict[str, Any]) -> dict[str, str]:
    """Header that tells rank and alpha, as diffusers writes it."""
    told = {"module.r": options["rank"], "module.lora_alpha": options["alpha"]}
    return {METADATA: json.dumps(told)}


def check(file: Path, options: dict[str, Any]) -> bool:
    """Whether the file says its alpha, by its header or by the settings beside it.

    ValueError unless it is readable and was trained with the rank and alpha of options: alpha /
    rank multiplies its update.
    """
    told: dict[str, set[float]] = {"rank": set(), "alpha": set()}
    for key, value in _header(file).items():
        name = {"r": "rank", "lora_alpha": "alpha"}.get(key.rsplit(".", 1)[-1])
        if name and not isinstance(value, int | float):
            raise ValueError(f"{file} has {key}={shortened(value)} in its header, not a number")
        if name:
            told[name].add(value)
    beside = file.parent / SETTINGS
    if beside.is_file():
        settings = read_settings(beside)
        told = {name: values | {settings[name]} for name, values in told.items()}
    for name, values in told.items():
        for value in values - {options[name]}:
            raise ValueError(
                f"{file} was trained with {name}={value:g}, and this policy's adapters have"
                f" {name}={options[name]:g}, which would change its effect; {_remedy(name, value)}"
            )
    return bool(told["alpha"])


def read_settings(path: Path) -> dict[str, Any]:
    """Settings of the adapters of exported weights, as `load_policy(lora=...)` takes them, and
    "parts"."""
    return side_files.read(path, Settings, again="export the LoRA again: resume its run")


def _header(file: Path) -> dict[str, Any]:
    """The adapter's config in the header of a file; {} without one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), "pt") as opened:
            config = json.loads((opened.metadata() or {}).get(METADATA, "{}"))
        if not isinstance(config, dict):
            raise ValueError(f"the config in its header is {shortened(config)}")
        return config
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} cannot be read as safetensors ({error}); was it cut off or changed? copy or"
            " export it again"
        ) from error


def _remedy(name: str, value: float) -> str:
    return f"set train.lora.{name}={value:g}, or load_policy(lora={{{name!r}: {value:g}}})"


def read(
    pipe: Any, modules: dict[str, Any], path: str | Path, options: dict[str, Any]
) -> dict[str, Tensor]:
    """State of view "default" from a folder or file; options: rank and alpha of the adapters."""
    path, known, state = Path(path), inspect.signature(pipe.save_lora_weights).parameters, {}
    folder, first = (path, FILE) if path.is_dir() else (path.parent, path.name)
    files = {file_of(name, known): name for name in reversed(modules)}
    for file in dict.fromkeys(file_of(name, known) for name in modules):
        source = folder / (first if file == FILE else file)
        if not source.is_file():
            raise ValueError(
                f"no LoRA file {source}; a folder written by save_lora holds"
                f" {', '.join(sorted(files))}"
            )
        for key, value in _weights(pipe, source, options).items():
            part, rest = key.split(".", 1)
            part = part if file == FILE else files[file]
            rest = rest.replace(".lora.down.", ".lora_A.").replace(".lora.up.", ".lora_B.")
            state[f"{part}.{rest}"] = value
    return state


def _weights(pipe: Any, source: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    """One file's weights, as the pipeline reads them, after their alpha was compared."""
    told = check(source, options)
    try:
        weights = type(pipe).lora_state_dict(
            str(source.parent), weight_name=source.name, local_files_only=True, use_safetensors=True
        )
    except Exception as error:  # each converter of diffusers has its own
        raise ValueError(
            f"{source} is no LoRA of a {type(pipe).__name__}: {printable(error, 200)}"
        ) from error
    weights, alphas = weights if isinstance(weights, tuple) else (weights, None)
    # diffusers: no alpha means the rank
    taken = sorted({float(a) for a in (alphas or {}).values()} or {float(options["rank"])})
    if not told and taken != [options["alpha"]]:
        raise ValueError(
            f"{source} does not say its alpha, which diffusers takes as {taken[0]:g}, and this"
            f" policy's adapters have alpha={options['alpha']:g}; {_remedy('alpha', taken[0])}"
        )
    return weights
