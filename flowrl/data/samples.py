"""Image files and the prompts that they are judged by.

A list of files says {"file", "prompt", **meta} of each; a scored folder's scores.jsonl is one too.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.data import tables
from flowrl.data.entries import Columns
from flowrl.data.media import IMAGE_SUFFIXES
from flowrl.runtime.log import logger
from flowrl.runtime.paths import located, nearby
from flowrl.runtime.text import listed

LIST = "scores.jsonl"
OWN_LISTS = (
    LIST,
    "metadata.jsonl",
    "metadata.csv",
    "metadata.parquet",
)  # lists of a folder: the first that exists is read
# keys of a line that are not meta
RESERVED = ("file", "file_name", "prompt", "scores", "weights", "total")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A file and the prompt that it is judged by."""

    path: Path  # path of the image or video
    prompt: str  # text by which the file is judged
    meta: dict[str, Any]  # values that rewards may read beside the prompt


def collect(
    media: Sequence[Path],
    *,
    prompt: str | None = None,
    prompts: Path | None = None,
    columns: Columns = tables.NOTHING,
    suffixes: Sequence[str] = IMAGE_SUFFIXES,
) -> list[Sample]:
    """Find the prompt of each image; a folder stands for every image below it, sorted by path.

    suffixes: endings that count as images; MEDIA_SUFFIXES: videos too. prompt: the prompt of all
    images. prompts: a list (see tables.py); "file" is a path from its folder, or a bare name; an
    image may have several lines. columns: columns of the list, as in `load_prompts`. With neither
    prompt nor prompts, each folder's own list is read, the first of OWN_LISTS ("file_name" is read
    as "file"); its lines are the samples.
    An image without a prompt, given twice for one, or sharing a line with another -> ValueError.
    """
    # the options exclude each other: a sample has one prompt
    if prompt is not None and prompts is not None:
        raise ValueError("give --prompt, for all images, or --prompts, a list; not both")
    if prompt is not None and not prompt.strip():
        raise ValueError("--prompt is empty; give the text that the images are judged by")
    if prompt is None and prompts is None:
        samples = [sample for place in media for sample in _own(place, suffixes)]
    else:
        lists = [prompts] if prompts else []
        paths = [path for place in media for path in images(place, suffixes, lists)]
        samples = (
            [Sample(path=path, prompt=prompt, meta={}) for path in paths]
            if prompt is not None
            else _listed(paths, prompts, columns)
        )
    _check_distinct(samples)
    return samples


def _check_distinct(samples: Sequence[Sample]) -> None:
    seen = set()
    for sample in samples:
        name = (sample.path.resolve(), sample.prompt)
        if name in seen:
            raise ValueError(
                f'{sample.path} is given twice for the prompt "{sample.prompt}"; name each image'
                " once"
            )
        seen.add(name)


def images(
    place: Path, suffixes: Sequence[str] = IMAGE_SUFFIXES, lists: Sequence[Path] = ()
) -> list[Path]:
    """Find the images that a path stands for: itself, or every image below a folder that is not
    hidden. Other files there are named in a warning, apart from `lists` and the folder's own list.

    No image, or a file of another kind -> ValueError.
    """
    known = ", ".join(suffixes)
    if place.is_dir():
        files = sorted(path for path in place.rglob("*") if path.name[0] != "." and path.is_file())
        found = [path for path in files if path.suffix.lower() in suffixes]
        read = {*found, *lists, *(place / name for name in OWN_LISTS)}
        left = [str(path.relative_to(place)) for path in files if path not in read]
        unread = f"{len(left)} of {len(files)} files in {place} are not read: {listed(left)}"
        if not found:
            raise ValueError(f"{place} holds no image ({known}){f'; {unread}' if left else ''}")
        if left:
            logger.warning(f"{unread}; what is read ends in {known}")
        return found
    if not place.is_file():
        there = nearby(place)
        raise ValueError(f"{place} does not exist{there}; give image files, or a folder of them")
    if place.suffix.lower() not in suffixes:
        raise ValueError(f"{place} is not an image file; what is scored ends in {known}")
    return [place]


def read_list(
    path: Path, columns: Columns = tables.NOTHING, *, contained: bool = False
) -> list[tuple[str, dict[str, Any]]]:
    """Read a list -> (where, entry) of each line, every entry with a "file" and a "prompt".

    contained: a "file" that leaves the list's folder, also by a link, is refused, because a list
    that comes with a folder was often written by somebody else. A wrong line -> ValueError that
    names file and line.
    """
    out = []
    for where, entry in tables.read(path, columns):
        file = entry.get("file", entry.get("file_name"))
        if not isinstance(file, str) or not file:
            raise ValueError(
                f'{where} needs a "file", the path of an image, as in {{"file":'
                ' "a.png", "prompt": "..."}'
            )
        if contained and not inside(path.parent, file):
            raise ValueError(
                f"{where} names {file!r}, which leaves the folder {path.parent} or is"
                " not written with /; if you trust the list, give it by its own path (--prompts,"
                " data.offline), which may name files anywhere"
            )
        # a line of `flowrl generate` holds the record of its prompt
        if {"place", "seed"} <= entry.keys() and isinstance(own := entry.get("entry"), Mapping):
            entry = {**own, **{key: value for key, value in entry.items() if key != "entry"}}
        out.append((where, {**entry, "file": file}))
    return out


def inside(folder: Path, file: str) -> bool:
    """Whether a path from the folder stays in it on every system, with links followed."""
    if "\\" in file or "\0" in file:
        return False
    return Path(os.path.realpath(folder / file)).is_relative_to(os.path.realpath(folder))


def meta_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a line beside its file, its prompt and its scores."""
    return {key: value for key, value in entry.items() if key not in RESERVED}


def _sample(path: Path, entry: Mapping[str, Any]) -> Sample:
    return Sample(path=path, prompt=entry["prompt"], meta=meta_of(entry))


def _listed(paths: Sequence[Path], source: Path, columns: Columns) -> list[Sample]:
    """The samples of images whose lines name them by path or by bare name."""
    by_file = _by_file(source, columns)
    out, served = [], {}
    for path in paths:
        lines = by_file.get(path.resolve()) or by_file.get(path.name)
        if not lines:
            raise ValueError(
                f'{path} has no line in {source}; add {{"file": "{path.name}", "prompt": "..."}}'
            )
        for where, entry in lines:
            other = served.setdefault(where, path)
            if other != path:
                raise ValueError(
                    f'{where} names both {other} and {path}; write paths as "file", or give each'
                    " image once"
                )
            out.append(_sample(path, entry))
    return out


def _by_file(source: Path, columns: Columns) -> dict[str | Path, list[tuple[str, dict[str, Any]]]]:
    """Sort the lines of a list by the path of their file, and by its name if that is all."""
    out: dict[str | Path, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for where, entry in read_list(source, columns):
        out[located(entry["file"], source.parent).resolve()].append((where, entry))
        if Path(entry["file"]).name == entry["file"]:
            out[entry["file"]].append((where, entry))
    return out


def _own(place: Path, suffixes: Sequence[str]) -> list[Sample]:
    """Read a folder's own list, which must name every image below the folder."""
    source = next((place / name for name in OWN_LISTS if (place / name).is_file()), None)
    if source is None:
        images(place, suffixes)  # a folder without any has no list, either
        known = f" or a {' or '.join(OWN_LISTS[:2])} in it" if place.is_dir() else ""
        raise ValueError(
            f"{place} has no prompt; give --prompt TEXT for all images, --prompts FILE.jsonl{known}"
        )
    lines = read_list(source, contained=True)
    samples = [_sample(place / entry["file"], entry) for _, entry in lines]
    named = {sample.path.resolve() for sample in samples}
    for path in images(place, suffixes):
        if path.resolve() not in named:
            raise ValueError(
                f"{path} has no line in {source}; add one, or give --prompts with another list"
            )
    return samples
