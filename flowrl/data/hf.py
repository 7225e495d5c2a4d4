"""Datasets of Hugging Face by name: hf:OWNER/NAME, hf:OWNER/NAME@REVISION, or hf:FOLDER with what
save_to_disk wrote or with parquet, csv or json files or tar shards; then :SPLIT, or "train"."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.data.stored import PictureCell, is_struct
from flowrl.runtime import hub
from flowrl.runtime.install import install_line
from flowrl.runtime.paths import located
from flowrl.runtime.registry import did_you_mean

PREFIX = "hf:"
CHUNK = 256  # rows whose encoded pictures are looked at together
SAVED = ("state.json", "dataset_dict.json")  # files that save_to_disk writes


def is_dataset(source: object) -> bool:
    return isinstance(source, str) and source.startswith(PREFIX)


def folder_of(source: str) -> Path | None:
    """The folder that a source names; None where it names a dataset on the hub."""
    folder = located(_parts(source)[0])
    return folder if folder.is_dir() else None


def fingerprint(source: str) -> str:
    """The library's hash of a dataset, which depends on its commit and split."""
    return opened(source)[0]


def rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read a dataset -> (where, row) of each row, with pictures as PictureCell. A dataset that
    cannot be loaded, or has no rows -> ValueError."""
    data = opened(source)[1]
    if not len(data):
        raise ValueError(f"data {source} has no rows; it needs one prompt or more")
    return _rows(source, data)


def _rows(source: str, data: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    pictures = [name for name, kind in data.features.items() if _is_picture(kind)]
    version, folder = fingerprint(source), folder_of(source) or Path()
    alone = {name: data.select_columns([name]) for name in pictures}
    filled = {name: _filled(data) for name, data in alone.items()}
    texts = data.remove_columns(pictures).to_list() or [{} for _ in range(len(data))]
    for number, row in enumerate(texts):
        where = f"{source}, row {number + 1}"
        for name in pictures:
            cell = partial(_cell, alone[name], number, name)
            there = filled[name][number]
            row[name] = PictureCell(where, name, version, folder, cell) if there else None
        yield where, row


def _filled(data: Any) -> list[bool]:
    """Whether each cell of the only column holds something."""
    parts = data.with_format("arrow").iter(batch_size=CHUNK)
    return [there for part in parts for there in part.column(0).is_valid().to_pylist()]


def _cell(data: Any, number: int, name: str) -> Any:
    return data[number][name]


def _is_picture(kind: Any) -> bool:
    """Whether a feature is a picture, or a list of them."""
    inner = getattr(kind, "feature", None)
    if inner is None and isinstance(kind, list):
        inner = kind[0]
    if inner is not None:
        return _is_picture(inner)
    return type(kind).__name__ == "Image" or (isinstance(kind, dict) and is_struct(set(kind)))


@functools.cache
def opened(source: str) -> tuple[str, Any]:
    """Load a dataset, once in a process -> (fingerprint, the dataset, whose pictures are not
    decoded)."""
    library = _library(source)
    _parts(source)  # a wrong name gets our own sentence, before the library sees it
    try:
        data = _loaded(library, source)
        return str(data._fingerprint), _encoded(data, library)
    except Exception as error:  # the library passes on errors of its parts and of the network
        why = " ".join(str(error.__cause__ or error).split())[:300]
        raise ValueError(f"data {source} cannot be loaded: {why}") from error


def _loaded(library: Any, source: str) -> Any:
    name, split = _parts(source)
    folder = folder_of(source)
    if Path(name).is_file():  # a tar shard
        return library.load_dataset("webdataset", data_files={split: name}, split=split)
    if folder is None:
        repository = hub.split(name)[0]
        data = library.load_dataset(repository, split=split, **hub.options(name))
        hub.note(name, dataset=True)
        return data
    if not any((folder / file).is_file() for file in SAVED):
        # an absolute path, because "csv" alone would name the library's reader of CSV files
        return library.load_dataset(str(folder.resolve()), split=split)
    data = library.load_from_disk(str(folder))
    if not isinstance(data, dict):
        return data
    if split not in data:
        raise ValueError(f'it has no split "{split}"{did_you_mean(split, data)}')
    return data[split]


def _encoded(data: Any, library: Any) -> Any:
    for name, kind in data.features.items():
        if type(kind).__name__ == "Image":
            data = data.cast_column(name, library.Image(decode=False))
        elif _is_picture(kind) and not isinstance(kind, dict):
            data = data.cast_column(name, library.List(library.Image(decode=False)))
    return data


def _parts(source: str) -> tuple[str, str]:
    """Split a source into (name or folder, split)."""
    name, _, split = source.removeprefix(PREFIX).partition(":")
    if not name:
        raise ValueError(f"data {source} names no dataset; give hf:OWNER/NAME or hf:FOLDER")
    return name, split or "train"


def _library(source: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f'data {source} needs the extra "datasets": {install_line("datasets")}, or give a'
            " .parquet, .csv or .jsonl file"
        ) from None
    return datasets
