"""Suites on run folders: base and tuned model side by side, written to run/suites/<name>.json.

Several runs also get a side-effect matrix. A record holds, for each row (base, tuned, and "base,
guided" where the run's config asks for it), scores over all and by category with 95% intervals,
diversity, the best-of-N curve and every value; the paired differences of "tuned" to the others; at
which iteration held-out rewards peaked in training; how much of the suite was trained on; and
warnings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl import __version__
from flowrl.config import build
from flowrl.config.load import read_config
from flowrl.config.schema import Config
from flowrl.data import scored_dataset
from flowrl.data.prompts import Prompts, load_training
from flowrl.evaluation.held_out import Sampling, settings_of
from flowrl.evaluation.suites.contamination import contamination
from flowrl.evaluation.suites.measure import Measured, MeasureJournal
from flowrl.evaluation.suites.suite import Suite, Task, load, prepare, run_suite, with_rewards
from flowrl.evaluation.suites.summary import matrix, summary
from flowrl.runtime.log import logger
from flowrl.runtime.paths import located
from flowrl.runtime.processes.world import ALONE, Alone, World
from flowrl.runtime.store import checkpoint, files, run_folder

FOLDER = "suites"
# fields of a suite that change no measured value
UNMEASURED = {"title", "origin", "metric", "aggregate", "scale"}
Rows = dict[str, Measured]  # name of a row ("base", "tuned" ...) -> its readings


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """Settings that the command line changes; None: the suite's own."""

    images: int | None = None  # images of each prompt
    best_of: int | None = None  # largest N of the best-of-N curve; None: the number of images
    count: int | None = None  # number of prompts, spread evenly over the file
    steps: int | None = None  # number of ODE steps
    guidance: float | str | None = None  # scale of guidance, "none" or "pipeline"
    rlg: float | None = None  # weight of RLG in the tuned row; None: that of the run's evaluation
    seed: int = 0  # seed of the noise
    prompts: str | None = None  # source of the prompts
    rewards: Sequence[str] = ()  # settings of the suite's rewards, as words: see `with_rewards`
    held_out: Sequence[str] = ()  # further rewards to read, as words: see `with_rewards`


def evaluate_runs(
    runs: Sequence[Path],
    name: str,
    options: SuiteOptions,
    *,
    into: Mapping[Path, Path] | None = None,
    world: World | Alone = ALONE,
) -> list[dict[str, Any]]:
    """Evaluate runs on a suite and write suites/<name>.json of each -> the records.

    into: run -> the folder for its results, where that is not the run. world: the processes that
    share the samples; only the main one's records are kept. A fault of the suite, prompts, rewards
    or runs -> ValueError before anything is sampled. Runs of one base model share its rows.
    """
    # suite, configs, prompts and rewards are checked before time is spent on samples
    suite = _suite(name, options)
    options = replace(options, best_of=_longest_curve(options, suite))
    configs = [_config_of(run) for run in runs]
    task = prepare(Path(name).stem, suite)
    into = into or {run: run for run in runs}
    known: dict[str, Rows] = {}
    records: list[dict[str, Any]] = []
    for run, cfg in zip(runs, configs, strict=True):
        records.append(_evaluate(run, into[run], cfg, task, options, known, world))
    # the matrix compares the side effects of all runs, so it comes last
    if len(records) > 1:
        table = matrix(records)
        for run, record in zip(runs, records, strict=True):
            record["matrix"] = table
            write(into[run], task.name, record)
    return records


def _suite(name: str, options: SuiteOptions) -> Suite:
    """Load the suite, with what the command line changes."""
    fields = ("images", "count", "steps", "guidance", "prompts")
    suite = load(name, **{field: getattr(options, field) for field in fields})
    return with_rewards(suite, options.rewards, options.held_out)


def _longest_curve(options: SuiteOptions, suite: Suite) -> int:
    """The largest N of the best-of-N curve."""
    most = suite.images if options.best_of is None else options.best_of
    if most > suite.images:
        raise ValueError(
            f"--best-of {most} needs at least {most} images a prompt, and this evaluation makes"
            f" {suite.images}; add --images {most}, or give a smaller --best-of"
        )
    return most


def _evaluate(
    run: Path,
    place: Path,
    cfg: Config,
    task: Task,
    options: SuiteOptions,
    known: dict[str, Rows],
    world: World | Alone,
) -> dict[str, Any]:
    """Measure a run, and write its record, which is returned.

    place: folder of the record and its journal. known: rows of base models that were measured for
    other runs, by a hash of all that they depend on.
    """
    weights = build.newest_of(run)  # read once: the run may go on and write another checkpoint
    fixed = {key: getattr(task.suite, key) for key in ("steps", "guidance", "solver")}
    how = settings_of(cfg, **fixed, seed=options.seed, rlg=options.rlg)
    policy = build.load_tuned(cfg, weights).sized(how["height"], how["width"])
    sampling = Sampling(**how, autocast=build.autocast(cfg, policy.device), world=world)
    baseline = cfg.eval.baseline_guidance if task.suite.guidance is None else None
    guidances = [sampling.guidance, baseline or "none"]
    for guidance in guidances:
        policy.branches(guidance)  # raises ValueError for guidance that the model does not know
    for sentence in policy.unread(guidances, task.prompts[0]):
        logger.warning(sentence)
    key = _key(task, cfg, sampling, baseline)
    journal = MeasureJournal(
        place / FOLDER / f"{task.name}.part.jsonl",
        key=f"{key} {sampling.rlg} {_digest((weights.folder / checkpoint.MANIFEST).read_bytes())}",
    )
    base = known.setdefault(key, {})
    measured = run_suite(policy, task, sampling, baseline=baseline, journal=journal, known=base)
    record = {
        "suite": task.suite.model_dump(mode="json"),
        "name": task.name,
        "run": str(run),
        "checkpoint": weights.folder.name,
        "prompts": len(task.prompts),
        "seed": sampling.seed,
        "steps": sampling.steps,
        "solver": sampling.solver,
        "trained": trained_on(cfg),
        **summary(task, measured, options.best_of),
    }
    record |= _about(run, cfg, task, record)
    write(place, task.name, record)
    journal.close()
    return record


def _about(run: Path, cfg: Config, task: Task, record: dict[str, Any]) -> dict[str, Any]:
    """Notes on a record: when held-out rewards peaked, which prompts were copied, and warnings."""
    held_out = peaks(run_folder.read(run), _labels(cfg, record["trained"]), cfg.eval.guidance)
    counts, problem = _contamination(cfg, task)
    warnings = [*_warnings(task, record, counts), *([problem] if problem else [])]
    for sentence in warnings:
        logger.warning(sentence)
    return {"peaks": held_out, "contamination": counts, "warnings": warnings}


def _config_of(run: Path) -> Config:
    path = run_folder.config_file(run)
    for note in run_folder.read(run).notes:  # the run's other files are read before time is spent
        logger.warning(note)
    checkpoint.latest(run)
    return read_config(path)


def _key(task: Task, cfg: Config, sampling: Sampling, baseline: float | str | None) -> str:
    """A hash of all that the base rows depend on."""
    suite = task.suite.model_dump(mode="json", exclude=UNMEASURED)
    parts = [
        suite,
        [_digest(path.read_bytes()) for path in python_files(suite)],
        __version__,
        task.prompts,
        cfg.model.model_dump(mode="json"),
        cfg.train.precision,
        sampling.steps,
        sampling.guidance,
        sampling.solver,
        sampling.seed,
        *filter(None, (sampling.height, sampling.width)),
        baseline,
    ]
    return _digest(json.dumps(parts, sort_keys=True, default=_stable).encode())


def _stable(value: Any) -> str:
    """Represent a picture by its bytes: its text names a place in memory."""
    return _digest(value.tobytes()) if hasattr(value, "tobytes") else str(value)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def python_files(value: Any) -> list[Path]:
    """The user's files that settings name, as "file.py" or "file.py:function"."""
    if isinstance(value, dict):
        return [path for item in value.items() for part in item for path in python_files(part)]
    if isinstance(value, list | tuple):
        return [path for part in value for path in python_files(part)]
    if not isinstance(value, str) or ".py" not in value:
        return []
    path = located(value[: value.rfind(".py") + 3])
    return [path] if path.is_file() else []


def trained_on(cfg: Config) -> list[str]:
    """Rewards whose weight is not 0, and their gates, by their names."""
    weighted = {k: entry for k, entry in cfg.reward.items() if entry.get("weight", 1.0)}
    gates = {label for entry in weighted.values() for label in entry.get("gate") or ()}
    return sorted({_name(cfg, label) for label in weighted.keys() | gates})


def _labels(cfg: Config, names: Collection[str]) -> set[str]:
    """Labels of the config's rewards of these names."""
    return {label for label in cfg.reward if _name(cfg, label) in names}


def _name(cfg: Config, label: str) -> str:
    return str(cfg.reward[label].get("name", label))


def write(run: Path, name: str, record: dict[str, Any]) -> Path:
    """Write run/suites/<name>.json -> its path."""
    return files.write(run / FOLDER / f"{name}.json", json.dumps(record, allow_nan=False))


def peaks(
    run: run_folder.RunFolder, trained: Collection[str], guidance: float | str
) -> dict[str, dict[str, Any]]:
    """Find when held-out rewards peaked in training, and what became of them since.

    The result has every eval/ reading whose label is not in `trained`: {"iteration", "value",
    "last_iteration", "last"}.
    """
    curves = _curves(run, guidance)
    out: dict[str, dict[str, Any]] = {}
    for name, curve in curves.items():
        label = name.partition("/")[0]
        repeats = name != label and curve == curves.get(label)
        # with rewards by domain, a reading is eval/DOMAIN/REWARD
        summed = {"total", "macro", *trained} & {*name.split("/")}
        if summed or len(curve) < 2 or repeats:
            continue
        best, last = max(curve, key=lambda i: (curve[i], -i)), max(curve)
        out[name] = {
            "iteration": best,
            "value": curve[best],
            "last_iteration": last,
            "last": curve[last],
        }
    return out


def _curves(run: run_folder.RunFolder, guidance: float | str) -> dict[str, dict[int, float]]:
    """Read the curve of each reading, iteration -> mean, from metrics.jsonl and evaluation.json.

    Rows of evaluation.json count where they say at which iteration they were made and have the
    run's own guidance ("before, guided" has another one).
    """
    curves: dict[str, dict[int, float]] = {}
    for row in run.evaluation.get("rows", []):
        if "iteration" in row and row["guidance"] == guidance:
            for name, entry in row.get("metrics", {}).items():
                curves.setdefault(name, {})[int(row["iteration"])] = entry["mean"]
    for row in run.metrics:
        for name, value in row.items():
            if name.startswith("eval/") and isinstance(value, int | float):
                curve = curves.setdefault(name.removeprefix("eval/"), {})
                curve[int(row["iteration"])] = float(value)
    return curves


def _contamination(cfg: Config, task: Task) -> tuple[dict[str, Any] | None, str | None]:
    """Compare the prompts -> (counts, None), or (None, why the training prompts cannot be read any
    more)."""
    try:
        prompts = _training_prompts(cfg)
    except ValueError as error:
        return None, f"training prompts were not compared with the suite's: {error}"
    trained, asked = ((p["prompt"] for p in side) for side in (prompts, task.prompts))
    return contamination(trained, asked), None


def _training_prompts(cfg: Config) -> Prompts:
    if cfg.data.offline:
        return scored_dataset.load(cfg.data.offline, soft=True).prompts
    return load_training(cfg.data)


def _warnings(task: Task, record: dict[str, Any], copied: dict[str, Any] | None) -> list[str]:
    """Warnings that a reader should know before trusting the numbers."""
    names = [str((entry or {}).get("name", label)) for label, entry in task.suite.held_out.items()]
    out = [
        f'{record["run"]} was trained on the reward "{name}", so in suite "{task.name}" it is not'
        " a held-out reward"
        for name in names
        if name in record["trained"]
    ]
    if copied and copied["exact"]:
        out.append(
            f'{copied["exact"]} of the {copied["suite"]} prompts of suite "{task.name}" are'
            f" training prompts of {record['run']}"
        )
    return out + [
        f"{row['name']}: {reading} could not score {count} of {row['images']} images; they are left"
        " out"
        for row in record["rows"]
        for reading, count in row["invalid"].items()
    ]
