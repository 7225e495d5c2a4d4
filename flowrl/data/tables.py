"""Lists of prompts and of samples as files, read by their content and written by their ending.

An entry is {"file", "prompt", **meta}, with "scores", "weights" and "total" where it was scored. In
.jsonl it is a line of JSON. In .csv and .parquet "scores" and "weights" are a column for each
reward (scores.jpeg, weights.jpeg), and other values that are no text are JSON; the same entry comes
back from each of the three. texts.py reads other forms of lists.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from flowrl.data import entries, hf, texts
from flowrl.data.entries import Columns, check_entry, taken
from flowrl.data.stored import PictureCell, is_struct
from flowrl.data.texts import Form, Row
from flowrl.runtime.install import install_line
from flowrl.runtime.store import files as disk

Entry = dict[str, Any]

NOTHING: Columns = MappingProxyType({})
SUFFIXES = (".jsonl", ".csv", ".parquet")  # endings of lists that can be written
PLAIN = ("file", "file_name", "prompt")  # columns of text, which is never read as JSON
NESTED = ("scores", "weights")
# beginnings of the names of columns of numbers
NUMBERS = ("total", *(f"{name}." for name in NESTED))


def is_table(source: str) -> bool:
    """Whether prompts of this source have columns."""
    path = Path(source)
    if path.is_file():
        return rows(path)[0] != "plain"
    return hf.is_dataset(source) or path.suffix in (*SUFFIXES, *texts.JSON, *texts.TABLES)


def rows(path: Path, columns: Columns = NOTHING) -> tuple[Form, list[Row]]:
    """Read a list of prompts -> (form, which its content decides; (where, row) of each row)."""
    head, form = entries.content(path, 512), cast(Form, "table")
    found: Iterable[Row]
    if head.startswith(b"PAR1") or path.suffix == ".parquet":
        found = _parquet(path)
    elif head[257:262] == b"ustar" or path.suffix == ".tar":
        found = map(_captioned, hf.rows(f"{hf.PREFIX}{path}"))
    else:
        form, found = texts.rows(entries.text(path), path, columns.values())
    if not (out := list(found)):
        raise ValueError(f"prompt file {path} is empty; it needs a row for each prompt")
    return form, out


def _captioned(row: Row) -> Row:
    """Take the caption of a row of a tar shard (webdataset), which is a .txt file, as its
    prompt."""
    where, cells = row
    return where, {"prompt": cells["txt"], **cells} if "txt" in cells else cells


def read(path: Path, columns: Columns = NOTHING) -> list[tuple[str, Entry]]:
    """Read a list -> (where, entry) of each line or row, every entry with a "prompt" that is not
    empty.

    Anything else -> ValueError that names the file and the line or row. .parquet needs the extra
    "parquet". columns: the columns that are taken, by their names in an entry; empty: all of them.
    """
    form, found = rows(path, columns)
    columns = NOTHING if form == "plain" else columns
    out = []
    for where, row in found:
        if form == "table":
            entry = _checked(row, columns, where, path.parent)
        else:
            entry = check_entry(taken(row, columns, where), where, path.parent)
        out.append((where.removeprefix("prompt file "), entry))
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
    """Raise ValueError unless a list of this ending can be written here."""
    if path.suffix == ".parquet":
        _pyarrow(path)


def of_dataset(source: str, columns: Columns = NOTHING) -> list[Entry]:
    """Entries of "hf:NAME", see flowrl/data/hf.py; columns and errors: as `read`."""
    rows = hf.rows(source)
    return [_checked(row, columns, where, hf.folder_of(source) or Path()) for where, row in rows]


def _checked(row: Entry, columns: Columns, where: str, folder: Path) -> Entry:
    """Make a row an entry; an empty cell counts as not there."""
    cells = taken(row, columns, where)
    filled = {name: cell for name, cell in cells.items() if cell is not None}
    return check_entry(_entry(filled), where, folder)


def _parquet(path: Path) -> Iterator[tuple[str, Entry]]:
    pa = _pyarrow(path)
    try:
        file = pa.parquet.ParquetFile(path)
        fields = list(file.schema_arrow)
        pictures = {field.name for field in fields if _is_picture(field.type)}
        # only the paths of pictures are read: they tell which cells are empty; and no bytes
        raw = [field.name for field in fields if _is_bytes(field.type)]
        leaves = [f"{f.name}.path" if f.name in pictures else f.name for f in fields]
        leaves = [name for name in leaves if name not in raw]
        rows = file.read(columns=leaves).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from None
    version = hashlib.sha256(str(file.metadata.to_dict()).encode()).hexdigest()
    sizes = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
    places = [(group, inside) for group, size in enumerate(sizes) for inside in range(size)]
    for number, (row, place) in enumerate(zip(rows, places, strict=True), 1):
        where = f"{path}, row {number}"
        for name in (*pictures, *raw):
            if name in raw or row[name] is not None:
                cell = partial(_cell_of, path, version, name, *place)
                row[name] = PictureCell(where, name, version, path.parent, cell)
        yield where, row


def _is_picture(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_struct(kind) and is_struct({kind.field(k).name for k in range(len(kind))})


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _cell_of(path: Path, version: str, column: str, group: int, inside: int) -> Any:
    return _group(path, version, column, group)[inside].as_py()


@functools.lru_cache(2)
def _group(path: Path, version: str, column: str, group: int) -> Any:
    """Read a column of the rows that a parquet file stores together."""
    return _pyarrow(path).parquet.ParquetFile(path).read_row_group(group, [column]).column(0)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f'{path} needs the extra "parquet": {install_line("parquet")}, or give a .csv or'
            " .jsonl file"
        ) from None
    return pyarrow


def _row(entry: Mapping[str, Any]) -> Entry:
    """Make an entry cells: text, and numbers of scores. A score that failed has no cell."""
    out: Entry = {}
    for name, value in entry.items():
        if name in NESTED:
            out |= {f"{name}.{label}": number for label, number in value.items()}
        else:
            out[name] = value if name in (*PLAIN, "total") else _cell(value)
    return out


def _cell(value: Any) -> str:
    """Write a value as JSON, but a text as it is unless it would be read as something else."""
    if isinstance(value, str) and value and parsed(value) is value:
        return value
    return json.dumps(value, ensure_ascii=False)


def parsed(cell: Any) -> Any:
    """Read a cell of text as JSON, or as the text itself where it is none."""
    if not isinstance(cell, str):
        return cell
    try:
        return json.loads(cell, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return cell


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _entry(row: Mapping[str, Any]) -> Entry:
    """Make cells an entry; a weight whose score has no cell belongs to a score that failed."""
    out: Entry = {}
    for name, cell in row.items():
        group, dot, label = name.partition(".")
        value = cell if name in PLAIN else parsed(cell)
        if dot and group in NESTED:
            out.setdefault(group, {})[label] = value
        else:
            out[name] = value
    for label in out.get("weights", {}):
        out.setdefault("scores", {}).setdefault(label, None)
    return out
