"""Lists of samples as files: .jsonl, .csv and .parquet, by the file's ending.

An entry is {"file", "prompt", **meta}, with "scores", "weights" and "total" where it was scored. In
.jsonl it is a line of JSON. In .csv and .parquet "scores" and "weights" are a column for each
reward (scores.jpeg, weights.jpeg), and what else is no text is JSON; the same entry comes back from
each of the three.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.data import entries
from flowrl.data.entries import check_entry
from flowrl.runtime import files as disk

Entry = dict[str, Any]

SUFFIXES = (".jsonl", ".csv", ".parquet")
PLAIN = ("file", "file_name", "prompt")  # columns of text, which is never read as JSON
NESTED = ("scores", "weights")
NUMBERS = ("total", *(f"{name}." for name in NESTED))  # beginnings of columns of numbers


def read(path: Path) -> list[tuple[str, Entry]]:
    """(where, entry) of each line or row, every entry with a "prompt" that is not empty.

    Else ValueError that names the file and the line or row. .parquet needs the extra "parquet".
    """
    if path.suffix == ".jsonl":
        return _jsonl(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"{path} is not a .jsonl, .csv or .parquet list; each line of a .jsonl list is like"
            ' {"file": "a.png", "prompt": "a red circle"}'
        )
    if not path.is_file():
        raise ValueError(f"prompt file {path} does not exist; give a list of files and prompts")
    rows = _csv(path) if path.suffix == ".csv" else _parquet(path)
    out = [(where, check_entry(_entry(row), where, path.parent)) for where, row in rows]
    if not out:
        raise ValueError(f"prompt file {path} is empty; it needs a row for each image")
    return out


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a list by its ending -> its path. Numbers of scores are finite or None."""
    if path.suffix == ".jsonl":
        lines = [json.dumps(entry, ensure_ascii=False) + "\n" for entry in rows]
        return disk.write(path, "".join(lines))
    cells = [_row(entry) for entry in rows]
    names = list(dict.fromkeys(name for row in cells for name in row))
    if path.suffix == ".csv":
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, names)
        writer.writeheader()
        writer.writerows(cells)
        return disk.write(path, table.getvalue())
    pa = _pyarrow(path)
    kinds = [pa.float64() if name.startswith(NUMBERS) else pa.string() for name in names]
    schema = pa.schema(list(zip(names, kinds, strict=True)))
    buffer = io.BytesIO()
    pa.parquet.write_table(pa.Table.from_pylist(cells, schema=schema), buffer)
    return disk.write(path, buffer.getvalue())


def check_suffix(path: Path) -> None:
    """ValueError unless a list of this ending can be written here."""
    if path.suffix == ".parquet":
        _pyarrow(path)


def _jsonl(path: Path) -> list[tuple[str, Entry]]:
    return [(f"{path}, line {n}", entry) for n, entry in entries.lines(path)]


def _csv(path: Path) -> Iterator[tuple[str, Entry]]:
    where = str(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or []
            if len(set(names)) != len(names):
                raise csv.Error(f"two columns have the same name: {', '.join(names)}")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise csv.Error(f"it does not have the {len(names)} cells of the first line")
                yield where, {name: cell for name, cell in row.items() if cell != ""}
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{where} cannot be read: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[str, Entry]]:
    pa = _pyarrow(path)
    try:
        rows = pa.parquet.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from None
    for number, row in enumerate(rows, 1):
        yield (
            f"{path}, row {number}",
            {name: cell for name, cell in row.items() if cell is not None},
        )


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"{path} needs the extra \"parquet\": pip install 'flowrl[parquet]', or give a .csv or"
            " .jsonl file"
        ) from None
    return pyarrow


def _row(entry: Mapping[str, Any]) -> Entry:
    """An entry as cells: text, and numbers of scores. A score that failed has none."""
    out: Entry = {}
    for name, value in entry.items():
        if name in NESTED:
            out |= {f"{name}.{label}": number for label, number in value.items()}
        else:
            out[name] = value if name in (*PLAIN, "total") else _cell(value)
    return out


def _cell(value: Any) -> str:
    """JSON, but a text as it is unless it would be read as something else."""
    if isinstance(value, str) and value and _parsed(value) is value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _parsed(cell: Any) -> Any:
    """What a cell of text says: its JSON, or the text itself where it is none."""
    if not isinstance(cell, str):
        return cell
    try:
        return json.loads(cell, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return cell


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _entry(row: Mapping[str, Any]) -> Entry:
    """The entry of cells; a weight whose score has no cell is that of a score that failed."""
    out: Entry = {}
    for name, cell in row.items():
        group, dot, label = name.partition(".")
        value = cell if name in PLAIN else _parsed(cell)
        if dot and group in NESTED:
            out.setdefault(group, {})[label] = value
        else:
            out[name] = value
    for label in out.get("weights", {}):
        out.setdefault("scores", {}).setdefault(label, None)
    return out
