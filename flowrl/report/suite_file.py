"""suites/<name>.json of a run, which `flowrl evaluate --suite` writes and the report reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from flowrl.runtime import side_files
from flowrl.runtime.side_files import Answered, Entry, Number, Stored


class Difference(Stored):
    """The change of a score."""

    difference: Number | None
    ci: tuple[Number, Number] | None


class Row(Stored):
    """A model and its guidance."""

    name: str
    guidance: str | Number
    rlg: Number = 1.0
    scores: dict[str, Entry | None] = Field(min_length=1)
    categories: dict[str, dict[str, Entry | None]] = {}
    details: dict[str, dict[str, Entry | None]] = {}
    diversity: dict[str, Entry | None] = {}
    best_of: list[Entry]
    answers: dict[str, list[Answered]] = {}


class Changes(Stored):
    """The differences of two rows."""

    scores: dict[str, Difference | None] = {}
    categories: dict[str, dict[str, Difference | None]] = {}
    diversity: dict[str, Difference | None] = {}


class Suite(Stored):
    """The suite itself."""

    title: str
    images: int
    rewards: dict[str, Any]
    held_out: dict[str, Any]


class Peak(Stored):
    """When a held-out reading was highest."""

    iteration: int
    value: Number
    last_iteration: int
    last: Number


class Contamination(Stored):
    """How many prompts of the suite were trained on."""

    training: int
    suite: int
    exact: int
    near: int
    shared_8_grams: int


class MatrixRow(Stored):
    """A run's changes, by column."""

    run: str
    trained: list[str]
    entries: list[Difference | None]


class Matrix(Stored):
    """Side effects of several runs."""

    columns: list[str]
    rows: list[MatrixRow]


class Record(Stored):
    """The file."""

    name: str
    run: str
    checkpoint: str
    prompts: int
    seed: int
    steps: int
    suite: Suite
    trained: list[str]
    rows: list[Row] = Field(min_length=1)
    paired: dict[str, Changes]
    peaks: dict[str, Peak]
    contamination: Contamination | None
    warnings: list[str]
    matrix: Matrix | None = None

    @field_validator("rows")
    @classmethod
    def _equal_curves(cls, rows: list[Row]) -> list[Row]:
        if len({len(row.best_of) for row in rows}) > 1:
            raise ValueError("best_of is not as long in every row")
        return rows


def records(run: Path) -> Iterator[dict[str, Any]]:
    """The records of run/suites, by name; one that was edited or damaged -> ValueError."""
    again = "evaluate again: flowrl evaluate --suite"
    found = sorted((run / "suites").glob("*.json"))
    return (side_files.read(path, Record, again=again) for path in found)
