"""Prompts: a file, a dataset, or generated ones, and which of them an iteration sees."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.data import conditions, given, hf, tables, texts
from flowrl.data.entries import Columns
from flowrl.data.mixture import Mixture, epoch_part
from flowrl.runtime.paths import located
from flowrl.runtime.registry import did_you_mean, is_place
from flowrl.runtime.text import printable
from flowrl.types import MediaContext, PromptBatch

Prompts = list[dict[str, Any]]  # each {"prompt": text, **meta}
WORLDS = {
    "shapes": "flowrl.shapes.prompts",
    "shapes_motion": "flowrl.scenes.shapes:MOTIONS",
    "shapes_edit": "flowrl.scenes.shapes:EDITS",
    "stickers": "flowrl.scenes.stickers.prompts",
    "stickers_motion": "flowrl.scenes.stickers.world:MOTIONS",
    "stickers_edit": "flowrl.scenes.stickers.world:EDITS",
    "geneval": "flowrl.data.geneval",
    "ocr": "flowrl.data.ocr",
    "everyday": "flowrl.data.everyday",
}


def load_prompts(source: str, columns: Columns = tables.NOTHING) -> Prompts:
    """Load prompts of a file, whose form its content decides; prompts that ship (a name of WORLDS
    with :train or :eval); prompts from a function of the user's (path/to/file.py:NAME); or prompts
    of a dataset (hf:OWNER/NAME, see flowrl/data/hf.py).

    Forms of files: one prompt a line (plain.py), JSON, tables (texts.py), parquet, tar shards of
    webdataset; a row is {"prompt": ..., **meta}. "reference" is the path of an image, from the
    file's folder, that joins the prompt's group as one more scored member; conditions ("image",
    "mask" ..., see flowrl/data/conditions.py) are arguments of the pipeline's call. columns: the
    columns of a table that are taken, by their names here; empty: all of them. A missing, empty,
    non-UTF-8 or malformed file -> ValueError that names the file and the line or byte.
    """
    if source.partition(":")[0] in WORLDS:
        return _generated(source)
    if is_place(source):
        return given.of_place(source)
    if hf.is_dataset(source):
        return tables.of_dataset(source, columns)
    path = located(source)
    if path.suffix == ".py":
        raise ValueError(f"prompts {source}: say what in the file gives them, {source}:NAME")
    return [entry for _, entry in tables.read(path, columns)]


def load_training(data: Any) -> Prompts:
    """Load the prompts to train on that section `data` of a config names: those of data.train, or
    of the files of data.mixture, where the domain of a file is that of each of its prompts."""
    if not data.mixture:
        return load_prompts(data.train, data.columns)
    parts = {}
    for file in data.mixture:
        rows = load_prompts(file.path, data.columns)
        if file.domain is not None:
            if stated := next((row for row in rows if data.domain in row), None):
                raise ValueError(
                    f"data.mixture: {file.path} has domain={file.domain}, and its prompt"
                    f' "{printable(stated["prompt"], 60)}" has "{data.domain}" itself; leave one of'
                    " the two out"
                )
            rows = [{**row, data.domain: file.domain} for row in rows]
        parts[file.path] = rows
    return Mixture(parts, [file.weight for file in data.mixture])


def of_words(words: Sequence[str], columns: Columns = tables.NOTHING) -> list[str] | Prompts:
    """Prompts of a command: each word is a prompt, or what `load_prompts` takes. They are texts if
    none of them brings more."""
    found: Prompts = []
    for word in words:
        found += load_prompts(word, columns) if _is_source(word) else [{"prompt": word}]
    return found if any(len(row) > 1 for row in found) else [row["prompt"] for row in found]


def _is_source(word: str) -> bool:
    """Whether a word names prompts, and is none itself."""
    suffix = Path(word).suffix
    if len(word.split()) > 1 or (os.path.isfile(word) and (suffix or os.sep in word)):
        return os.path.isfile(word)
    listed = suffix in (".txt", ".tar", *tables.SUFFIXES, *texts.JSON, *texts.TABLES)
    own = word.partition(":")[0] in WORLDS and ":" in word
    return listed or own or hf.is_dataset(word) or is_place(word)


def example(source: str | None, columns: Columns = tables.NOTHING) -> conditions.Conditions | None:
    """Conditions of the first prompt of a source, if it has some."""
    found = conditions.of(load_prompts(source, columns)[:1]) if source else None
    return found[0] if found else None


def batch(prompts: Prompts, *, iteration: int, size: int, seed: int) -> PromptBatch:
    """Choose the `size` prompts of an iteration, which is counted from 0.

    An epoch is a shuffle by (seed, epoch) cut into whole batches. It depends on the arguments
    alone, so a resumed run continues with the prompts it would have seen. No prompt is twice in a
    batch; the remainder of an epoch, another one each time, is left out. A mixture draws from each
    of its files by weight. ids are places in `prompts`. A size above the number of prompts ->
    ValueError.
    """
    if size > len(prompts):
        raise ValueError(
            f"batch.prompts={size} is more than the {len(prompts)} prompts to train on; try"
            f" {len(prompts)} or add prompts"
        )
    if isinstance(prompts, Mixture):
        return select(prompts, prompts.drawn(iteration, size, seed))
    return select(prompts, epoch_part(len(prompts), iteration=iteration, size=size, seed=seed))


def select(prompts: Prompts, ids: Tensor) -> PromptBatch:
    """The prompts at `ids` (P,), in that order."""
    rows = [prompts[i] for i in ids.tolist()]
    meta = [{key: value for key, value in row.items() if key != "prompt"} for row in rows]
    return PromptBatch(text=[row["prompt"] for row in rows], ids=ids, meta=meta)


def meta_rows(prompts: Prompts, ids: list[int], media: Tensor) -> tuple[list[str], MediaContext]:
    """The texts and the context of media (B, ...) of prompts[i] for i in ids (B), which are the
    groups."""
    batch = select(prompts, torch.tensor(ids))
    return batch.text, conditions.context_of(batch.meta, media, batch.ids)


def check_source(source: str) -> None:
    """Raise ValueError for a generated list that is not known, or a file that is not there; no list
    is read."""
    parts = [f"{world}:{part}" for world in WORLDS for part in ("train", "eval")]
    if source.partition(":")[0] in WORLDS:
        if source not in parts:
            raise ValueError(f'unknown data "{source}"{did_you_mean(source, parts)}')
    elif not is_place(source) and not hf.is_dataset(source) and not located(source).is_file():
        tables.read(located(source))  # whose error says which files there may be


def _generated(source: str) -> Prompts:
    check_source(source)
    world, _, part = source.partition(":")
    return getattr(lists_of(world), f"{part}_prompts")()


def lists_of(world: str) -> Any:
    """Import what lists the prompts of one of WORLDS."""
    module, _, name = WORLDS[world].partition(":")
    lists = importlib.import_module(module)
    return getattr(lists, name) if name else lists


def references(prompts: Prompts) -> list[Path]:
    """Reference images that prompts name, each once."""
    found = (reference_of(prompt["prompt"], prompt) for prompt in prompts)
    return list(dict.fromkeys(path for path in found if path is not None))


def reference_of(text: str, meta: Mapping[str, Any]) -> Path | None:
    """The image that joins the prompt's group as one more scored member."""
    path = meta.get("reference")
    if path is None:
        return None
    if not isinstance(path, str) or not path:
        raise ValueError(
            f'the prompt "{text}" has reference={path!r}, which should be the path of an image'
        )
    return Path(path)
