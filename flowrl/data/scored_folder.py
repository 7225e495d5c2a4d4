"""A folder of scored media, which `flowrl score` writes: the best of each prompt, or all.

A scored folder is scores.jsonl, one line a sample, and the media that it names by their path from
the folder:

    {"file": "media/a.png", "prompt": "a red circle", "scores": {"jpeg": -0.004}, "weights":
    {"jpeg": 1.0}, "total": -0.004, **meta}

Every line carries the weights of its total, so lists can be cut and joined. scored_dataset.py reads
such folders for training.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from flowrl.data import conditions, tables
from flowrl.data.samples import LIST, Sample
from flowrl.runtime.paths import relative
from flowrl.runtime.store import files as disk


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSample:
    """A sample with its scores."""

    sample: Sample  # file and prompt
    scores: dict[str, float]  # reward -> raw score; NaN where a reward of weight 0 failed
    total: float  # weighted sum of the scores, which is finite


def keep_top(scored: Sequence[ScoredSample], top: int | Fraction) -> list[ScoredSample]:
    """Keep the `top` best of each prompt by total, in their order, or that share of them, rounded
    down; at least one. The earlier one of equals is kept."""
    of_prompt: dict[str, list[int]] = defaultdict(list)
    for place, item in enumerate(scored):
        of_prompt[item.sample.prompt].append(place)
    kept: list[int] = []
    for places in of_prompt.values():
        count = top if isinstance(top, int) else max(1, int(top * len(places)))
        kept += sorted(places, key=lambda place: -scored[place].total)[:count]
    return [scored[place] for place in sorted(kept)]


def parse_keep(text: str) -> int | Fraction:
    """Read a share of each prompt's images, "20%" -> Fraction(1, 5), or a count, "3" -> 3.

    Anything else, or out of range -> ValueError.
    """
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


def check_target(target: Path, samples: Sequence[Sample]) -> None:
    """Raise ValueError unless `write` can put its list there: it replaces no list, and does not
    mix copies with their originals."""
    path = list_of(target)
    if path.exists():
        raise ValueError(f"{path} exists; choose another place for -o, or remove it")
    if path.parent.exists() and not path.parent.is_dir():
        raise ValueError(
            f"{path.parent} is a file; give a folder for -o, or a name that ends in .jsonl, .csv or"
            " .parquet"
        )
    if target == path:
        tables.check_suffix(path)
        return
    for sample in samples:
        if target.resolve() in sample.path.resolve().parents:
            raise ValueError(
                f"-o {target} holds {sample.path} itself; choose another folder, or -o {path} for a"
                " list without copies"
            )


def list_of(target: Path) -> Path:
    """The list of a scored folder, or `target` itself when its ending is a list's."""
    return target if target.suffix in tables.SUFFIXES else target / LIST


def write(target: Path, scored: Sequence[ScoredSample], weights: Mapping[str, float]) -> Path:
    """Write a folder with copies of the media, which can be moved -> its list.

    X.jsonl, X.csv, X.parquet: only a list, which names them where they are.
    """
    path = list_of(target)
    disk.clean(path.parent)
    files = [item.sample.path for item in scored]
    if target != path:
        files = _copy(files, target / "media")
    entries = [
        conditions.from_folder(entry(item, relative(file, path.parent), weights), path.parent)
        for item, file in zip(scored, files, strict=True)
    ]
    return tables.write(path, entries)


def entry(item: ScoredSample, file: str, weights: Mapping[str, float]) -> dict[str, Any]:
    """The line of a list about a sample, whose media the list finds at `file`."""
    known = {label: v if math.isfinite(v) else None for label, v in item.scores.items()}
    line = {
        "file": Path(file).as_posix(),
        "prompt": item.sample.prompt,
        "scores": known,
        "weights": dict(weights),
        "total": item.total,
    }
    return line | item.sample.meta


def _copy(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Copy files into the folder; one whose name is taken gets a number: a.png, a-2.png.

    A \\ in a name would part folders on Windows, and becomes _.
    """
    disk.clean(folder)
    # lower-case name of a copy -> its original; some file systems ignore case
    copies: dict[str, Path] = {}
    out = []
    for path in paths:
        stem, number = path.stem.replace("\\", "_"), 1
        name = stem + path.suffix
        while copies.get(name.lower(), path) != path:
            number += 1
            name = f"{stem}-{number}{path.suffix}"
        if name.lower() not in copies:
            disk.write(folder / name, path.read_bytes())
        copies[name.lower()] = path
        out.append(folder / name)
    return out
