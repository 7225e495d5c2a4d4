"""Entries of prompt files: {"prompt": text, **meta}, and their checks."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.data import conditions
from flowrl.runtime.paths import located, nearby
from flowrl.runtime.registry import did_you_mean
from flowrl.runtime.text import listed

# name in the entry -> column that holds it; empty: all columns as they are
Columns = Mapping[str, str]


# usual names of the column that holds prompts
LIKELY = ("prompt", "prompts", "caption", "captions", "text", "txt", "description", "instruction")


def content(path: Path, most: int = -1) -> bytes:
    """Read the bytes of a file, or the first of them. A file that is not there -> ValueError."""
    try:
        with path.open("rb") as file:
            return file.read(most)
    except FileNotFoundError:
        raise ValueError(
            f"prompt file {path} does not exist{nearby(path)}; give a .txt file with one prompt a"
            " line, or a .jsonl, .csv, .tsv, .parquet or .tar file"
        ) from None
    except IsADirectoryError:
        raise ValueError(
            f"{path} is a folder; make one file: cat {path}/*.txt > prompts.txt"
        ) from None
    except OSError as error:
        raise ValueError(f"prompt file {path} cannot be read: {error.strerror}") from None


def text(path: Path) -> str:
    """Read a text file in UTF-8, or in UTF-16 with its mark. Anything else -> ValueError."""
    data = content(path)
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        found = data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(
            f"prompt file {path} is not UTF-8: byte {error.start}, in line {line}; save it as UTF-8"
            " (an archive is unpacked first)"
        ) from None
    if not found.strip():
        raise ValueError(f"prompt file {path} is empty; it needs one prompt a line")
    return found


def taken(row: Any, columns: Columns, where: str) -> Any:
    """Take the columns of a row that are asked for, under their names in an entry; none asked for:
    all of them, with "prompt" among them. A column that is not there -> ValueError."""
    if not isinstance(row, dict):
        return row
    for column in columns.values():
        if column not in row:
            near = did_you_mean(column, map(str, row))
            raise ValueError(f'{where} has no column "{column}" (data.columns){near}')
    if not columns and "prompt" not in row:
        names = [str(name) for name in row]
        likely = [name for name in names if name.strip().casefold() in LIKELY]
        raise ValueError(
            f'{where} needs a "prompt" and has no column "prompt"; say which one holds it, as'
            f" data.columns.prompt={[*likely, *names, 'NAME'][0]} (after a command without data,"
            f" --columns prompt=NAME): it has {listed(names)}"
        )
    return {name: row[column] for name, column in columns.items()} if columns else row


def check_entry(entry: Any, where: str, folder: Path) -> dict[str, Any]:
    """Check that an entry has a prompt, and make its "reference" a path from the folder; else
    ValueError."""
    text = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f'{where} needs a "prompt" that is a non-empty text, as in {{"prompt": "a red circle"}}'
        )
    if "\0" in text:
        raise ValueError(f"{where} holds a NUL byte, so it is no text; save it as UTF-8")
    if isinstance(entry.get("reference"), str):
        entry["reference"] = str(located(entry["reference"], folder))
    return conditions.check_entry(entry, where, folder)
