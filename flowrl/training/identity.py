"""The identity of a run that a checkpoint keeps: its settings, files, networks and code.

Every checkpoint holds it, and it is compared when the run is resumed, so that a run does not change
halfway without anybody knowing. Settings are kept themselves, files, networks and code as hashes.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl import __version__
from flowrl.config.facts import Facts
from flowrl.config.gone import without_gone
from flowrl.config.live import Live
from flowrl.config.load import flatten
from flowrl.config.schema import Config, algorithm_schema
from flowrl.data import as_seen, hf
from flowrl.data.media import MEDIA_SUFFIXES, depends_on_reader
from flowrl.data.scored_folder import list_of
from flowrl.data.stored import PictureCell
from flowrl.policy import Policy
from flowrl.policy.weights.quantised import plain_tensors
from flowrl.rewards import Reward, RewardSet
from flowrl.runtime.registry import is_place
from flowrl.runtime.store.run_folder import lora_folder
from flowrl.runtime.store.side_files import shortened

WHOLE = 2**26  # bytes: larger files are hashed by their size, their first and their last MiB
ENDS = 2**20
# bytes at each end of images and videos that are hashed, because there may be many of them
MEDIA_ENDS = 2**12
SAMPLED = 64  # number of values that are hashed in each tensor of a network
WRITTEN = ("journal", "log")  # settings of rewards that name files which a run writes
UNCOUNTED = ("cli", "report")  # folders of flowrl whose code changes no number
RESUMABLE = (
    "algorithm.label",
    "iterations",
    "stop.",
    "checkpoint.",
    "guard.",
    "trackers",
    "tracking.",
    "train.shard",
    "train.sequence_parallel",
    "model.encoders",
    "model.prompt_cache",
    "model.offload",
    "data.latent_cache",
    "batch.states",
)  # settings with these prefixes may differ at a resume, because they change no number

READ = "the reader of videos, transparency and colour profiles"
NOTHING = Live()  # stands for a run without live objects
NO_DATA: Mapping[str, Any] = {}

# section (config, files, networks, code, sources) -> name -> value
Identity = dict[str, dict[str, Any]]


def of_config(cfg: Config) -> Identity:
    """Describe a run as far as it is known before anything is loaded."""
    return {
        "config": cfg.model_dump(mode="json"),
        "files": {name: digest(Path(name)) for name in sorted(_named(cfg))} | _datasets(cfg),
        "code": {"flowrl": __version__},
    }


def of_parts(
    cfg: Config,
    rewards: RewardSet,
    policy: Policy,
    data: Mapping[str, Any] = NO_DATA,
    media: Sequence[Path | PictureCell] = (),
    live: Live = NOTHING,
) -> Identity:
    """Describe all of a run. data: prompts as they were read, by their purpose; media: files that
    they or data.offline name.

    Facts that only become known here have sections of their own, because two identities are
    compared by the sections that both have.
    """
    others: dict[str, Any] = {f"reward.{label}": r for label, r in rewards.rewards.items()}
    if rewards.features:
        others["diversity.features"] = rewards.features
    networks = {f"weights of {cfg.model.source}": _sampled(_frozen(policy))}
    for name, teacher in policy.teachers.table.items() if policy.teachers else ():
        if teacher.policy is not policy:  # an adapter is among the files
            whole = nn.ModuleDict(teacher.policy.networks).state_dict()
            networks[f"weights of algorithm.teachers.{name}"] = _sampled(whole)
    for name, holder in others.items():
        if tensors := dict(_tensors(holder, "")):
            networks[f"weights of {name}"] = _sampled(tensors)
    return {
        **of_config(cfg),
        "data": of_data(data, media),
        "live": of_live(live),
        "reader": of_reader(data, media),
        "networks": networks,
        "sources": {"flowrl": _sources()},
    }


def of_data(data: Mapping[str, Any], media: Sequence[Path | PictureCell]) -> dict[str, str]:
    """Hash prompts with all their columns, and the files that they name."""
    read = {**data, "images of the data": [_seen(path) for path in media]}
    return {
        name: _hex(json.dumps(things, default=_content, skipkeys=True).encode())
        for name, things in read.items()
    }


def _seen(file: Path | PictureCell) -> str:
    """What stands for a file, or for a picture in a table."""
    if isinstance(file, PictureCell):
        return file.tobytes().decode()
    return f"{file} {digest(file)}"


def of_reader(data: Mapping[str, Any], media: Sequence[Path | PictureCell]) -> dict[str, str]:
    """Name the version of the reader of pictures and videos, if another version may read them
    differently. Files inside tables are not looked at, so they count as pictures."""
    values = (value for rows in data.values() for row in rows for value in row.values())
    in_tables = any(isinstance(value, PictureCell) for value in (*values, *media))
    files = (file for file in media if isinstance(file, Path))
    depends = in_tables or any(map(depends_on_reader, files))
    return {READ: as_seen.READER} if depends else {}


def of_live(live: Live) -> dict[str, str]:
    """Hash the code of live rewards and of an algorithm as far as it can be read."""
    found: dict[str, str] = {}
    rewards = live.rewards.rewards if live.rewards else {}
    coded: dict[str, Any] = {f"reward.{label}": reward for label, reward in rewards.items()}
    others = {"algorithm": live.algorithm, "features": live.features}
    coded |= {name: thing for name, thing in others.items() if thing}
    for name, thing in coded.items():
        code = thing if inspect.isfunction(thing) else getattr(thing, "function", type(thing))
        with suppress(OSError, TypeError):
            found[f"code of {name}"] = _hex(inspect.getsource(code).encode())
    return found


def _content(value: Any) -> str:
    """Represent a value that is no text or number by the bytes of a picture, else its type."""
    kind = type(value).__name__
    return f"{kind} {_hex(value.tobytes())}" if hasattr(value, "tobytes") else kind


def differences(old: Mapping[str, Any], new: Identity, run: Path) -> list[str]:
    """List forbidden differences, as "optimizer.lr 0.0003 -> 1e-05", in the sections that both
    have. Other sources of the same version may differ: an edited comment is such a difference.
    """
    found = []
    old = {"reader": {}, **old}  # earlier versions did not keep this section
    usual: Mapping[str, Any] = {}
    if "config" in old:
        old = {**old, "config": without_gone(old["config"], whatever=True)}
        usual = flatten(Facts({}, algorithm_schema(new["config"]["algorithm"]["name"])).usual())
    for section in (old.keys() & new.keys()) - {"sources"}:
        before, now = flatten(old[section]), flatten(new[section])
        for key in sorted(before.keys() | now.keys()):
            a, b = before.get(key), now.get(key)
            if a == b and (key in before) == (key in now):
                continue
            # a setting that is newer than the checkpoint has the value that it had without it
            if section == "config" and key not in before and key in usual and b == usual[key]:
                continue
            if section != "config":
                found.append(f"{key} ({_short(a)} -> {_short(b)})")
            elif not _may_differ(key, now, run):
                found.append(f"{key} {_said(key, before)} -> {_said(key, now)}")
    return sorted(found)


def _may_differ(key: str, now: Mapping[str, Any], run: Path) -> bool:
    if key == "iterations":
        # with any other schedule the learning rate depends on the number of iterations
        return now.get("optimizer.schedule") == "constant"
    moved = key == "output" and Path(now[key] or "") == run
    return moved or key.startswith(RESUMABLE)


def _said(key: str, values: Mapping[str, Any]) -> str:
    return shortened(values[key]) if key in values else "unset"


def _short(value: str | None) -> str:
    return "absent" if value is None else value[:8]


def _named(cfg: Config) -> Iterator[str]:
    """Yield files that settings name and a run reads, and the folders of a model and of a LoRA."""
    data = cfg.data
    folders = (data.offline, data.validation, cfg.anchor.data.source)
    lists = [str(list_of(Path(folder))) for folder in folders if folder]
    texts = [*data.sources, data.eval, *lists]
    settings = (cfg.algorithm, *(s.model_dump() for s in (cfg.model, data, cfg.diversity)))
    for value in chain(*(flatten(section).values() for section in settings)):
        texts += [value.rpartition(":")[0]] if is_place(value) else []
    for key, value in flatten(cfg.reward).items():
        if key.rpartition(".")[2] not in WRITTEN and isinstance(value, str):
            texts += [value, value.rpartition(":")[0]]  # a setting may be "own.py:function"
    yield from (text for text in texts if text and os.path.isfile(text))
    taught = (cfg.algorithm.get("teachers") or {}).values()
    adapters = [lora_folder(Path(own["adapter"])) for own in taught if own["adapter"]]
    places = (cfg.train.init_lora, cfg.model.source, cfg.diversity.weights, *map(str, adapters))
    yield from (text for text in places if text and os.path.exists(text))


def _datasets(cfg: Config) -> dict[str, str]:
    """Return versions of the datasets that `data` names: a hash of a folder's files, or the
    library's fingerprint of a dataset on the hub, which depends on its commit."""
    found = {}
    for source in (*cfg.data.sources, cfg.data.eval):
        if source is not None and hf.is_dataset(source):
            folder = hf.folder_of(source)
            found[source] = digest(folder) if folder else hf.fingerprint(source)
    return found


def digest(path: Path) -> str:
    """Hash a file, or the names and files of a folder. A large file, and an image or a video, is
    hashed by its size and both ends."""
    if path.is_dir():
        inside = sorted(place for place in path.rglob("*") if place.is_file())
        lines = (f"{place.relative_to(path)} {digest(place)}" for place in inside)
        return _hex("\n".join(lines).encode())
    size, media = path.stat().st_size, path.suffix.lower() in MEDIA_SUFFIXES
    whole, ends = (2 * MEDIA_ENDS, MEDIA_ENDS) if media else (WHOLE, ENDS)
    with path.open("rb") as file:
        if size <= whole:
            return hashlib.file_digest(file, "sha256").hexdigest()
        first = file.read(ends)
        file.seek(size - ends)
        return _hex(str(size).encode() + first + file.read(ends))


def _sources() -> str:
    """Hash flowrl's Python files."""
    places = [Path(__file__).parents[1]]
    for name in ("flowrl.samplers", "flowrl.rewards"):  # these two lie beside flowrl/ in a checkout
        places += map(Path, importlib.import_module(name).__path__)
    lines = []
    for place in places:
        for path in sorted(place.rglob("*.py")):
            inside = path.relative_to(place)
            if inside.parts[0] not in UNCOUNTED:
                lines.append(f"{place.name} {inside.as_posix()} {_hex(path.read_bytes())}")
    return _hex("\n".join(lines).encode())


def _frozen(policy: Policy) -> dict[str, Tensor]:
    """Return the tensors of a policy's networks without its own adapters, but with those that came
    with its pipeline."""
    views = getattr(policy.trainable, "views", {}).values()
    adapters = [f".{adapter}." for names in views for adapter in names]
    return {
        f"{part}.{name}": tensor
        for part, module in {**policy.modules, **policy.trainable.modules}.items()
        for key, stored in module.state_dict().items()
        if not any(adapter in key for adapter in adapters)
        for name, tensor in plain_tensors(key, stored)
    }


def _tensors(holder: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the networks among a reward's attributes, and of rewards that it wraps."""
    for name, value in vars(holder).items():
        if isinstance(value, nn.Module):
            for key, tensor in value.state_dict().items():
                yield f"{prefix}{name}.{key}", tensor
        elif isinstance(value, Reward):
            yield from _tensors(value, f"{prefix}{name}.")
        elif isinstance(value, dict):  # a dict may hold several rewards
            for label, inner in value.items():
                if isinstance(inner, Reward):
                    yield from _tensors(inner, f"{prefix}{name}.{label}.")


def _sampled(tensors: Mapping[str, Tensor]) -> str:
    """Hash the shapes, and a few values of each tensor, without a pass over gigabytes."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hashed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel() and not tensor.is_meta:
            flat = tensor.detach().reshape(-1)
            if flat.element_size() == 1:  # not every device computes with 8-bit types
                flat = flat.view(torch.uint8)
            # places in integers: fp32 cannot name a place past 2^24
            count = min(SAMPLED, flat.numel())
            places = torch.arange(count) * (flat.numel() - 1) // max(count - 1, 1)
            hashed.update(str(flat[places.to(flat.device)].double().tolist()).encode())
    return hashed.hexdigest()


def _hex(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
