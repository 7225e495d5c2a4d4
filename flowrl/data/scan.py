"""A look at media and pairs before training: every fault of a list, from headers alone.

No pixel but those of masks is decoded and torch is not imported, so that thousands of rows take
seconds.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from flowrl.data import media, supervised
from flowrl.data.stored import PictureCell
from flowrl.data.supervised import SupervisedRow

File = Path | PictureCell
MANY = 16  # rows of an iteration of algorithm=sft, the most that an algorithm takes by default
ROUTE = "domain"  # column that routes a row to its rewards


@dataclass(slots=True)
class Scan:
    """What a list or folder holds. Rows with a fault are counted among its faults alone."""

    media: int = 0  # rows with one file
    pairs: int = 0  # rows with two
    ties: int = 0  # pairs with the label 0.5
    masks: int = 0  # pairs with a mask
    # (width, height) -> number of files
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    frames: Counter[int] = field(default_factory=Counter)  # frames -> number of files
    fps: Counter[float] = field(default_factory=Counter)  # frames a second -> number of videos
    lengths: list[int] = field(default_factory=list)  # letters of each row's prompt
    # kind -> sentences, each with file and row, on what ends a training run
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    # kind -> sentences on what only changes what is trained
    notes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def scan(path: Path) -> Scan:
    """Look at every row of a list or folder. ValueError where it cannot be read at all."""
    found, headers = Scan(), dict[File, media.Header | str]()
    kinds: dict[int, str] = {}
    routed: list[tuple[str, bool]] = []
    rates: list[tuple[str, float]] = []
    for where, entry, folder in supervised.entries(path):
        try:
            rows = supervised.rows_of(where, entry, folder, path.is_dir())
        except ValueError as error:
            # what is no WrongRow is a condition's own, as a mask that cannot be read
            found.faults[getattr(error, "fault", "wrong condition")].append(str(error))
            continue
        if not rows:
            found.notes["no preference"].append(f"{where} prefers no file, and is left out")
        for row in rows:
            routed.append((row.where, row.meta.get(ROUTE) is not None))
            kinds.setdefault(len(row.files), row.where)
            read = [_header(headers, file) for file in row.files]
            if row.mask:
                headers[row.mask] = supervised.header_of(row.mask)
            _look(found, row, read)
            rates += [
                (row.where, round(header.fps, 2))
                for header in read
                if isinstance(header, media.Header) and header.fps
            ]
    if len(kinds) > 1:
        said = f"{kinds[1]} has one file and {kinds[2]} two; keep media and pairs in lists apart"
        found.faults["media and pairs mixed"].append(said)
    _compare(found, routed, rates)
    if path.is_dir():
        _without_row(found, path, headers)
    return found


def _header(known: dict[File, media.Header | str], file: File) -> media.Header | str:
    """Read a file's header once -> it, or the sentence that says why it cannot be read."""
    if file not in known:
        try:
            known[file] = supervised.header_of(file)
        except ValueError as error:
            known[file] = str(error)
    return known[file]


def _look(found: Scan, row: SupervisedRow, headers: list[media.Header | str]) -> None:
    """Count a row, with what its files and its prompt have that is wrong or worth a note."""
    stored = [file.cell() for file in row.files if isinstance(file, PictureCell)]
    if len(stored) == 2 and stored[0] == stored[1]:
        found.faults["pair of equal files"].append(f"{row.where} prefers a picture to the same")
        return
    wrong = [header for header in headers if isinstance(header, str)]
    for said in wrong:
        found.faults["unreadable file"].append(f"{row.where}: {said}")
    read = [header for header in headers if not isinstance(header, str)]
    if len({header.frames > 1 for header in read}) > 1:
        said = f"{row.where} compares an image with a video; a pair is of one kind"
        found.faults["image against video"].append(said)
        return
    if wrong:
        return
    # what is counted and noted are rows whose files can be read
    found.media += len(read) == 1
    found.pairs += len(read) == 2
    found.ties += len(read) == 2 and (row.margin == 0 or row.label == 0.5)
    found.masks += row.mask is not None
    found.lengths.append(len(row.prompt))
    if not row.prompt:
        found.notes["empty prompt"].append(f"{row.where} has no text: it trains the empty prompt")
    for file, header in zip(row.files, read, strict=True):
        found.sizes[header.size] += 1
        found.frames[header.frames] += 1
        if header.alpha:
            said = f"{row.where}: {file} has an alpha channel; it is laid over white"
            found.notes["transparency"].append(said)
    if len({header.size for header in read}) > 1:
        sizes = " and ".join("{}x{}".format(*header.size) for header in read)
        said = f"{row.where} compares files of {sizes}; data.crop=center makes them one size"
        found.notes["pair of two sizes"].append(said)


def _compare(
    found: Scan, routed: Sequence[tuple[str, bool]], rates: Sequence[tuple[str, float]]
) -> None:
    """Note rows without the column that routes them, where others have it, and videos with other
    frames a second than most."""
    lacking = [where for where, has in routed if not has]
    for where in lacking if len(lacking) < len(routed) else ():
        found.notes[f'no "{ROUTE}"'].append(f'{where} has no "{ROUTE}", and other rows have')
    found.fps = Counter(fps for _, fps in rates)
    for where, fps in rates:
        if fps != (usual := found.fps.most_common(1)[0][0]):
            said = f"{where} has {fps:g} frames a second, and most have {usual:g}; motion differs"
            found.notes["other frames a second"].append(said)


def _without_row(found: Scan, folder: Path, named: Iterable[File]) -> None:
    """Note media of a folder that its list does not name."""
    known = {os.path.normpath(file) for file in named if isinstance(file, Path)}
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() in media.MEDIA_SUFFIXES and os.path.normpath(file) not in known:
            found.notes["file without a row"].append(f"{file} has no row in the folder's list")


def facts(found: Scan) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of what was found, for a table."""
    yield "rows", f"{found.media + found.pairs:,}"
    if found.pairs:
        masks = f", {found.masks:,} with a mask" if found.masks else ""
        yield "pairs", f"{found.pairs:,}, of them {found.ties:,} ties{masks}"
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
    how += " data.labels=soft" if found.ties and found.pairs == found.ties else ""
    if (rows := found.media + (found.pairs - found.ties or found.ties)) < MANY:
        how += f" batch.prompts={rows}"
    return f"flowrl train {how} {quote(f'data.offline={path}')}{crop} reward.shapes.weight=0"
