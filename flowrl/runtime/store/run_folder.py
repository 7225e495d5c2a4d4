"""The files of a run folder: metrics.jsonl, environment.json, evaluation.json, peak.json."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl import __version__
from flowrl.runtime import hub
from flowrl.runtime.paths import nearby
from flowrl.runtime.store import files, lines, side_files
from flowrl.runtime.store.side_files import EvaluationFile, MetricsRow, PeakFile

METRICS, EVALUATION, PEAK = "metrics.jsonl", "evaluation.json", "peak.json"
PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "open-clip-torch",
    "numpy",
)


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The content of a run folder; a field is empty where its file is missing."""

    path: Path  # path of the folder itself
    config: str  # text of config.yaml
    metrics: list[dict[str, Any]]  # rows of metrics.jsonl, oldest first
    evaluation: dict[str, Any]  # content of evaluation.json
    notes: list[str] = field(default_factory=list)  # sentences about missing and damaged files


def lora_folder(path: Path) -> Path:
    """Where a LoRA is that a path names: in the folder that a run exported, else where it says."""
    return path / "lora" if (path / "lora").is_dir() else path


def is_run(path: str | Path) -> bool:
    """Whether a folder is the folder of a run."""
    return (Path(path) / "config.yaml").is_file()


def config_file(run: Path) -> Path:
    """Return the path of a run's config.yaml; a folder without one -> ValueError."""
    path = run / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{run} is not a run folder: it has no config.yaml")
    return path


def read(path: Path, *, spare: bool = False) -> RunFolder:
    """Read a run folder; if it is not one, or a file in it cannot be read -> ValueError.

    spare: a file that cannot be read is left out, with a sentence in the notes.
    """
    path = path.resolve()
    if not path.is_dir():
        raise ValueError(
            f'"{path}" is not a folder{nearby(path)}; give the folder of a run, such as'
            " runs/quickstart"
        )
    config = path / "config.yaml"
    if not config.exists() and not (path / METRICS).exists():
        raise ValueError(
            f'"{path}" does not hold a run: neither config.yaml nor metrics.jsonl is there; give a'
            " folder that flowrl train wrote"
        )
    notes: list[str] = []
    rows = read_metrics(path, notes)
    if rows and rows[-1].get("optimizer/step") == 0:
        notes.append("Nothing was trained: no optimizer step was taken.")
    # files beside the metrics, each of which may be damaged alone
    damaged: list[str] = []
    found = RunFolder(
        path=path,
        config=side_files.spared(damaged, _text, config, empty=""),
        metrics=rows,
        evaluation=side_files.spared(damaged, read_evaluation, path, empty={}),
        notes=notes + damaged,
    )
    if damaged and not spare:
        raise ValueError(damaged[0])
    return found


def read_evaluation(run: Path) -> dict[str, Any]:
    """Read evaluation.json of a run; {} before the first evaluation."""
    path = run / EVALUATION
    if not path.exists():
        return {}
    return side_files.read(path, EvaluationFile, again=f"evaluate again: flowrl evaluate {run}")


def read_peak(run: Path) -> dict[str, Any]:
    """Read peak.json of a run; {} if no peak of a held-out reward was sought or found."""
    path = run / PEAK
    again = "resume the run, which writes it"
    return side_files.read(path, PeakFile, again=again) if path.exists() else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error}); restore it") from error


def environment() -> dict[str, str]:
    """Versions, machine and commits of what came from the hub, for a run's environment.json and
    its report."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": str(os.cpu_count()),
        "flowrl": __version__,
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | {f"huggingface.co/{name}": commit for name, commit in hub.used().items()}


def plain(value: Any) -> Any:
    """Turn a value into one that JSON can hold: tensors become floats, NaN and infinities null, and
    integers stay."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if abs(value) <= side_files.LARGEST else None
    return value


def add_metrics(run: str | Path, iteration: int, metrics: Mapping[str, Any]) -> None:
    """Append the line of an iteration to metrics.jsonl; it is on disk when this returns."""
    row = {"iteration": iteration, **{name: plain(value) for name, value in metrics.items()}}
    lines.append(Path(run) / METRICS, [row], allow_nan=False)


def read_metrics(run: str | Path, notes: list[str] | None = None) -> list[dict[str, Any]]:
    """Read a run's metrics.jsonl, oldest rows first; [] before the first iteration."""
    return [json.loads(text) for text in recorded(Path(run), notes).values()]


def trained_iterations(metrics: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the iterations of rows of metrics.jsonl, without row 0, which tells the loss of
    data.validation before training."""
    return [row["iteration"] for row in metrics if row["iteration"] > 0]


def truncate_metrics(run: str | Path, iteration: int) -> None:
    """Forget the records of a run after `iteration`, so that a resumed run records each iteration
    once.

    Later lines of metrics.jsonl and unreadable lines are removed. So are later pictures of
    samples/, whose names tell the iteration, iteration-000012.png.
    """
    run = Path(run)
    if (run / METRICS).exists():
        files.write(run / METRICS, _until(run, iteration))
    for sample in (run / "samples").glob("iteration-*"):
        number = re.fullmatch(r"iteration-(\d{6,})(\.\w+)?", sample.name)
        if number and int(number[1]) > iteration:
            files.remove(sample)


def metrics_digest(run: Path, iteration: int) -> str:
    """Return the SHA-256 of the lines of metrics.jsonl up to `iteration`."""
    return hashlib.sha256(_until(run, iteration).rstrip()).hexdigest()


def _until(run: Path, iteration: int) -> bytes:
    """Return the lines of metrics.jsonl up to `iteration`."""
    return b"".join(text for number, text in recorded(run).items() if number <= iteration)


def recorded(run: Path, notes: list[str] | None = None) -> dict[int, bytes]:
    """Read metrics.jsonl -> iteration -> its line, the last if there are several. Lines that were
    cut off, edited or damaged are left out, each with a sentence in `notes`."""
    found: dict[int, bytes] = {}
    for line in lines.read(run / METRICS, MetricsRow):
        if line.row:
            found[line.row["iteration"]] = line.text.rstrip(b"\n") + b"\n"
        elif notes is not None:
            what = f"Line {line.number} of {METRICS} was cut short, edited or damaged"
            notes.append(f"{what} ({line.problem}) and is left out, as when the run is resumed.")
    return found
