"""Suites on run folders: base and tuned model side by side, written to run/suites/<name>.json, and
several runs as a side-effect matrix.

A record holds, for each row (base, tuned, and "base, guided" where the run's config asks for it),
scores over all and by category with 95% intervals, diversity, the best-of-N curve and every value;
the paired differences of "tuned" to the others; at which iteration held-out rewards peaked in
training; how much of the suite was trained on; and warnings.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flowrl.config import build
from flowrl.config import load as config
from flowrl.config.schema import Config
from flowrl.data import prompts as data
from flowrl.data import scored_dataset
from flowrl.evaluation.held_out import Sampling
from flowrl.evaluation.suites import statistics
from flowrl.evaluation.suites.measure import Journal, Measured
from flowrl.evaluation.suites.suite import Suite, Task, load, prepare, run_suite, with_rewards
from flowrl.evaluation.suites.summary import matrix, summary
from flowrl.runtime import checkpoint, run_folder
from flowrl.runtime.log import logger

FOLDER = "suites"


UNMEASURED = {
    "title",
    "origin",
    "metric",
    "aggregate",
    "scale",
}  # fields of a suite that change no measured value


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line changes; None: as the suite says. best_of: longest curve; rewards:
    settings of the suite's
    rewards, held_out: further rewards to read, both as words (see flowrl.evaluation.suites.suite.with_rewards)."""

    images: int | None = None
    best_of: int | None = None
    count: int | None = None
    steps: int | None = None
    guidance: float | str | None = None
    seed: int = 0
    prompts: str | None = None
    rewards: Sequence[str] = ()
    held_out: Sequence[str] = ()


def evaluate_runs(runs: Sequence[Path], name: str, chosen: Options) -> list[dict[str, Any]]:
    """Evaluate finished runs on a suite and write run/suites/<name>.json of each -> the records;
    several get their side-effect matrix.

    What is wrong with suite, prompts, rewards or runs -> ValueError before anything is sampled.
    Runs of one base model share its rows.
    """
    suite = load(
        name,
        images=chosen.images,
        count=chosen.count,
        steps=chosen.steps,
        guidance=chosen.guidance,
        prompts=chosen.prompts,
    )
    suite = with_rewards(suite, chosen.rewards, chosen.held_out)
    most = suite.images if chosen.best_of is None else chosen.best_of
    if most > suite.images:
        what = (
            f"--best-of {most} needs at least {most} images a prompt, and this evaluation makes"
            f" {suite.images}"
        )
        raise ValueError(f"{what}; add --images {most}, or give a smaller --best-of")
    configs = [_config_of(run) for run in runs]
    task = prepare(Path(name).stem, suite)
    known: dict[str, dict[str, Measured]] = {}
    records: list[dict[str, Any]] = []
    for run, cfg in zip(runs, configs, strict=True):
        records.append(_evaluate(run, cfg, task, chosen.seed, most, known))
        write(run, task.name, records[-1])
    if len(records) > 1:
        table = matrix(records)
        for run, own in zip(runs, records, strict=True):
            own["matrix"] = table
            write(run, task.name, own)
    return records


def _evaluate(
    run: Path, cfg: Config, task: Task, seed: int, most: int, known: dict[str, dict[str, Measured]]
) -> dict[str, Any]:
    """known: rows of base models that were measured for other runs, by what they depend on."""
    weights = checkpoint.latest(run)  # the run may go on and write another one
    policy = build.load_tuned(cfg, weights)
    sampling = sampling_of(task.suite, cfg, seed=seed, device=policy.device)
    baseline = cfg.eval.baseline_guidance if task.suite.guidance is None else None
    for guidance in (sampling.guidance, baseline or "none"):
        policy.branches(guidance)  # one that the model does not know is refused here
    key = _key(task, cfg, sampling, baseline)
    journal = Journal(
        run / FOLDER / f"{task.name}.part.jsonl",
        key=f"{key} {_digest((weights / checkpoint.MANIFEST).read_bytes())}",
    )
    measured = run_suite(
        policy, task, sampling, baseline=baseline, journal=journal, known=known.setdefault(key, {})
    )
    guidances = {"base": sampling.guidance, "base, guided": baseline, "tuned": sampling.guidance}
    out = {
        "suite": task.suite.model_dump(mode="json"),
        "name": task.name,
        "run": str(run),
        "checkpoint": weights.name,
        "prompts": len(task.prompts),
        "seed": seed,
        "steps": sampling.steps,
        "solver": sampling.solver,
        "trained": trained_on(cfg),
        **summary(task, measured, most),
    }
    for row in out["rows"]:
        row["guidance"] = guidances[row["name"]]
    own = {
        label
        for label, entry in cfg.reward.items()
        if str(entry.get("name", label)) in out["trained"]
    }
    out["peaks"] = peaks(run_folder.read(run), own, cfg.eval.guidance)
    out["contamination"], problem = _contamination(cfg, task)
    out["warnings"] = [*_warnings(task, out), *([problem] if problem else [])]
    for sentence in out["warnings"]:
        logger.warning(sentence)
    journal.close()
    return out


def _config_of(run: Path) -> Config:
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} is not a run folder: it has no config.yaml")
    run_folder.read(run)  # its other files are readable, before time is spent
    checkpoint.latest(run)
    return config.read_config(run / "config.yaml")


def sampling_of(suite: Suite, cfg: Config, *, seed: int, device: torch.device) -> Sampling:
    """What the suite fixes, and for the rest the run's own evaluation."""
    e = cfg.eval
    guidance = e.guidance if suite.guidance is None else suite.guidance
    return Sampling(
        steps=suite.steps or e.steps,
        guidance=guidance,
        solver=suite.solver or e.solver,
        seed=seed,
        micro=cfg.batch.micro,
        decode=cfg.batch.decode,
        autocast=partial(build.autocast, cfg.train.precision, device),
    )


def _key(task: Task, cfg: Config, sampling: Sampling, baseline: float | str | None) -> str:
    """A hash of all that the base rows depend on."""
    suite = task.suite.model_dump(mode="json", exclude=UNMEASURED)
    parts = [
        suite,
        [_digest(path.read_bytes()) for path in python_files(suite)],
        importlib.metadata.version("flowrl"),
        task.prompts,
        cfg.model.model_dump(mode="json"),
        cfg.train.precision,
        sampling.steps,
        sampling.guidance,
        sampling.solver,
        sampling.seed,
        baseline,
    ]
    return _digest(json.dumps(parts, sort_keys=True, default=str).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def python_files(value: Any) -> list[Path]:
    """The user's files that settings name, as "file.py" or "file.py:function"."""
    if isinstance(value, dict):
        return [path for item in value.items() for part in item for path in python_files(part)]
    if isinstance(value, list | tuple):
        return [path for part in value for path in python_files(part)]
    path = (
        Path(value[: value.rfind(".py") + 3]).expanduser()
        if isinstance(value, str) and ".py" in value
        else None
    )
    return [path] if path is not None and path.is_file() else []


def trained_on(cfg: Config) -> list[str]:
    """Rewards whose weight is not 0, by their names."""
    return sorted(
        {
            str(entry.get("name", label))
            for label, entry in cfg.reward.items()
            if entry.get("weight", 1.0)
        }
    )


def write(run: Path, name: str, record: dict[str, Any]) -> Path:
    """Write run/suites/<name>.json atomically -> its path."""
    path = run / FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, allow_nan=False))
    os.replace(temporary, path)
    return path


def peaks(
    run: run_folder.Run, trained: Collection[str], guidance: float | str
) -> dict[str, dict[str, Any]]:
    """Of every eval/ reading that was not trained on (labels of rewards): the iteration of its
    highest value and what became of it since.

    From metrics.jsonl, and the rows of evaluation.json that say at which iteration they were made
    and have the run's own guidance ("before, guided" has another one).
    -> {"iteration", "value", "last_iteration", "last"} of each reading.
    """
    curves: dict[str, dict[int, float]] = {}
    for row in run.evaluation.get("rows", []):
        for name, entry in (
            row.get("metrics", {}).items()
            if "iteration" in row and row["guidance"] == guidance
            else ()
        ):
            curves.setdefault(name, {})[int(row["iteration"])] = entry["mean"]
    for row in run.metrics:
        for name, value in row.items():
            if name.startswith("eval/") and isinstance(value, int | float):
                curves.setdefault(name.removeprefix("eval/"), {})[int(row["iteration"])] = float(
                    value
                )
    out: dict[str, dict[str, Any]] = {}
    for name, curve in curves.items():
        label = name.partition("/")[0]
        if (
            name != "total"
            and label not in trained
            and len(curve) > 1
            and (name == label or curve != curves.get(label))
        ):
            best, last = max(curve, key=lambda i: (curve[i], -i)), max(curve)
            out[name] = {
                "iteration": best,
                "value": curve[best],
                "last_iteration": last,
                "last": curve[last],
            }
    return out


def _contamination(cfg: Config, task: Task) -> tuple[dict[str, Any] | None, str | None]:
    """(counts, None), or (None, why the training prompts cannot be read any more)."""
    try:
        prompts = (
            scored_dataset.load(cfg.data.offline).prompts
            if cfg.data.offline
            else data.load_prompts(cfg.data.train)
        )
    except ValueError as error:
        return None, f"training prompts were not compared with the suite's: {error}"
    return (
        statistics.contamination(
            (p["prompt"] for p in prompts), (p["prompt"] for p in task.prompts)
        ),
        None,
    )


def _warnings(task: Task, record: dict[str, Any]) -> list[str]:
    out = []
    for label, entry in task.suite.held_out.items():
        if (name := str((entry or {}).get("name", label))) in record["trained"]:
            out.append(
                f'{record["run"]} was trained on the reward "{name}", so in suite "{task.name}" it'
                " is no held-out reward"
            )
    found = record["contamination"]
    if found and found["exact"]:
        out.append(
            f'{found["exact"]} of the {found["suite"]} prompts of suite "{task.name}" are training'
            f" prompts of {record['run']}"
        )
    for row in record["rows"]:
        for reading, count in row["invalid"].items():
            out.append(
                f"{row['name']}: {reading} could not score {count} of {row['images']} images; they"
                " are left out"
            )
    return out
