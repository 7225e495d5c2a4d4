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

from flowrl.policy.weights.parts import TrainedParts
from flowrl.runtime.store import files as disk
from flowrl.runtime.store import side_files
from flowrl.runtime.store.side_files import FileModel, shortened

FILE = "pytorch_lora_weights.safetensors"
SETTINGS = "flowrl.json"  # file beside exported weights: settings that load_policy(lora=...) takes
BESIDE = "adapter_config.json"  # file beside peft's own weights, adapter_model.safetensors
SLOTS = ("transformer", "unet")  # names of denoisers in files
# key of a file's header under which the adapter's config is kept
METADATA = "lora_adapter_metadata"


class Settings(FileModel):
    """flowrl.json, written from train.lora and train.parts."""

    model_config = ConfigDict(extra="forbid")

    rank: PositiveInt
    alpha: PositiveFloat
    targets: list[str] | None = None
    init: Literal["gaussian", "kaiming"] = "gaussian"
    parts: list[str] = ["denoiser"]


def files_of(pipe: Any, modules: Mapping[str, Any]) -> dict[str, str]:
    """Name the file of each network's LoRA. A network without a place in the pipeline's file (Wan
    2.2's second) gets a file of its own, as diffusers expects; if text encoders have no place, all
    networks share one file in our format."""
    places = placed_in(pipe)
    ours = any(name.startswith("text_encoder") and name not in places for name in modules)
    whole = {*modules} if ours or not places else places
    return {name: FILE if name in whole else f"{name}_lora_weights.safetensors" for name in modules}


def placed_in(pipe: Any) -> set[str]:
    """Name the networks whose LoRA the pipeline's own file holds, in diffusers' format."""
    save = getattr(pipe, "save_lora_weights", None)
    known = [] if save is None else inspect.signature(save).parameters
    return {name.removesuffix("_lora_layers") for name in known if name.endswith("_lora_layers")}


def slot_of(name: str) -> str:
    """Return the name of a network in a file: Wan 2.2's second has that of the first."""
    return next((slot for slot in SLOTS if name.startswith(slot)), name)


def exported(parts: TrainedParts) -> dict[str, Tensor]:
    """Return the adapter by name with its scale in B, so that it has the same effect with alpha
    = rank, which readers assume if they do not read alpha."""
    factor = parts.scale
    return {
        name: (p.detach() * factor if ".lora_B." in name else p.detach()).cpu().contiguous()
        for name, p in parts.named().items()  # LoRA alone, without heads
    }


def save(pipe: Any, parts: TrainedParts, folder: str | Path) -> Path:
    """Write the adapter of every network, with its config, by pipe.save_lora_weights."""
    from diffusers.utils import convert_state_dict_to_diffusers

    known = inspect.signature(pipe.save_lora_weights).parameters
    files: dict[str, dict[str, Any]] = {}
    every = exported(parts)
    for name, file in files_of(pipe, parts.modules).items():
        start = f"{name}."
        weights = {k.removeprefix(start): v for k, v in every.items() if k.startswith(start)}
        weights = convert_state_dict_to_diffusers(weights) if name.startswith("unet") else weights
        slot = name if file == FILE else slot_of(name)
        given = files.setdefault(file, {})
        given[f"{slot}_lora_layers"] = weights
        if f"{slot}_lora_adapter_metadata" in known:
            own = parts.modules[name].peft_config[parts.views["default"][0]].to_dict()
            given[f"{slot}_lora_adapter_metadata"] = _config(
                {**own, "lora_alpha": own["r"], "use_rslora": False}
            )
    with tempfile.TemporaryDirectory() as scratch:
        for file, given in files.items():
            pipe.save_lora_weights(scratch, weight_name=file, **given)
            write(Path(folder) / file, (Path(scratch) / file).read_bytes())
    return Path(folder) / FILE


def _config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter's config without the path of its base model; sets in order."""
    config = {key: sorted(v) if isinstance(v, set) else v for key, v in fields.items()}
    return {**config, "base_model_name_or_path": None}


def write(file: Path, content: bytes) -> Path:
    """Write the bytes of a safetensors file with its header sorted by name; the library writes
    metadata in a random order."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if METADATA in (metadata := header.get("__metadata__", {})):
        metadata[METADATA] = json.dumps(json.loads(metadata[METADATA]), sort_keys=True)
    head = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # pad the header, so that tensors start at a multiple of 8
    return disk.write(file, len(head).to_bytes(8, "little") + head + content[8 + length :])


def write_settings(folder: Path, options: Mapping[str, Any], parts: list[str]) -> None:
    """Write the settings of exported adapters; options of peft's are in the weights."""
    own = {name: options[name] for name in Settings.model_fields if name in options}
    disk.write(folder / SETTINGS, json.dumps({**own, "parts": parts}))


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings of exported adapters, in the form of load_policy(lora=...), and "parts"."""
    return side_files.read(path, Settings, again="export the LoRA again: resume its run")


def opened(file: Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Read the weights of a file, and the configs of its adapters by the prefix of their fields,
    from its header or from peft's file beside it."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    configs: dict[str, dict[str, Any]] = {}
    try:
        with safe_open(str(file), "pt") as content:
            fields = json.loads((content.metadata() or {}).get(METADATA, "{}"))
        beside = file.parent / BESIDE
        if not fields and beside.is_file():
            fields = json.loads(beside.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError(f"the config of its adapter is {shortened(fields)}")
        weights = load_file(str(file))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} cannot be read as safetensors ({error}); was it cut off or changed? copy or"
            " export it again"
        ) from error
    for key, value in fields.items():
        before, _, name = key.rpartition(".")
        configs.setdefault(before, {})[name] = value
    return weights, configs


def found(path: Path, name: str) -> Path:
    """Find the file behind a path: the path itself, or in a folder the file of this name, or the
    only one."""
    if path.is_file() and name != FILE:
        path = path.parent / name
    inside = [*path.glob("*.safetensors")]
    if path.is_dir():
        path = inside[0] if len(inside) == 1 else path / name
    if path.is_file() and path.suffix == ".safetensors":
        return path
    raise ValueError(
        f"no LoRA file {path}; a folder written by save_lora holds {name}, and no format but"
        " .safetensors is read (.bin, .pt and .ckpt are pickles: save them as one)"
    )
