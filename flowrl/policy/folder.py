"""A model's folder in diffusers' layout: its parts, and the reason why it cannot be loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from flowrl.runtime.paths import located, nearby

INDEX, MODULAR = "model_index.json", "modular_model_index.json"
TOKENIZER = "tokenizer_config.json"
# weight files of no variant; without the index, which lists shards
PLAIN = re.compile(r"(diffusion_pytorch_model|model)(-\d+-of-\d+)?\.safetensors")
OF_VARIANT = re.compile(r"(diffusion_pytorch_model|model)\.(\w+?)(-\d+-of-\d+)?\.safetensors")
POINTER = b"version https://git-lfs"


def check_index(source: str, index: Any) -> None:
    """ValueError if an index names a part that is not there, or a pipeline or a part that no
    installed package has: the code in a folder is never run."""
    import diffusers

    file = index_in(Path(source)) or INDEX
    name = index.get("_class_name") if isinstance(index, Mapping) else None
    if not name:
        raise ValueError(f'model "{source}": its {file} names no pipeline, "_class_name"')
    # a list names a file in the folder, and a class in that file
    own = name if isinstance(name, str) else name[-1]
    unknown = [] if own is name and hasattr(diffusers, own) else [str(own)]
    blocks, parts = index.get("_blocks_class_name"), parts_of(index)
    unknown += [blocks] if blocks and not hasattr(diffusers, blocks) else []
    unknown += [
        f"{kind}.{cls} ({part})" for part, (kind, cls) in parts.items() if not _known(kind, cls)
    ]
    if unknown:
        raise ValueError(
            f'model "{source}" is made of {", ".join(unknown)}, which diffusers'
            f" {diffusers.__version__} does not have, and code of a model's folder is not run;"
            " install a newer diffusers if that has it, or write a function without arguments that"
            " returns the pipeline, and give model=path/to/file.py:NAME"
        )
    lacking = [part for part in parts if not _is_there(Path(source), part, index[part])]
    if Path(source).is_dir() and lacking:
        raise ValueError(
            f'model "{source}": its {lacking[0]} is missing: {file} names it, and there is no'
            f" {Path(source) / lacking[0]}; fetch or save the model again"
        )
    for part, (_, cls) in parts.items():
        own = Path(source) / part
        if "Tokenizer" in cls and own.is_dir() and not (own / TOKENIZER).is_file():
            raise ValueError(
                f'model "{source}": its {part} has no {TOKENIZER}, without which texts get other'
                " tokens; fetch or save the model again"
            )


def index_in(folder: Path) -> str | None:
    """Name the index that a folder has, of a classic pipeline or of a modular one."""
    return next((name for name in (INDEX, MODULAR) if (folder / name).is_file()), None)


def _is_there(folder: Path, part: str, entry: list[Any]) -> bool:
    """Whether a part lies in the folder, or elsewhere: the index of a modular pipeline says of each
    part where it is, and what may be a hub id counts as there."""
    spec = entry[2] if len(entry) == 3 else {"pretrained_model_name_or_path": "."}
    own, place = spec.get("subfolder") or part, spec.get("pretrained_model_name_or_path")
    if place is None or (folder / own).is_dir():
        return True
    beside = place in (".", str(folder))
    return not beside and (not Path(place).is_absolute() or (Path(place) / own).is_dir())


def parts_of(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return (package, class) of each part that a model_index.json lists as present."""
    pairs = {name: e for name, e in index.items() if isinstance(e, list) and name[:1] != "_"}
    return {name: (str(e[0]), str(e[1])) for name, e in pairs.items() if e[0] is not None}


def variant_of(source: str, index: Mapping[str, Any]) -> str | None:
    """Find the variant in the names of weights (fp16 in model.fp16.safetensors), if a part has no
    weights without one."""
    for part in parts_of(index):
        names = [path.name for path in (Path(source) / part).glob("*.safetensors")]
        found = [match[2] for match in map(OF_VARIANT.fullmatch, names) if match]
        if found and not any(PLAIN.fullmatch(name) for name in names):
            return found[0]
    return None


def why_not(source: str, error: Exception) -> str:
    """Say in a sentence why a source cannot be loaded. error: the exception of loading it."""
    path, what = located(source), f'model "{source}"'
    if said := not_a_model(source):
        return said
    if source and path.is_dir():
        return f"{what} {_for_folder(path, error)}"
    offline = "HF_HUB_OFFLINE is set, and the cache does not hold it"
    reason = offline if constants.HF_HUB_OFFLINE else first_sentence(error)
    return f"{what} is not a diffusers folder, and cannot be fetched: {reason}"


def not_a_model(source: str) -> str:
    """Say of a path that it is a single file, or is not there; "": a folder, or no path."""
    path, what = located(source), f'model "{source}"'
    if path.is_file():
        return f"{what} is a single file, and {_for_file(path)}"
    name = source.partition("@")[0]  # without a branch of the hub, whose name may have slashes
    listed = name[:1] in ("", ".", "~", "/", "$") or name.count("/") > 1 and ":" not in name
    beside = [run.parent.name for run in sorted(path.parent.glob("*/metrics.jsonl"))][:9]
    if path.is_dir() or not (listed or beside or source.startswith("runs/")):
        return ""
    there = f"; {path.parent} has {', '.join(beside)}" if beside else nearby(path)
    known = "a folder, a hub id or a name of `flowrl list models`"
    return f"{what} does not exist{there}; give {known}"


def _for_file(path: Path) -> str:
    if path.name in (INDEX, MODULAR):
        return f"its folder is needed: {path.parent}"
    if path.suffix == ".py":
        return f"a function in it is needed: model={path}:NAME"
    return (
        "a diffusers folder is needed; write one with diffusers:"
        f' StableDiffusionPipeline.from_single_file("{path}").save_pretrained("folder"), with the'
        " class of your model"
    )


def _for_folder(path: Path, error: Exception) -> str:
    if index_in(path):
        return f"cannot be loaded: {_damaged(path) or first_sentence(error)}"
    whole = path.resolve().parent
    near = f'; it is a part of "{path.parent}"' if index_in(whole) else ""
    return f"is a folder without {INDEX}, which save_pretrained of a pipeline writes{near}"


def first_sentence(error: object) -> str:
    """Return the first sentence of a library's message, without its full stop."""
    words = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[.!?])\s", words)[0].rstrip(".")[:300]


def _damaged(folder: Path) -> str | None:
    """Name the first file that cannot be read, and what to do; None if all can."""
    from safetensors import SafetensorError, safe_open

    for file in sorted([*folder.rglob("*.json"), *folder.rglob("*.safetensors")]):
        try:
            with file.open("rb") as opened:
                if opened.read(len(POINTER)) == POINTER:
                    return f"{file} is a pointer of git-lfs; run git lfs pull"
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
                continue
            with safe_open(str(file), "pt"):
                pass
        except (SafetensorError, OSError, ValueError) as error:
            return f"{file} was cut off or changed ({first_sentence(error)}); fetch it again"
    return None


def _known(package: str, cls: str) -> bool:
    """Whether an installed package has a class. It looks for classes of diffusers and its pipelines
    only: diffusers finds classes of transformers under names that no longer exist."""
    import diffusers

    if package == "diffusers" or hasattr(diffusers.pipelines, package):
        return hasattr(getattr(diffusers.pipelines, package, diffusers), cls)
    try:
        return find_spec(package.partition(".")[0]) is not None
    except ValueError:  # find_spec raises it for a module that was made without a file
        return True
