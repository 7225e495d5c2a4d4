"""What the files beside a run's checkpoints hold, checked whenever they are read back.

A file that was edited by hand, cut off or damaged is one sentence that names the file, the place in
it, and what to do. Fields that are not listed here may be anything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

LARGEST = 1e300  # beyond it sums are infinite
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
EDITED = "was edited or damaged"


class Stored(BaseModel):
    """Part of a file. Strict: "3" is no number, and 1.0 no count."""

    model_config = ConfigDict(extra="allow", strict=True)


class Entry(Stored):
    """A mean, and its interval where there is one."""

    mean: Number | None
    ci: tuple[Number, Number] | None = None


class Said(Stored):
    """An answer to a question of a checklist; None where it failed."""

    question: str
    answer: Number | None
    zeroed: bool


class Answered(Stored):
    """Answers about one image."""

    image: int
    prompt: str
    said: list[Said]


class Row(Stored):
    """A row of evaluation.json."""

    name: str
    guidance: str | Number | None = None
    steps: int | None = None
    images: int | None = None
    iteration: int | None = None
    nfe: Number | None = None
    metrics: dict[str, Entry | Number | None] = {}
    tasks: dict[str, dict[str, Entry | Number | None]] = {}
    values: dict[str, list[Number | None]] = {}
    answers: dict[str, list[Answered]] = {}


class Paired(Stored):
    """The difference of a metric between two rows."""

    difference: Number
    ci: tuple[Number, Number]
    p: Number | None = None


class Evaluation(Stored):
    """evaluation.json."""

    rows: list[Row] = []
    paired: dict[str, Paired] = {}


class Plain(Stored):
    """Any object."""


def read(path: Path, shape: type[Stored] = Plain, *, again: str) -> dict[str, Any]:
    """A JSON file that holds an object of a shape; ValueError otherwise.

    again: what writes it anew, for the message.
    """
    text = path.read_bytes()
    try:
        shape.model_validate_json(text)
        return json.loads(text)  # as it was written, not as the shape has it
    except ValidationError as error:
        what = problem(error)
    except ValueError as error:  # an integer of thousands of digits
        what = str(error)
    raise ValueError(f"{path} {EDITED} ({what}); restore it, or delete it and {again}")


def problem(error: ValidationError) -> str:
    """The first of pydantic's errors, as "rows.0.steps='x': Input should be a valid integer"."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if not place:
        whole = first["type"] == "json_invalid"
        return first["msg"] if whole else f"{shortened(first['input'])} is not an object"
    given = "" if first["type"] == "missing" else f"={shortened(first['input'])}"
    return f"{place}{given}: {first['msg']}"


def shortened(value: Any, most: int = 60) -> str:
    """How a value is written in a message, cut off after `most` letters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def read_lines(path: Path, notes: list[str] | None = None) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, each with its iteration; finite numbers, null, or texts.

    A last line without its end (the run is being written, or was killed) is left out and noted;
    another line that is not such a row -> ValueError.
    """
    *whole, rest = path.read_bytes().split(b"\n")
    rows = [_row(path, number, line) for number, line in enumerate(whole, 1)]
    if rest:
        last = len(rows) + 1
        try:
            rows.append(_row(path, last, rest))
        except ValueError:
            what = f"The last line of {path.name} (line {last}) is cut short and was left out."
            notes = [] if notes is None else notes
            notes.append(what)
    return rows


def read_line(line: bytes) -> dict[str, Any]:
    """A row of metrics.jsonl; ValueError that says what keeps the line from being one."""
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"is {shortened(row)}, not an object")
    iteration = row.get("iteration")
    if type(iteration) is not int or not 0 <= iteration < 2**53:
        has = shortened(iteration)
        raise ValueError(f'needs an "iteration", a whole number from 0, and has {has}')
    for key, value in row.items():
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            has = f"{shortened(value)} as {shortened(key)}"
            raise ValueError(f"has {has}; null stands for what is no finite number")
    return row


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return read_line(line)
    except ValueError as error:
        raise ValueError(
            f"{path} {EDITED} (line {number} {error}); restore it, or resume the run, which drops"
            " such lines"
        ) from None
