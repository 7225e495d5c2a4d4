"""Media and preference pairs of a user's own: the layouts in which people keep them.

A media row has a file and its prompt, a pair row a prompt and two files, one of which is preferred.
Rows come from a list (.jsonl, .json, .csv, .tsv, .parquet), from a folder's metadata.jsonl, .csv or
.parquet, or from a folder in which each file has a .txt of the same name. The names of columns are
those of diffusers' imagefolder, Flow-Factory's lists, HPDv3 and verl-omni.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from flowrl.data import conditions, media, tables
from flowrl.data.media import MEDIA_SUFFIXES
from flowrl.data.samples import OWN_LISTS, inside
from flowrl.data.stored import PictureCell
from flowrl.runtime.log import logger
from flowrl.runtime.paths import located, nearby
from flowrl.runtime.text import listed

Kind = Literal["media", "pairs"]
TEXTS = ("prompt", "text", "caption")  # columns that hold the prompt, the first that is there
FILES = ("file", "file_name", "target", "media", "video", "image")  # those that hold the file
PAIRS = (
    ("chosen", "rejected"),
    ("path1", "path2"),
    ("img_win", "img_lose"),
    ("jpg_0", "jpg_1"),
)
SCORES = ("win_score", "lose_score")  # scores of the two files, whose difference is the margin
# HPDv2's lists: several files of a prompt, and how people ranked them
RANKED = (("image_path", "file_path"), ("human_preference", "rank"))
MASK = "mask"  # column of a pair's picture that is white where the errors of both files count
SAME_RATIO = 0.01  # most by which width / height of a mask may differ from that of its files
LABELS = (0.0, 0.5, 1.0)  # shares of raters who prefer the first file of a pair
NESTED = ("input", "supervision")  # objects of Flow-Factory's rows, whose columns are the row's
# columns that are read here, and not by rewards
OWN = ("label", "margin", *SCORES, "repeats", "type", "schema_version")
# columns of numbers and lists, which the cells of a .csv hold as text
CELLS = (*OWN, "label_0", "has_label", *RANKED[0], *RANKED[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedRow:
    """One row: a file with its prompt, or two files to compare."""

    where: str  # file and line, for errors
    prompt: str  # may be empty: the unconditional prompt
    files: tuple[Path | PictureCell, ...]  # one, or the preferred one and the other
    label: float  # share of raters who prefer the first; 1 for a single file
    # score of the first less that of the second, which takes the place of a label; None: not given
    margin: float | None
    weight: float  # weight of a pair in the loss
    # picture that is white where the pair's errors count; None: they count everywhere
    mask: Path | PictureCell | None
    repeats: int  # how often an epoch has the row
    meta: dict[str, Any]  # conditions of the prompt, and what rewards may read


class WrongRow(ValueError):
    """A row that cannot be trained on; the message names it."""

    def __init__(self, fault: str, said: str):
        super().__init__(said)
        self.fault = fault  # what is wrong, in the words under which `check --data` counts it


def is_supervised(path: Path) -> bool:
    """Whether a list or folder holds rows of media or pairs, and no scores."""
    if path.is_dir():
        return not (path / OWN_LISTS[0]).is_file()
    return path.is_file() and "total" not in tables.rows(path)[1][0][1]


def read(path: Path) -> tuple[Kind, list[SupervisedRow]]:
    """Read all rows -> (what they are, rows). ValueError that names file and row for a row without
    a file, a file that is not there, a pair of equal files, a label that is none of LABELS, or a
    list that has rows of both kinds."""
    contained = path.is_dir()
    each = [rows_of(*given, contained) for given in entries(path)]
    found = [row for rows in each for row in rows]
    if found and (left := each.count([])):
        logger.warning(f"{left:,} of {len(each):,} rows of {path} prefer no file, and are left out")
    if not found:
        raise ValueError(f"{path} holds no row with a label; there is nothing to train on")
    kinds = {len(row.files) for row in found}
    if len(kinds) > 1:
        other = next(row for row in found if len(row.files) != len(found[0].files))
        raise ValueError(
            f"{found[0].where} has {len(found[0].files)} file and {other.where} {len(other.files)};"
            " keep demonstrations and pairs in lists of their own"
        )
    return ("media" if kinds == {1} else "pairs"), found


def entries(path: Path) -> list[tuple[str, dict[str, Any], Path]]:
    """(where, row, folder of its files) of each row of a list or folder."""
    if not path.exists():
        raise ValueError(
            f"{path} does not exist{nearby(path)}; give a folder of media with a metadata.jsonl, or"
            " a list of files with their prompts"
        )
    if path.is_dir():
        listing = next((path / n for n in OWN_LISTS[1:] if (path / n).is_file()), None)
        if listing is None:
            return beside(path)
        path = listing
    return [
        (where.removeprefix("prompt file "), dict(row), path.parent) for where, row in rows(path)
    ]


def rows(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Rows of a list, whatever its form; ValueError for a line that has no columns."""
    form, found = tables.rows(path)
    for where, row in found:
        if form == "plain" or not isinstance(row, Mapping):
            raise ValueError(
                f'{where} names no file; a row is {{"file_name": "a.png", "prompt": "..."}}, or'
                ' {"prompt": "...", "chosen": "a.png", "rejected": "b.png"}'
            )
    return found


def beside(folder: Path) -> list[tuple[str, dict[str, Any], Path]]:
    """Rows of a folder in which each file has a .txt of its name, the prompt."""
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in MEDIA_SUFFIXES)
    without = [str(p.relative_to(folder)) for p in files if not p.with_suffix(".txt").is_file()]
    if not files or without:
        what = f"of {len(files)} files lack one: {listed(without)}" if files else "it holds none"
        raise ValueError(
            f"{folder} has no {' or '.join(OWN_LISTS[1:])}, and then each image or video needs a"
            f" .txt of its name with the prompt; {what}"
        )
    return [
        (
            str(p),
            {"file": p.name, "prompt": p.with_suffix(".txt").read_text("utf-8-sig").strip()},
            p.parent,
        )
        for p in files
    ]


def rows_of(
    where: str, entry: dict[str, Any], folder: Path, contained: bool
) -> list[SupervisedRow]:
    """Check an entry of a list -> its rows: one, none where it has no label (Pick-a-Pic's
    has_label=false), or each pair of which a ranking prefers one file, with weights that add up
    to 1. contained: files must not leave the folder."""
    for name in NESTED:
        if isinstance(entry.get(name), Mapping):
            entry |= entry.pop(name)
    entry |= {name: tables.parsed(entry[name]) for name in CELLS if name in entry}
    if entry.pop("has_label", True) is False:
        return []
    if "label_0" in entry:
        entry["label"] = entry.pop("label_0")
    files, ranks = (next((name for name in names if name in entry), "") for names in RANKED)
    if not ranks or not isinstance(entry.get(files), list):
        return [row_of(where, entry, folder, contained)]
    given = {name: entry.pop(name) for name in (files, ranks)}
    pairs = preferred(where, given[files], given[ranks], most=ranks != "rank")
    return [
        row_of(where, entry | {"chosen": a, "rejected": b}, folder, contained, 1 / len(pairs))
        for a, b in pairs
    ]


def preferred(where: str, files: list[str], ranks: Any, most: bool) -> list[tuple[str, str]]:
    """Pairs (preferred file, other) of files that people ranked. Ranks count from the best; with
    `most` set, ranks that are all 0 or 1 mark the preferred files with 1."""
    if not isinstance(ranks, list) or len(ranks) != len(files) or not all(map(finite, ranks)):
        said = f"{where} has {len(files)} files and ranks {ranks!r}; each file needs a number"
        raise WrongRow("wrong label", said)
    sign = -1 if most and set(ranks) <= {0, 1} else 1
    ranked = sorted(zip(ranks, files, strict=True), key=lambda pair: sign * pair[0])
    return [(a, b) for (first, a), (second, b) in combinations(ranked, 2) if first != second]


def finite(value: Any) -> bool:
    """Whether a value is a number that is neither infinite nor NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def row_of(
    where: str, entry: dict[str, Any], folder: Path, contained: bool, weight: float = 1.0
) -> SupervisedRow:
    """Check a row with one file, or with the two of a pair; contained: as in `rows_of`."""
    # Columns: the prompt, then one file or the two of a pair.
    text = next((entry.pop(name) for name in TEXTS if name in entry), None)
    if not isinstance(text, str):
        columns = ", ".join(TEXTS)
        raise WrongRow("no prompt", f"{where} needs a prompt, a text in a column {columns}")
    names: Sequence[str] | None = next(
        (pair for pair in PAIRS if pair[0] in entry and pair[1] in entry), None
    )
    names = names or next(((name,) for name in FILES if entry.get(name)), ())
    if not names:
        raise WrongRow(
            "no file named",
            f"{where} names no file; give it in a column {', '.join(FILES)}, or a pair in"
            f" {', '.join('+'.join(pair) for pair in PAIRS)}",
        )
    files = tuple(file_of(where, name, entry.pop(name), folder, contained) for name in names)
    if len(files) == 2 and same(*files):
        both = " to ".join(getattr(file, "name", str(file)) for file in files)
        raise WrongRow("pair of equal files", f"{where} prefers {both}, which is the same")
    mask = mask_of(where, entry, files, folder, contained)
    # How much the row says, and how often; all that is left are conditions and metadata.
    label, repeats = entry.get("label", 1.0), entry.get("repeats", 1)
    if len(files) == 2 and label not in LABELS:
        raise WrongRow(
            "wrong label",
            f"{where} has label={label!r}, the share of raters who prefer the first file; it is 1,"
            " 0, or 0.5 for a tie",
        )
    if not isinstance(repeats, int) or repeats < 1:
        said = f"{where} has repeats={repeats!r}, which is a count from 1"
        raise WrongRow("wrong repeats", said)
    margin = None if "label" in entry else margin_of(where, entry)
    meta = {key: value for key, value in entry.items() if key not in OWN}
    meta = conditions.check_entry({"prompt": text, **meta}, where, folder)
    meta.pop("prompt")
    return SupervisedRow(
        where=where,
        prompt=text,
        files=files,
        label=float(label) if len(files) == 2 else 1.0,
        margin=margin if len(files) == 2 else None,
        weight=weight,
        mask=mask,
        repeats=repeats,
        meta=meta,
    )


def mask_of(
    where: str,
    entry: dict[str, Any],
    files: tuple[Path | PictureCell, ...],
    folder: Path,
    contained: bool,
) -> Path | PictureCell | None:
    """Take the mask out of a row -> it, or None. WrongRow for one that has no pair, has another
    shape than the pair's files, or is black."""
    if not (given := entry.pop(MASK, None)):
        return None
    if len(files) == 1:
        said = f"{where} has one file and a mask, which weighs the errors of a pair; leave it out"
        raise WrongRow("mask without a pair", f"{said}, or name it mask_image for the pipeline")
    mask = file_of(where, MASK, given, folder, contained)
    # its pixels are read now, since a black mask would divide by 0 late in a run
    try:
        (width, height), *sizes = (header_of(file).size for file in (mask, *files))
        read = mask.picture() if isinstance(mask, PictureCell) else media.read_picture(mask)
    except ValueError as error:
        raise WrongRow("unreadable file", f"{where}: {error}") from error
    for file, (w, h) in zip(files, sizes, strict=True):
        if abs(width * h / (height * w) - 1) > SAME_RATIO:
            raise WrongRow(
                "wrong mask",
                f"{where} has a mask of {width}x{height} pixels for {file} of {w}x{h}; give it the"
                " same width / height",
            )
    if not any(high for _, high in read.getextrema()):
        said = f"{where} has the mask {mask}, which is black: nothing would count"
        raise WrongRow("wrong mask", f"{said}; make white what counts, or leave it out")
    return mask


def header_of(file: Path | PictureCell) -> media.Header:
    """Read the header of a file, or of a picture in a table."""
    return file.header() if isinstance(file, PictureCell) else media.header(file)


def margin_of(where: str, entry: Mapping[str, Any]) -> float | None:
    """The margin of a pair: that of its column, or the difference of its scores."""
    names = ("margin",) if "margin" in entry else SCORES if SCORES[0] in entry else ()
    values: list[Any] = [entry.get(name) for name in names]
    if not all(map(finite, values)):
        said = ", ".join(f"{n}={v!r}" for n, v in zip(names, values, strict=True))
        raise WrongRow("wrong label", f"{where} has {said}, which should be finite numbers")
    return None if not values else float(values[0] - sum(values[1:]))


def file_of(where: str, name: str, value: Any, folder: Path, contained: bool) -> Path | PictureCell:
    """The picture in a cell, or the file that it names, from the folder of the list. A list that
    comes with a folder was often written by somebody else, and names files of the folder alone."""
    if isinstance(value, PictureCell):
        return value
    if not isinstance(value, str) or not value:
        said = f"{where} has {name}={value!r}, which should be the path of a file"
        raise WrongRow("no file named", said)
    if contained and not inside(folder, value):
        raise WrongRow(
            "file outside the folder",
            f"{where} names {value!r}, which leaves the folder {folder}; if you trust the list,"
            " give data.offline the list itself, which may name files anywhere",
        )
    path = located(value, folder)
    if not path.is_file():
        said = f"{where} names {path}, which does not exist{nearby(path)}"
        raise WrongRow("missing file", said)
    return path


def same(one: Path | PictureCell, other: Path | PictureCell) -> bool:
    """Whether two files hold the same bytes. Pictures in tables are not read for it."""
    if isinstance(one, PictureCell) or isinstance(other, PictureCell):
        return one == other
    if one.resolve() == other.resolve():
        return True
    if one.stat().st_size != other.stat().st_size:
        return False
    first, second = (hashlib.sha256(path.read_bytes()).digest() for path in (one, other))
    return first == second
