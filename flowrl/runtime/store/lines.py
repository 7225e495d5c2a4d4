"""Files of JSON lines that only grow: metrics, history, scores, measurements, logs of judges.

Rows are appended in one write and flushed, so a killed process leaves one torn line at most, the
last. The next writer removes it. A reader learns of it, and of every line that differs from what
was written.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flowrl.runtime.store import files
from flowrl.runtime.store.side_files import FileModel, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a file that was read back."""

    number: int  # place in the file, from 1
    text: bytes  # bytes as they stand in the file; the line was cut off if it does not end in "\n"
    # JSON object of the line; None: the line was cut off, edited or damaged
    row: dict[str, Any] | None
    problem: str = ""  # reason why there is no row


def append(path: Path, rows: Iterable[Mapping[str, Any]], **style: Any) -> None:
    """Append a line for each row, in one write, and flush it to disk.

    A last line that a killed process left without its end is removed first. Several processes may
    append to one file. Folders are made. style: options of json.dumps.
    """
    data = "".join(json.dumps(row, **style) + "\n" for row in rows).encode()
    with files.write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            # some network disks have no locks; there the append itself must suffice
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            size = _mend(handle)
            try:
                files.put(handle, data)
            # remove all of the rows, whatever stopped the write in the middle
            except BaseException:
                os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)
        if new:
            files.sync(path.parent)


def read(
    path: Path, shape: type[FileModel] = FileModel, *, newest: int | None = None
) -> Iterator[Line]:
    """Read the lines of a file, oldest first, without empty ones; no lines if there is no file.

    shape: form that each line's object must have; default: any. newest: how many lines at the
    end are read, as a file may have grown for months; None: all.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        numbered = enumerate(file, 1)
        for number, text in numbered if newest is None else deque(numbered, maxlen=newest):
            try:
                shape.model_validate_json(text)
                yield Line(number=number, text=text, row=json.loads(text))
            except ValidationError as error:
                if text.strip():
                    yield Line(number=number, text=text, row=None, problem=problem(error))


def _mend(handle: int) -> int:
    """Cut off a last line without its end, or end it if it is whole JSON -> the new size."""
    size = os.fstat(handle).st_size
    if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
        return size
    last = os.pread(handle, size, 0).rpartition(b"\n")[2]
    try:
        json.loads(last)
    except (ValueError, RecursionError):
        os.ftruncate(handle, size - len(last))
    else:
        os.write(handle, b"\n")
    return os.fstat(handle).st_size
