"""A look at media and pairs before training: every fault of a list, from headers alone.

No pixel is decoded and torch is not imported, so that thousands of rows take seconds.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from flowrl.data import media, supervised
from flowrl.data.supervised import SupervisedRow, WrongRow

KEPT = 1000  # most sentences of a kind that are kept; all are counted
ROUTE = "domain"  # column that routes a row to its rewards


@dataclass(slots=True)
class Found:
    """What a kind of finding says, and how often it was made."""

    count: int = 0  # how many rows have it
    said: list[str] = field(default_factory=list)  # sentences that name file and row; the first

    def add(self, sentence: str) -> None:
        self.count += 1
        if len(self.said) < KEPT:
            self.said.append(sentence)


@dataclass(slots=True)
class Scan:
    """What a list or folder holds. Rows with a fault are counted among its faults alone."""

    media: int = 0  # rows with one file
    pairs: int = 0  # rows with two
    ties: int = 0  # pairs with the label 0.5
    # (width, height) -> number of files
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    frames: Counter[int] = field(default_factory=Counter)  # frames -> number of files
    fps: Counter[float] = field(default_factory=Counter)  # frames a second -> number of videos
    lengths: list[int] = field(default_factory=list)  # letters of each row's prompt
    # kind -> what ends a training run
    faults: dict[str, Found] = field(default_factory=lambda: defaultdict(Found))
    # kind -> what only changes what is trained
    notes: dict[str, Found] = field(default_factory=lambda: defaultdict(Found))


def scan(path: Path) -> Scan:
    """Look at every row of a list or folder. ValueError where it cannot be read at all."""
    found, headers, kinds = Scan(), dict[Path, media.Header | str](), dict[int, str]()
    routed: list[tuple[str, bool]] = []
    rates: list[tuple[str, float]] = []
    for where, entry, folder in supervised.entries(path):
        try:
            row = supervised.row_of(where, entry, folder, path.is_dir())
        except WrongRow as error:
            found.faults[error.fault].add(str(error))
            continue
        except ValueError as error:  # a condition's own, as a mask that cannot be read
            found.faults["wrong condition"].add(str(error))
            continue
        routed.append((row.where, row.meta.get(ROUTE) is not None))
        kinds.setdefault(len(row.files), row.where)
        read = [_header(headers, file) for file in row.files]
        _look(found, row, read)
        rates += [(row.where, h.fps) for h in read if isinstance(h, media.Header) and h.fps]
    if len(kinds) > 1:
        said = f"{kinds[1]} has one file and {kinds[2]} two; keep media and pairs in lists apart"
        found.faults["media and pairs mixed"].add(said)
    _without_route(found, routed)
    _other_rates(found, rates)
    if path.is_dir():
        _without_row(found, path, headers)
    return found


def _header(known: dict[Path, media.Header | str], file: Path) -> media.Header | str:
    """Read a file's header once -> it, or the sentence that says why it cannot be read."""
    if file not in known:
        try:
            known[file] = media.header(file)
        except ValueError as error:
            known[file] = str(error)
    return known[file]


def _look(found: Scan, row: SupervisedRow, headers: list[media.Header | str]) -> None:
    """Count a row, with what its files and its prompt have that is wrong or worth a note."""
    wrong = [header for header in headers if isinstance(header, str)]
    for said in wrong:
        found.faults["unreadable file"].add(f"{row.where}: {said}")
    read = [header for header in headers if not isinstance(header, str)]
    if len({header.frames > 1 for header in read}) > 1:
        said = f"{row.where} compares an image with a video; a pair is of one kind"
        found.faults["image against video"].add(said)
        return
    if wrong:
        return
    found.media += len(read) == 1
    found.pairs += len(read) == 2
    found.ties += len(read) == 2 and row.label == 0.5
    found.lengths.append(len(row.prompt))
    if not row.prompt:
        found.notes["empty prompt"].add(f"{row.where} has no text: it trains the empty prompt")
    for file, header in zip(row.files, read, strict=True):
        found.sizes[header.size] += 1
        found.frames[header.frames] += 1
        if header.alpha:
            said = f"{row.where}: {file.name} has an alpha channel; it is laid over white"
            found.notes["transparency"].add(said)
    if len({header.size for header in read}) > 1:
        sizes = " and ".join("{}x{}".format(*header.size) for header in read)
        said = f"{row.where} compares files of {sizes}; data.crop=center makes them one size"
        found.notes["pair of two sizes"].add(said)


def _without_route(found: Scan, routed: list[tuple[str, bool]]) -> None:
    """Note rows without the column that routes them, where others have it."""
    if any(has for _, has in routed):
        for where, has in routed:
            if not has:
                found.notes[f'no "{ROUTE}"'].add(f'{where} has no "{ROUTE}", and other rows have')


def _other_rates(found: Scan, rates: list[tuple[str, float]]) -> None:
    """Count frames a second, and note the rows whose videos have others than most."""
    found.fps = Counter(round(fps, 2) for _, fps in rates)
    usual = found.fps.most_common(1)[0][0] if found.fps else 0.0
    for where, fps in rates:
        if round(fps, 2) != usual:
            said = f"{where} has {fps:g} frames a second, and most have {usual:g}; motion differs"
            found.notes["other frames a second"].add(said)


def _without_row(found: Scan, folder: Path, named: Mapping[Path, Any]) -> None:
    """Note media of a folder that its list does not name."""
    known = {os.path.normpath(file) for file in named}
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() in media.MEDIA_SUFFIXES and os.path.normpath(file) not in known:
            found.notes["file without a row"].add(f"{file} has no row in the folder's list")


def facts(found: Scan) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of what was found, for a table."""
    yield "rows", f"{found.media + found.pairs:,}"
    if found.pairs:
        yield "pairs", f"{found.pairs:,}, of them {found.ties:,} ties"
    if not found.sizes:
        return
    yield "sizes", _common({"{}x{}".format(*size): n for size, n in found.sizes.items()})
    ratios = sorted(width / height for width, height in found.sizes.elements())
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}, median {ratios[len(ratios) // 2]:.2f}"
    yield "width / height", spread
    if set(found.frames) != {1}:
        yield "frames", _common(found.frames)
        yield "frames a second", _common(found.fps) if found.fps else "not said"
    lengths = sorted(found.lengths)
    middle = lengths[len(lengths) // 2]
    yield "letters of a prompt", f"{lengths[0]} to {lengths[-1]}, median {middle}"


def _common(counts: Mapping[Any, int], most: int = 4) -> str:
    """Say the most frequent values with their counts."""
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    said = ", ".join(f"{value} ({count:,})" for value, count in ranked[:most])
    return said + (f" and {len(ranked) - most} more" if len(ranked) > most else "")


def command(found: Scan, path: Path) -> str:
    """The command that trains the embedded model on the data; its verifier is only read."""
    crop = " data.crop=center" if len(found.sizes) > 1 else ""
    how = "algorithm=dpo batch.group=2" if found.pairs else "algorithm=sft"
    return f"flowrl train {how} {quote(f'data.offline={path}')}{crop} reward.shapes.weight=0"
