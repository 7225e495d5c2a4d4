"""Entries of prompt files: {"prompt": text, **meta}, and what each must be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.data import conditions
from flowrl.runtime.registry import did_you_mean

Columns = Mapping[str, str]  # name in the entry -> column that holds it; empty: all, as they are


def lines(path: Path, columns: Columns) -> list[tuple[int, dict[str, Any]]]:
    """(number of the line, entry) of a .jsonl file; blank lines are skipped. A missing, empty,
    non-UTF-8 or malformed file -> ValueError that names the file and the line or byte."""
    numbered = enumerate(text(path).split("\n"), 1)
    found = [(number, line.strip()) for number, line in numbered if line.strip()]
    if not found:
        raise ValueError(f"prompt file {path} is empty; it needs one prompt a line")
    out = []
    for number, line in found:
        where = f"prompt file {path}, line {number}"
        row = taken(_json(line, where), columns, where)
        out.append((number, check_entry(row, where, path.parent)))
    return out


def text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(
            f"prompt file {path} does not exist; give a .txt file with one prompt a line, or a"
            " .jsonl or .csv file"
        ) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(
            f"prompt file {path} is not UTF-8: byte {error.start}, in line {line}; save it as UTF-8"
        ) from None
    except OSError as error:
        raise ValueError(f"prompt file {path} cannot be read: {error.strerror}") from None


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None


def taken(row: Any, columns: Columns, where: str) -> Any:
    """The columns of a row that are asked for, under their names in an entry. One that is not there
    -> ValueError."""
    if not columns or not isinstance(row, dict):
        return row
    for column in columns.values():
        if column not in row:
            near = did_you_mean(column, map(str, row))
            raise ValueError(f'{where} has no column "{column}" (data.columns){near}')
    return {name: row[column] for name, column in columns.items()}


def check_entry(entry: Any, where: str, folder: Path) -> dict[str, Any]:
    """An entry with a prompt, its "reference" as a path from the folder; else ValueError."""
    text = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f'{where} needs a "prompt" that is a non-empty text, as in {{"prompt": "a red circle"}}'
        )
    if isinstance(entry.get("reference"), str):
        entry["reference"] = str(folder / entry["reference"])
    return conditions.check_entry(entry, where, folder)
