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


class FileModel(BaseModel):
    """The shape of a part of a file. It is strict: "3" is no number, and 1.0 no count."""

    model_config = ConfigDict(extra="allow", strict=True)


class Entry(FileModel):
    """A mean, and its interval where there is one."""

    mean: Number | None  # None: nothing was valid
    ci: tuple[Number, Number] | None = None  # (low, high)


class ChecklistAnswer(FileModel):
    """An answer to a question of a checklist."""

    question: str  # as it was asked
    answer: Number | None  # the probability of yes; None: it failed
    zeroed: bool  # whether it counts 0, because a parent was answered no


class ImageAnswers(FileModel):
    """Answers about one image."""

    image: int  # its number in the evaluation
    prompt: str  # that it was made of
    said: list[ChecklistAnswer]  # in the order of the questions


class Row(FileModel):
    """A row of evaluation.json: one setting."""

    name: str  # before, after, or the setting that was evaluated since
    guidance: str | Number | None = None  # a scale, "none" or "pipeline"
    steps: int | None = None  # of the ODE
    images: int | None = None  # how many
    iteration: int | None = None  # after which it was made
    nfe: Number | None = None  # network rows an image
    metrics: dict[str, Entry | Number | None] = {}  # reading -> over all images
    tasks: dict[str, dict[str, Entry | Number | None]] = {}  # reading -> task -> over its images
    values: dict[str, list[Number | None]] = {}  # reading -> of each image
    answers: dict[str, list[ImageAnswers]] = {}  # checklist -> about the images that are shown


class PairedEntry(FileModel):
    """The difference of a metric between two rows."""

    difference: Number  # after - before
    ci: tuple[Number, Number]  # (low, high)
    p: Number | None = None  # two-sided, of "no difference"


class EvaluationFile(FileModel):
    """The shape of evaluation.json."""

    rows: list[Row] = []  # in the order in which they were made
    paired: dict[str, PairedEntry] = {}  # metric -> "after" minus "before"


class MetricsRow(FileModel):
    """A row of metrics.jsonl: finite numbers, null or texts beside its iteration."""

    __pydantic_extra__: dict[str, Number | bool | str | None]

    iteration: int = Field(ge=0, lt=2**53)  # a float, as charts need it, names no larger one


def read(path: Path, shape: type[FileModel] = FileModel, *, again: str) -> dict[str, Any]:
    """Read a JSON file that holds an object of a shape; anything else -> ValueError.

    again: what writes it anew, for the message.
    """
    text = path.read_bytes()
    try:
        shape.model_validate_json(text)
        return json.loads(text)  # as it was written, not as the shape has it
    except ValidationError as error:
        what = f"{path} {EDITED} ({problem(error)})"
        raise ValueError(f"{what}; restore it, or delete it and {again}") from None


def problem(error: ValidationError) -> str:
    """Say the first of pydantic's errors, as "rows.0.steps='x': Input should be a valid
    integer"."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if not place:
        whole = first["type"] == "json_invalid"
        return first["msg"] if whole else f"{shortened(first['input'])} is not an object"
    given = "" if first["type"] == "missing" else f"={shortened(first['input'])}"
    return f"{place}{given}: {first['msg']}"


def shortened(value: Any) -> str:
    """Write a value as a message shows it, cut off after 60 letters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
