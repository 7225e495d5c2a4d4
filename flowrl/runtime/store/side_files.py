"""The shapes of the files beside a run's checkpoints, checked whenever they are read back.

A file that was edited by hand, cut off or damaged raises one sentence that names the file, the
place in it, and what to do. Fields that are not listed here may be anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

LARGEST = 1e300  # numbers above it are refused, because their sums would be infinite
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
EDITED = "was edited or damaged"
Found = TypeVar("Found")


class FileModel(BaseModel):
    """The shape of a part of a file. It is strict: "3" is not a number, and 1.0 not a count."""

    model_config = ConfigDict(extra="allow", strict=True)


class Entry(FileModel):
    """A mean, and its interval if there is one."""

    mean: Number | None  # None: no value was valid
    ci: tuple[Number, Number] | None = None  # (low, high) ends of the interval


class ChecklistAnswer(FileModel):
    """An answer to a question of a checklist."""

    question: str  # the question in the words in which it was asked
    answer: Number | None  # probability of yes; None: the answer failed
    zeroed: bool  # whether the answer counts as 0, because a parent question was answered no


class ImageAnswers(FileModel):
    """Answers about one image."""

    image: int  # number of the image in the evaluation
    prompt: str  # prompt from which the image was made
    said: list[ChecklistAnswer]  # answers in the order of the questions


class Row(FileModel):
    """A row of evaluation.json: one setting."""

    name: str  # "before", "after", or the setting that was evaluated since
    guidance: str | Number | None = None  # scale, "none" or "pipeline"
    steps: int | None = None  # number of ODE steps
    images: int | None = None  # number of images
    prompts: list[str] = []  # texts, of which image i shows prompts[i % len(prompts)]
    iteration: int | None = None  # iteration after which the row was made
    nfe: Number | None = None  # network rows per image
    metrics: dict[str, Entry | Number | None] = {}  # reading -> mean over all images
    # reading -> task -> mean over its images
    tasks: dict[str, dict[str, Entry | Number | None]] = {}
    values: dict[str, list[Number | None]] = {}  # reading -> value of each image
    # checklist -> answers about the images that are shown
    answers: dict[str, list[ImageAnswers]] = {}


class PairedEntry(FileModel):
    """The difference of a metric between two rows."""

    difference: Number  # mean of after - before
    ci: tuple[Number, Number] | None  # (low, high) ends of the interval; None: of one prompt
    p: Number | None = None  # two-sided p of "no difference"


class EvaluationFile(FileModel):
    """The shape of evaluation.json."""

    rows: list[Row] = []  # rows in the order in which they were made
    paired: dict[str, PairedEntry] = {}  # metric -> "after" minus "before"


class PeakFile(FileModel):
    """The shape of peak.json."""

    held_out: str  # label of the held-out reward
    iteration: Number  # iteration around which its running mean was highest
    value: Number  # that mean
    last: Number  # the running mean at the run's end
    checkpoint: str  # name of the checkpoint nearest to that iteration
    lora: str | None  # folder with the LoRA of that checkpoint; None: none was written


class MetricsRow(FileModel):
    """A row of metrics.jsonl: finite numbers, null or texts beside its iteration."""

    __pydantic_extra__: dict[str, Number | bool | str | None]

    iteration: int = Field(ge=0, lt=2**53)  # charts need a float, and floats name no larger integer


def spared(notes: list[str], read: Callable[..., Found], *given: Any, empty: Any) -> Found:
    """Return what a reader gives; of a file that it refuses, `empty`, and its sentence goes to
    `notes`."""
    try:
        return read(*given)
    except ValueError as error:
        notes.append(str(error))
        return empty


def read(path: Path, shape: type[FileModel] = FileModel, *, again: str) -> dict[str, Any]:
    """Read a JSON file that holds an object of a shape; any other content -> ValueError.

    again: the command that writes it again, for the message.
    """
    text = path.read_bytes()
    try:
        shape.model_validate_json(text)
        # the JSON as it was written: the model would convert values and add defaults
        return json.loads(text)
    except ValidationError as error:
        what = f"{path} {EDITED} ({problem(error)})"
        raise ValueError(f"{what}; restore it, or delete it and {again}") from None


def problem(error: ValidationError) -> str:
    """Write the first of pydantic's errors as "rows.0.steps='x': Input should be a valid
    integer"."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if not place:
        whole = first["type"] == "json_invalid"
        return first["msg"] if whole else f"{shortened(first['input'])} is not an object"
    given = "" if first["type"] == "missing" else f"={shortened(first['input'])}"
    return f"{place}{given}: {first['msg']}"


def shortened(value: Any) -> str:
    """Write a value for a message, cut off after 60 letters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
