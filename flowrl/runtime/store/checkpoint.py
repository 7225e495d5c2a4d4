"""Checkpoints that are whole or absent: safetensors, json and a manifest of sha256, never a pickle.

A checkpoint is written to a temporary folder, flushed to disk, and renamed to
checkpoints/step-000100: a run killed at any moment leaves the previous one. `load` verifies the
size and hash of every file before it returns a number, and `load_newest` passes over a damaged
checkpoint. flowrl/training/state.py says what a run puts into it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from flowrl.runtime.processes import shares
from flowrl.runtime.store import files

META, MANIFEST = "meta.json", "manifest.json"
ASIDE = "damaged-"  # prefix of the names of checkpoints that could not be read
_STEP = re.compile(r"step-(\d{6,})")
# keys of an optimizer's file beside its parameters: the name of its class, and its groups
CLASS, GROUP = "the class", "group "
ADAMW = ("AdamW", "AdamW8bit")  # classes whose state alone says which of them it belongs to
# optimizer moments that have the shape of their parameter
WHOLE = ("exp_avg", "exp_avg_sq", "state1", "state2")
Tensors = dict[str, dict[str, Tensor]]  # file stem -> name -> tensor


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete or altered; the message names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The content of a checkpoint; every file was verified."""

    folder: Path  # path checkpoints/step-000100 in a run
    tensors: Tensors  # file stem -> name -> tensor, on the CPU
    meta: dict[str, Any]  # content of meta.json, with "iteration"
    damaged: dict[Path, str]  # folder of a newer checkpoint -> sentence about its damage

    def group(self, stem: str) -> dict[str, Tensor]:
        """Return the tensors of a file. If it was not saved -> CheckpointError."""
        if stem not in self.tensors:
            raise CheckpointError(
                f"{self.folder} holds no {stem}.safetensors, which this run needs; restore it, or"
                " remove that folder to resume from the checkpoint before it"
            )
        return self.tensors[stem]


def folder_of(run: str | Path, iteration: int) -> Path:
    return Path(run) / "checkpoints" / f"step-{iteration:06d}"


def save(
    run: str | Path,
    iteration: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    meta: Mapping[str, Any],
    *,
    keep: int = 2,
    spared: Callable[[Sequence[int]], set[int]] | None = None,
) -> Path:
    """Write checkpoints/step-<iteration> of a run atomically and remove all but the newest `keep`.

    iteration: the last one finished, counted from 1; 0 before the first. tensors: file stem -> name
    -> tensor on any device, whole or a share, for which the other processes call `gather`; meta:
    anything json can hold. A checkpoint of the same iteration is replaced. spared: takes the
    iterations of all checkpoints and returns those that stay although they are old. One process
    writes at a time. Return its folder.
    """
    final = folder_of(run, iteration)
    # the folder appears whole, and only then older ones may be removed
    with files.replacing_folder(final) as temporary:
        for stem, group in tensors.items():
            write_tensors(temporary / f"{stem}.safetensors", group)
        described = {"iteration": iteration, **meta}
        files.write(temporary / META, json.dumps(described, indent=1))
        _write_manifest(temporary)
    found = {iteration_of(folder): folder for folder in steps(run)}
    stay = spared(list(found)) if spared else set()
    for number, stale in list(found.items())[:-keep]:
        if number not in stay:
            files.remove(stale)
    return final


def _write_manifest(folder: Path) -> None:
    """Write down the size and hash of every file of a folder."""
    listed = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    files.write(folder / MANIFEST, json.dumps({"files": listed}, indent=1))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors as one safetensors file."""
    data = {name: shares.whole(t).to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    files.write(path, safetensors.torch.save(data))


def gather(tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Give this process's shares of tensors to the one that writes them."""
    for group in tensors.values():
        for tensor in group.values():
            shares.whole(tensor)


def steps(run: str | Path) -> list[Path]:
    """Finished checkpoints of a run, oldest first, without leftovers of interrupted writes."""
    parent = Path(run) / "checkpoints"
    if not parent.is_dir():
        return []
    found = [p for p in parent.iterdir() if p.is_dir() and _STEP.fullmatch(p.name)]
    return sorted(found, key=iteration_of)


def iteration_of(folder: Path) -> int:
    """Return the iteration after which the checkpoint of this folder was written."""
    return int(folder.name.removeprefix("step-"))


def latest(run: str | Path) -> Path:
    """Return the newest checkpoint. A run without one -> CheckpointError."""
    found = steps(run)
    if not found:
        raise CheckpointError(
            f"{Path(run) / 'checkpoints'} holds no checkpoint; flowrl train --resume {run} starts"
            " the run from its config.yaml"
        )
    return found[-1]


def load_newest(run: str | Path) -> Checkpoint:
    """Load the newest checkpoint that is whole. None there, or all damaged -> CheckpointError."""
    damaged: dict[Path, str] = {}
    latest(run)
    while left := [folder for folder in steps(run) if folder not in damaged]:
        folder = left[-1]  # steps() lists again: the run may go on and have replaced checkpoints
        try:
            tensors, meta = load(folder)
        except CheckpointError as error:
            damaged[folder] = str(error)
            continue
        return Checkpoint(folder=folder, tensors=tensors, meta=meta, damaged=damaged)
    first = next(iter(damaged.values()))
    raise CheckpointError(
        f"{first}, and no other checkpoint of {run} is whole; restore it, or remove the folder"
        " checkpoints to start the run from iteration 0"
    )


def set_aside(folder: Path) -> Path:
    """Keep a damaged checkpoint under a name that marks it -> its new path."""
    aside = folder.with_name(ASIDE + folder.name)
    if aside.exists():
        files.remove(aside)
    return folder.rename(aside)


def load(folder: str | Path) -> tuple[Tensors, dict[str, Any]]:
    """Read a checkpoint back -> (tensors, meta) as given to `save`, after every file's size and
    hash were verified; meta also holds "iteration"."""
    folder = Path(folder)
    whole = read_json(folder / MANIFEST)
    manifest = whole.get("files") if isinstance(whole, dict) else None
    if (
        not isinstance(manifest, dict)
        or META not in manifest
        or not all(isinstance(entry, dict) for entry in manifest.values())
    ):
        raise CheckpointError(f"{folder / MANIFEST} is not a manifest of files")
    for name, entry in manifest.items():
        _verify(folder / name, entry)
    paths = [folder / name for name in manifest if name.endswith(".safetensors")]
    tensors = {path.stem: safetensors.torch.load_file(path) for path in paths}
    return tensors, read_json(folder / META)


def pack_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Key an optimizer's state by the parameters' names instead of their order,
    {"<parameter>/exp_avg": ...}, and, of a class of the user's, what its groups count, and its
    name. names: name -> parameter."""
    by_id = {id(p): name for name, p in names.items()}
    packed = {
        f"{by_id[id(parameter)]}/{key}": _packed(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if value is not None
    }
    if (kind := type(optimizer).__name__) not in ADAMW:
        packed[f"{CLASS}/{kind}"] = torch.zeros(())
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                # for example Prodigy's step size
                if isinstance(value, int | float | Tensor) and not isinstance(value, bool):
                    packed[f"{GROUP}{number}/{key}"] = _packed(value)
    return packed


def _packed(value: Any) -> Tensor:
    """A number as a tensor of 64 bits, by which `_unpacked` knows it."""
    if isinstance(value, Tensor):
        return value
    kind = torch.float64 if isinstance(value, float) else torch.int64
    return torch.as_tensor(value, dtype=kind)


def _unpacked(value: Tensor) -> Any:
    number = value.ndim == 0 and value.dtype in (torch.float64, torch.int64)
    return value.item() if number else value


def unpack_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], packed: Mapping[str, Tensor]
) -> None:
    """Undo `pack_optimizer`: moments go to their parameter's device, step counts stay where AdamW
    keeps them.

    A name that is not trained now, or a moment of another shape or optimizer -> CheckpointError.
    """
    states: dict[str, dict[str, Any]] = {}
    for full, value in packed.items():
        name, _, key = full.rpartition("/")
        states.setdefault(name, {})[key] = value
    groups = {name: states.pop(name) for name in list(states) if name.startswith(GROUP)}
    kind = type(optimizer).__name__
    theirs = next(iter(states.pop(CLASS, {})), "")
    # optimizers of 8 bits use other names for their moments, which AdamW would ignore
    eight = any("state1" in state for state in states.values())
    theirs = theirs or ("AdamW8bit" if eight else "AdamW")
    if states and theirs != kind:
        raise CheckpointError(
            f"the checkpoint holds the state of {theirs}, which is not converted to that of {kind};"
            " go on with the optimizer.name that it was written with"
        )
    unknown = sorted(states.keys() - names.keys())
    if unknown:
        raise CheckpointError(
            f"the checkpoint holds optimizer state of {unknown[0]}, which is not trained by this"
            " config"
        )
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for name, state in states.items():
        parameter = names[name]
        for key, value in state.items():
            if key in WHOLE and value.shape != parameter.shape:
                raise CheckpointError(
                    f"{name}: {key} has shape {tuple(value.shape)}, the parameter"
                    f" {tuple(parameter.shape)}"
                )
            if not isinstance(plain := _unpacked(value), Tensor):
                state[key] = plain  # bitsandbytes counts steps in an int, not in a tensor
            elif key == "step":
                state[key] = value.to(parameter.device if fused else "cpu", copy=True)
            else:
                state[key] = shares.split_as(value, parameter)
        optimizer.state[parameter] = state
    for number, group in enumerate(optimizer.param_groups):
        for key, value in groups.get(f"{GROUP}{number}", {}).items():
            group[key] = _unpacked(value)


def _verify(path: Path, entry: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    if size != entry.get("bytes"):
        raise CheckpointError(
            f"{path} has {size} bytes instead of {entry.get('bytes')}, so it is truncated or"
            " altered"
        )
    if _sha256(path) != entry.get("sha256"):
        raise CheckpointError(f"{path} does not match its sha256, so it was altered")


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint, unverified; if it is not one -> CheckpointError."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    # bytes that are not UTF-8 raise a ValueError, deep nesting a RecursionError
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not json, so it is truncated or altered") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
