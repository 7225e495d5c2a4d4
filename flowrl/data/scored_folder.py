"""Scores of image files: which prompt each file belongs to, its rewards, the best of each prompt,
and a folder that holds the result.

A scored folder is scores.jsonl, one line a sample, and the media that it names by their path from
the folder:

    {"file": "media/a.png", "prompt": "a red circle", "scores": {"jpeg": -0.004}, "weights":
    {"jpeg": 1.0}, "total": -0.004, **meta}

Every line carries the weights of its total, so lists can be cut and joined. flowrl/rollouts/from_files.py
trains on such folders.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from flowrl.data.media import IMAGE_SUFFIXES
from flowrl.data.prompts import load_prompts

LIST = "scores.jsonl"


OWN_LISTS = (LIST, "metadata.jsonl")  # of a folder, the first that is there


RESERVED = (
    "file",
    "file_name",
    "prompt",
    "scores",
    "weights",
    "total",
)  # keys of a line that are no meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A file and the prompt it is judged by; meta is what rewards may read of the prompt."""

    path: Path
    prompt: str
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A sample, its raw score by reward (NaN where a reward of weight 0 failed) and their weighted
    sum, which is finite."""

    sample: Sample
    scores: dict[str, float]
    total: float


def keep_top(scored: Sequence[Scored], top: int | Fraction) -> list[Scored]:
    """The best of each prompt by total, in their order: `top` of them, or that share rounded down;
    at least one. Ties: the earlier."""
    of_prompt: dict[str, list[int]] = defaultdict(list)
    for place, item in enumerate(scored):
        of_prompt[item.sample.prompt].append(place)
    kept: list[int] = []
    for places in of_prompt.values():
        count = top if isinstance(top, int) else max(1, int(top * len(places)))
        kept += sorted(places, key=lambda place: -scored[place].total)[:count]
    return [scored[place] for place in sorted(kept)]


def parse_keep(text: str) -> int | Fraction:
    """A share of each prompt's images, "20%" -> Fraction(1, 5), or a count, "3" -> 3; else, or out
    of range -> ValueError."""
    share = text.endswith("%")
    try:
        top = Fraction(text[:-1]) / 100 if share else int(text)
    except (ValueError, ZeroDivisionError):
        top = 0
    if top <= 0 or (share and top > 1):
        raise ValueError(
            f"--keep-top {text} should be a share of each prompt's images, such as 20%, or a count"
            " from 1, such as 3"
        )
    return top


def collect(
    media: Sequence[Path], *, prompt: str | None = None, prompts: Path | None = None
) -> list[Sample]:
    """Images with their prompts; a folder stands for every image below it, in the order of their
    paths.

    prompt: of all. prompts: a .jsonl file with {"file", "prompt", **meta} a line, "file" from the
    place of the list, or a bare name;
    an image may have several lines. Neither: each folder's own scores.jsonl or metadata.jsonl
    ("file_name" is read as "file"), whose lines are the samples. An image without a prompt, given
    twice for one, or sharing a line with another -> ValueError.
    """
    if prompt is not None and prompts is not None:
        raise ValueError("give --prompt, for all images, or --prompts, a list; not both")
    if prompt is not None:
        if not prompt.strip():
            raise ValueError("--prompt is empty; give the text that the images are judged by")
        samples = [
            Sample(path=path, prompt=prompt, meta={}) for place in media for path in images(place)
        ]
    elif prompts is not None:
        samples = _listed([path for place in media for path in images(place)], prompts)
    else:
        samples = [sample for place in media for sample in _own(place)]
    seen = set()
    for sample in samples:
        name = (sample.path.resolve(), sample.prompt)
        if name in seen:
            raise ValueError(
                f'{sample.path} is given twice for the prompt "{sample.prompt}"; name each image'
                " once"
            )
        seen.add(name)
    return samples


def images(place: Path) -> list[Path]:
    """The file itself, or every image below a folder but hidden ones; none, or a file of another
    kind -> ValueError."""
    known = ", ".join(IMAGE_SUFFIXES)
    if place.is_dir():
        found = sorted(
            path
            for path in place.rglob("*")
            if path.suffix.lower() in IMAGE_SUFFIXES and path.name[0] != "."
        )
        if not found:
            raise ValueError(f"{place} holds no image ({known})")
        return found
    if not place.is_file():
        raise ValueError(f"{place} does not exist; give image files, or a folder of them")
    if place.suffix.lower() not in IMAGE_SUFFIXES:
        raise ValueError(f"{place} is no image file; what is scored ends in {known}")
    return [place]


def read_list(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(where, entry) of each line of a .jsonl list, every entry with a "file" and a "prompt"; else
    ValueError naming file and line."""
    if path.suffix != ".jsonl":
        raise ValueError(
            f'{path} is no .jsonl list; each line of one is like {{"file": "a.png", "prompt": "a'
            ' red circle"}'
        )
    entries = load_prompts(str(path))  # judges the file, its JSON and the prompts
    numbers = [
        n
        for n, line in enumerate(path.read_bytes().decode("utf-8-sig").split("\n"), 1)
        if line.strip()
    ]
    out = []
    for number, entry in zip(numbers, entries, strict=True):
        file = entry.get("file", entry.get("file_name"))
        if not isinstance(file, str) or not file:
            raise ValueError(
                f'{path}, line {number} needs a "file", the path of an image, as in {{"file":'
                ' "a.png", "prompt": "..."}'
            )
        out.append((f"{path}, line {number}", {**entry, "file": file}))
    return out


def _sample(path: Path, entry: Mapping[str, Any]) -> Sample:
    return Sample(path=path, prompt=entry["prompt"], meta=meta_of(entry))


def meta_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a line says beside the file, its prompt and its scores."""
    return {key: value for key, value in entry.items() if key not in RESERVED}


def _listed(paths: Sequence[Path], source: Path) -> list[Sample]:
    """Samples of the lines that name each image, by path or by bare name."""
    by_file: dict[str | Path, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for where, entry in read_list(source):
        by_file[(source.parent / entry["file"]).resolve()].append((where, entry))
        if Path(entry["file"]).name == entry["file"]:
            by_file[entry["file"]].append((where, entry))
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


def _own(place: Path) -> list[Sample]:
    """Samples of a folder's own list, which must name every image below the folder."""
    source = next((place / name for name in OWN_LISTS if (place / name).is_file()), None)
    if source is None:
        known = f" or a {' or '.join(OWN_LISTS)} in it" if place.is_dir() else ""
        raise ValueError(
            f"{place} has no prompt; give --prompt TEXT for all images, --prompts FILE.jsonl{known}"
        )
    samples = [_sample(place / entry["file"], entry) for _, entry in read_list(source)]
    named = {sample.path.resolve() for sample in samples}
    for path in images(place):
        if path.resolve() not in named:
            raise ValueError(
                f"{path} has no line in {source}; add one, or give --prompts with another list"
            )
    return samples


def check_target(target: Path, samples: Sequence[Sample]) -> None:
    """ValueError unless `write` can put its list there without replacing one, or mixing copies with
    their originals."""
    path = list_of(target)
    if path.exists():
        raise ValueError(f"{path} exists; choose another place for -o, or remove it")
    if path.parent.exists() and not path.parent.is_dir():
        raise ValueError(
            f"{path.parent} is a file; give a folder for -o, or a name that ends in .jsonl"
        )
    inside = [
        s.path for s in samples if target != path and target.resolve() in s.path.resolve().parents
    ]
    if inside:
        raise ValueError(
            f"-o {target} holds {inside[0]} itself; choose another folder, or -o {path} for a list"
            " without copies"
        )


def list_of(target: Path) -> Path:
    """The list of a scored folder, or `target` itself when it is a .jsonl file."""
    return target if target.suffix == ".jsonl" else target / LIST


def write(target: Path, scored: Sequence[Scored], weights: Mapping[str, float]) -> Path:
    """Write a folder with copies of the media, which can be moved, or (X.jsonl) a list that names
    them where they are -> the list."""
    path = list_of(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = (
        _copy([item.sample.path for item in scored], target / "media")
        if target != path
        else [item.sample.path for item in scored]
    )
    lines = []
    for item, file in zip(scored, files, strict=True):
        line = {
            "file": Path(os.path.relpath(file.resolve(), path.parent.resolve())).as_posix(),
            "prompt": item.sample.prompt,
            "scores": {
                label: value if math.isfinite(value) else None
                for label, value in item.scores.items()
            },
            "weights": dict(weights),
            "total": item.total,
        }
        lines.append(json.dumps(line | item.sample.meta, ensure_ascii=False) + "\n")
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text("".join(lines), encoding="utf-8")
    os.replace(unfinished, path)
    return path


def _copy(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Copy files into the folder; one whose name is taken gets a number: a.png, a-2.png."""
    folder.mkdir(exist_ok=True)
    copies: dict[str, Path] = {}  # by lower-case name: file systems differ in whether case matters
    out = []
    for path in paths:
        name, number = path.name, 1
        while copies.get(name.lower(), path) != path:
            number += 1
            name = f"{path.stem}-{number}{path.suffix}"
        if name.lower() not in copies:
            shutil.copyfile(path, folder / name)
        copies[name.lower()] = path
        out.append(folder / name)
    return out
