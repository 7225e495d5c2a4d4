"""The architecture of a pipeline without its weights: the numbers of its components' config files.

They come from a folder in diffusers layout, from a snapshot of the hub in this machine's cache, or
from configs/architecture, for the models of configs/model. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowrl.policy.folder import INDEX, MODULAR, index_in
from flowrl.policy.load import cast, resolve_source
from flowrl.runtime import hub, registry, yaml_text
from flowrl.runtime.log import quiet
from flowrl.runtime.paths import packaged

SKIPPED = ("scheduler", "tokenizer", "feature_extractor", "image_processor", "processor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The components of a pipeline, by their configs."""

    source: str  # name, folder or hub id that was asked for
    pipeline: str  # name of the pipeline's class
    parts: Mapping[str, Mapping[str, Any]]  # component -> its config, with its "_class_name"
    where: str  # place from which the configs were read
    settings: Mapping[str, Any]  # what the pipeline's own index sets, such as expand_timesteps

    def config(self, part: str) -> dict[str, Any]:
        """Return a component's config, with the defaults of its class."""
        own = self.parts[part]
        cls = class_of(str(own["_class_name"]))
        if getattr(cls, "config_class", None) is not None:
            return cls.config_class(**_plain(own)).to_dict()
        parameters = inspect.signature(cls.__init__).parameters.items()
        return {name: p.default for name, p in parameters if p.default is not p.empty} | dict(own)

    def build(
        self, part: str, dtype: torch.dtype, device: torch.device | str = "meta"
    ) -> nn.Module:
        """Build a component with new weights, frozen and in eval mode; on the meta device it has
        shapes and no values."""
        own = _plain(self.parts[part])
        cls = class_of(str(self.parts[part]["_class_name"]))
        with quiet(), torch.device(device):
            if getattr(cls, "config_class", None) is not None:
                module = cls(cls.config_class(**own))
            else:
                module = cls.from_config({**own, "_class_name": cls.__name__})
            cast(module, dtype)
            return module.to(device).eval().requires_grad_(False)


def class_of(name: str) -> Any:
    """Find the class of diffusers or transformers with this name; ValueError for another name."""
    for package in ("diffusers", "transformers"):
        found = getattr(import_module(package), name, None)
        if found is not None:
            return found
    raise ValueError(f"neither diffusers nor transformers has {name}, which this model is made of")


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the private keys of diffusers."""
    return {key: value for key, value in config.items() if not key.startswith("_")}


def read(source: str) -> Architecture:
    """Read the architecture behind a name of configs/model, a folder or a hub id; ValueError if it
    is neither known nor on this machine."""
    name = packaged(resolve_source(source)[0])
    if registry.is_place(name):
        raise ValueError(
            f'"{name}" is made by code, and a budget reads config files; train with iterations=2,'
            " which measures seconds and memory"
        )
    folder = Path(name) if Path(name).is_dir() else _cached(name)
    if folder is not None:
        return _of_folder(source, folder)
    known = _known()
    repo = hub.split(name)[0]
    if repo not in known:
        raise ValueError(
            f'the architecture of "{name}" is not known: it is no folder, no snapshot of it is on'
            f" this machine, and configs/architecture holds {', '.join(sorted(known))}; download"
            " its config files, or give a folder"
        )
    tree = dict(known[repo])
    parts = {key: value for key, value in tree.items() if isinstance(value, dict)}
    return Architecture(
        source=source,
        pipeline=tree["pipeline"],
        parts=parts,
        where=f"configs/architecture, {repo}",
        settings={key: value for key, value in tree.items() if key not in parts},
    )


@cache
def _known() -> dict[str, dict[str, Any]]:
    """Read configs/architecture, by hub id."""
    files = (resources.files("flowrl.configs") / "architecture").iterdir()
    trees: list[Any] = [
        yaml_text.load(file.read_text(encoding="utf-8"))
        for file in files
        if file.name.endswith(".yaml")
    ]
    return {tree["source"]: tree for tree in trees}


def _cached(name: str) -> Path | None:
    """Find the folder of a snapshot in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    repo, revision = hub.split(name)
    if repo.count("/") != 1 or repo.startswith((".", "/")):
        return None
    for name in (INDEX, MODULAR):
        found = try_to_load_from_cache(repo, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def _of_folder(source: str, folder: Path) -> Architecture:
    """Read the architecture of a folder in diffusers layout. A modular pipeline makes the calls of
    the classic one with its name, and its index says of each component where it is."""
    found = index_in(folder)
    if not found:
        raise ValueError(f"{folder} holds no {INDEX}; give the folder of a pipeline")
    index = json.loads((folder / found).read_text(encoding="utf-8"))
    parts = {}
    for part, entry in index.items():
        if not isinstance(entry, list) or part.startswith(SKIPPED):
            continue
        spec = entry[2] if len(entry) == 3 else {}
        cls = entry[1] or (spec.get("type_hint") or [None, None])[1]
        whole = spec.get("pretrained_model_name_or_path", ".")
        if cls is None or whole is None:  # the pipeline does without it
            continue
        place = folder / whole if (folder / whole).is_dir() else _cached(whole) or Path(whole)
        config = place / (spec.get("subfolder") or part) / "config.json"
        if not config.is_file():
            raise ValueError(f"{config} is missing, of which {found} says that it is")
        own = json.loads(config.read_text(encoding="utf-8"))
        parts[part] = {**own, "_class_name": cls}
    pipeline = str(index["_class_name"]).replace("ModularPipeline", "Pipeline")
    settings = {key: value for key, value in index.items() if not isinstance(value, list)}
    return Architecture(
        source=source, pipeline=pipeline, parts=parts, where=str(folder), settings=settings
    )
