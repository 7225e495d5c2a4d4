"""Text files of prompts, read by their content: JSON, a table with a header, or one prompt a line.

JSON is any number of documents, for example one a line: records, texts, lists of them, or columns
{"prompt": [...]}. Cells of a table stand between tabs, commas, semicolons or bars. A file's name
decides where its content does not: a .jsonl that is broken is no plain text.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from flowrl.data import plain
from flowrl.data.entries import LIKELY

Form = Literal["json", "table", "plain"]
Row = tuple[str, Any]  # (where the row is, its content)
JSON, TABLES = (".json", ".jsonl", ".ndjson"), (".csv", ".tsv", ".tab")
MARKS = "\t,;|"  # marks between the cells of a table
SPACE = re.compile(r"\s*")
LOOKED_AT = 20  # lines that decide whether a file is a table, if its ending does not
# largest cell; the default, 128 KiB, is less than a checklist takes
csv.field_size_limit(2**31 - 1)


def rows(content: str, path: Path, wanted: Collection[str] = ()) -> tuple[Form, Iterable[Row]]:
    """Read a file -> (form, rows). wanted: names of columns that a table should have."""
    if (found := _json(content, path)) is not None:
        return "json", found
    if mark := _mark(content, path, wanted):
        return "table", _table(content, path, mark)
    return "plain", plain.rows(content, path)


def _json(content: str, path: Path) -> list[Row] | None:
    """Read rows of JSON documents; None where neither the content nor the file's name is JSON."""
    called, content = path.suffix.lower() in JSON, content.rstrip()
    if not called and content.lstrip()[:1] not in ("{", "["):
        return None
    decoder, found, at, line = json.JSONDecoder(), list[Row](), 0, 1
    while at < len(content):
        start = SPACE.match(content, at).end()
        line += content.count("\n", at, start)
        where = f"prompt file {path}, line {line}"
        try:
            document, at = decoder.raw_decode(content, start)
        except (json.JSONDecodeError, RecursionError) as error:
            if called:
                raise ValueError(f"{where} is not JSON: {error}") from None
            return None
        line += content.count("\n", start, at)
        found += _entries(document, where)
    return found


def _entries(document: Any, where: str) -> list[Row]:
    """The rows of a document: those of a list, of columns of one length, or the document itself."""
    if isinstance(document, dict) and document:
        parts = list(document.values())
        if all(isinstance(part, list) and len(part) == len(parts[0]) for part in parts):
            columns = [dict(zip(document, row, strict=True)) for row in zip(*parts, strict=True)]
            records = len(parts) == 1 and all(isinstance(row, dict) for row in parts[0])
            document = parts[0] if records else columns
    if isinstance(document, list) and len(document) != 1:
        return [(f"{where}, entry {n}", _record(row)) for n, row in enumerate(document, 1)]
    return [(where, _record(document[0] if isinstance(document, list) else document))]


def _record(row: Any) -> Any:
    return {"prompt": row} if isinstance(row, str) else row


def _mark(content: str, path: Path, wanted: Collection[str]) -> str | None:
    """Find what stands between the cells of a table; None where the content is no table.

    Its first line names a column of prompts; if the file's ending is not a table's, the next lines
    must have as many cells.
    """
    lines, called = content.lstrip().split("\n", LOOKED_AT)[:LOOKED_AT], path.suffix in TABLES
    known = {*LIKELY, "file", "file_name", *(name.casefold() for name in wanted)}
    for mark in MARKS:
        names, *others = csv.reader(lines, delimiter=mark)
        even = all(len(cells) in (0, len(names)) for cells in others)
        named = known.intersection(name.strip().casefold() for name in names)
        if named and len(names) > 1 and (called or even):
            return mark
    return max(",;\t", key=lines[0].count) if called else None


def _table(content: str, path: Path, mark: str) -> Iterator[Row]:
    """Read rows of a table. Between tabs, quotes are text where every line is then a row; elsewhere
    a quoted cell may hold lines, marks and doubled quotes."""
    lines, where = list(io.StringIO(content, newline="")), f"prompt file {path}"
    width = lines[0].count("\t")
    as_text = mark == "\t" and all(line.count(mark) == width for line in lines if line.strip())
    how: Any = {"quoting": csv.QUOTE_NONE} if as_text and '""' not in content else {"strict": True}
    reader = csv.reader(lines, delimiter=mark, **how)
    try:
        names = [name.strip() for name in next(reader)]
        if len(set(names)) != len(names):
            raise csv.Error(f"two columns have the same name: {', '.join(names)}")
        for cells in filter(None, reader):
            where = f"prompt file {path}, line {reader.line_num}"
            if len(cells) != len(names):
                raise csv.Error(f"it does not have the {len(names)} cells of the first line")
            yield where, {n: cell or None for n, cell in zip(names, cells, strict=True)}
    except csv.Error as error:
        raise ValueError(f"{where} cannot be read: {error}") from None
