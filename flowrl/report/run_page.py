"""report.html: one file that shows what a run did, readable without a network and without flowrl.

It reads a run folder (config.yaml, metrics.jsonl, evaluation.json, environment.json, history.jsonl,
samples/, suites/). A missing piece leaves a sentence in its place; only a folder without a run is
an error. This file prepares the values; the markup is in templates/run.html.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from flowrl.report import answers, pictures, suite_page, watch_page
from flowrl.report.charts import gallery, interval_chart, measured, stacked_bar
from flowrl.report.numbers import (
    HEADS,
    before_and_after,
    distinct_metrics,
    evaluation_rows,
    interval_text,
    of_few,
    paired_sentence,
    row_head,
    too_small,
)
from flowrl.report.render import render
from flowrl.report.watch_page import points
from flowrl.runtime import yaml_text
from flowrl.runtime.log import logger
from flowrl.runtime.statistics import ENOUGH
from flowrl.runtime.store import files, history, side_files
from flowrl.runtime.store.run_folder import (
    RunFolder,
    environment,
    read,
    read_peak,
    trained_iterations,
)
from flowrl.runtime.store.side_files import EDITED, shortened, spared

Metrics = Sequence[dict[str, Any]]  # lines of metrics.jsonl
Rows = Sequence[dict[str, Any]]  # rows of evaluation.json

CURVES = {  # heading -> prefixes of metrics.jsonl
    "Reward": ("reward/",),
    "Held-out evaluation": ("eval/", "validation/"),
    "Updates": ("policy/", "loss", "gradient/", "optimizer/lr"),
    "Samples and prompts": ("diversity/", "prompts/", "replay/"),
}
# endings of metrics that are no phases: sums, work and shares
NOT_PHASES = ("/iteration", "/total", "_work", "_fraction")


def build(run_path: str | Path, output: Path | None = None) -> Path:
    """Write <run_path>/report.html, or `output`, and return its path; ValueError if the folder is
    not a run."""
    run = read(Path(run_path), spare=True)
    html = page(run)
    for note in run.notes:
        logger.warning(note)
    return files.write(output or run.path / "report.html", html)


def page(run: RunFolder, template: str = "run.html", **more: str) -> Markup:
    """Make the page, without writing anything. A damaged file leaves a sentence in the run's notes,
    and the rest is shown. template: run.html, or one that extends it and takes `more`."""
    settings = spared(run.notes, settings_of, run, empty={})
    peak = spared(run.notes, read_peak, run.path, empty={})
    recorded = spared(run.notes, _environment, run, empty={})
    suites = suite_page.section(run.path, run.notes)
    chips = _chips(run, settings)
    # the policy of the page names the hash of its one script, so that no other runs
    script = render("page.js")
    return render(
        template,
        run=run,
        date=datetime.date.today().isoformat(),
        chips=chips,
        result=_result(run.evaluation, chips),
        suites=suites,
        shown=pictures.of_run(run.path / "samples"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        answers=answers.folded(evaluation_rows(run.evaluation)),
        against=watch_page.against(run.metrics, peak),
        peak=watch_page.sentence(peak),
        detectors=watch_page.detectors(run.metrics),
        curves=_curves(run.metrics),
        bars=_bars(run.metrics),
        history=[_event(line) for line in history.read(run.path)],
        command=_command_again(run, settings),
        recorded=bool(recorded),
        environment=recorded or environment(),
        **more,
    )


def _event(line: dict[str, Any]) -> str:
    """Write a line of history.jsonl as a sentence."""
    what = f": {line['what']}" if line.get("what") else ""
    when, event, iteration = (line.get(key, "?") for key in ("time", "event", "iteration"))
    who = f"process {line.get('pid', '?')} on {line.get('host', '?')}"
    return f"{when} {event} at iteration {iteration}{what} ({who})"


def settings_of(run: RunFolder) -> dict[str, Any]:
    path = run.path / "config.yaml"
    unread = not run.config and path.exists() and path.stat().st_size  # the notes say so
    if not path.exists() or unread:
        return {}
    try:
        value = yaml_text.load(run.config)
        what = "" if isinstance(value, dict) else f"it holds {shortened(value)}, not settings"
    except ValueError as error:
        what = " ".join(str(error).split())
    if what:
        again = f"delete it and write it again with flowrl train --resume {run.path}"
        raise ValueError(f"{path} {EDITED} ({what}); restore it, or {again}")
    return value


def _chips(run: RunFolder, settings: dict[str, Any]) -> dict[str, str]:
    """The facts below the title."""
    keys = ("model", "algorithm", "reward", "seed")
    named = {key: name_of(key, settings.get(key)) for key in keys}
    chips = {key: name for key, name in named.items() if name is not None}
    chips |= {"model": plain_name(chips["model"])} if "model" in chips else {}
    if run.metrics:
        chips["iterations"] = str(len(trained_iterations(run.metrics)))
        seconds = _sums(run.metrics).get("time/iteration")
        chips |= {"training time": _duration(seconds)} if seconds else {}
    for key, folder in (("LoRA", "lora"), ("LoRA of the peak", "lora-peak")):
        chips |= {key: f"{folder}/"} if (run.path / folder).is_dir() else {}
    return chips


def name_of(key: str, value: Any) -> str | None:
    """Name of a group of settings; rewards have their labels as names."""
    labels = None
    if isinstance(value, dict):
        labels = ", ".join(map(str, value)) if key == "reward" else None
        value = value.get("label") or value.get("name") or value.get("source")
    return str(value) if isinstance(value, str | int | float) else labels


def plain_name(model: str) -> str:
    """Name a model without folder, owner and commit.

    >>> plain_name("stabilityai/stable-diffusion-3.5-medium@b940f67")
    'stable-diffusion-3.5-medium'
    """
    if model.startswith("package:flowrl."):
        return "the embedded model"
    return model.partition("@")[0].rstrip("/").rpartition("/")[2] or model


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {round(seconds) % 60:02d} s"


# ---------------------------------------------------------------------------
# result


def _result(evaluation: dict[str, Any], chips: Mapping[str, str]) -> list[Markup]:
    """Show the improvement, and all rows; [] where nothing was measured. chips: the names of method
    and model."""
    rows, titles = evaluation_rows(evaluation), distinct_metrics(evaluation)
    if not rows or not titles:
        return []
    metric, title = next(iter(titles.items()))
    paired = evaluation.get("paired", {})
    tasks = {str(row.get("name", "")): row.get("tasks", {}).get(metric, {}) for row in rows}
    # settings in which rows differ are columns; the others are said once
    settings = dict(zip(("", *HEADS), zip(*map(row_head, rows), strict=True), strict=True))
    differ = {head: cells for head, cells in settings.items() if not head or len({*cells}) > 1}
    cells = [[interval_text(row.get("metrics", {}).get(name)) for name in titles] for row in rows]
    improvement = render(
        "result.html",
        metric=title,
        headline=_headline(evaluation, metric, chips) if metric in paired else None,
        paired=paired.get(metric),
        enough=ENOUGH,
        intervals=_intervals(metric, rows),
    )
    whole = render(
        "rows.html",
        metric=title,
        same=[
            f"{head} {own[0]}" for head, own in settings.items() if head not in differ and own[0]
        ],
        heads=[*differ, *titles.values()],
        rows=[
            [*own, *of] for own, of in zip(zip(*differ.values(), strict=True), cells, strict=True)
        ],
        differences=[paired_sentence(evaluation, n, t) for n, t in titles.items() if n in paired],
        task_heads=["task", *tasks],
        tasks=_task_lines(list(tasks.values())),
    )
    return [improvement, whole]


def _headline(evaluation: dict[str, Any], metric: str, chips: Mapping[str, str]) -> dict[str, str]:
    """Say in a sentence what a difference bears: which method changed which metric of which
    model."""
    paired, css = evaluation["paired"][metric], ""
    ci, means = paired["ci"], before_and_after(evaluation, metric)
    method = chips.get("algorithm", "training")
    what = metric + (f" of {chips['model']}" if "model" in chips else "")
    if of_few(paired):
        said = f"{what} was measured on too few prompts for a verdict on {method}"
    elif too_small(evaluation, metric):
        said = f"{what} is the same before and after {method}, in the digits shown"
    elif ci and ci[0] > 0:
        said, css = f"{method} improved {what}", "good"
    elif ci and ci[1] < 0:
        said, css = f"{method} made {what} worse", "bad"
    else:
        said = f"{method} did not change {what} clearly"
    gain, _, interval = interval_text(paired, key="difference").rstrip("]").partition(" [")
    said += f": {means[0]} before, {means[1]} after" if means else ""
    return {"gain": gain, "interval": interval.replace(", ", " to "), "said": said, "css": css}


def _intervals(metric: str, rows: Rows) -> Markup:
    entries = [(str(row.get("name", "")), row.get("metrics", {}).get(metric)) for row in rows]
    drawn = [
        (name, e["mean"], *ci)
        for name, e in entries
        if isinstance(e, dict) and e["mean"] is not None and (ci := e.get("ci"))
    ]
    return interval_chart(drawn) if drawn else Markup()


def _task_lines(columns: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The accuracy of each task: a line a task, a column a row of the evaluation."""
    tasks = dict.fromkeys(task for column in columns for task in column)
    return [
        [task.replace("_", " "), *(interval_text(column.get(task)) for column in columns)]
        for task in tasks
    ]


# ---------------------------------------------------------------------------
# metrics


def _curves(metrics: Metrics) -> dict[str, Markup]:
    """Heading -> charts; headings without charts are left out."""
    names = dict.fromkeys(
        key for row in metrics for key, v in row.items() if isinstance(v, int | float)
    )
    out = {}
    for colour, (heading, prefixes) in enumerate(CURVES.items()):
        shown = sorted(
            (n for n in names if n.startswith(prefixes)), key=lambda n: (n != "reward/total", n)
        )
        out[heading] = gallery({n: measured(n, points(metrics, n), colour=colour) for n in shown})
    out["Variance of rewards decided by each step"] = _decisive_steps(metrics)
    return {heading: charts for heading, charts in out.items() if charts}


def _decisive_steps(metrics: Metrics) -> Markup:
    """Draw the share of the variance of rewards that each step of a plan with forks decides, a mean
    over iterations."""
    by_step: dict[int, list[float]] = {}
    for row in metrics:
        for key, value in row.items():
            step = key.removeprefix("tree/variance/")
            if step.isdecimal() and isinstance(value, int | float):
                by_step.setdefault(int(step), []).append(value)
    points = [(float(step), sum(values) / len(values)) for step, values in sorted(by_step.items())]
    name = "tree/variance"
    return gallery({name: measured(name, points, xlabel="step")}, xlabel="step")


def _bars(metrics: Metrics) -> dict[str, Markup]:
    """Draw what all iterations took together: heading -> a bar."""
    sums = _sums(metrics)
    whole, calls = sums.get("time/iteration", 0.0), _phases(sums, "nfe/")
    phases, work = _phases(sums, "time/"), _kinds_of_work(sums)
    if whole > sum(phases.values()) > 0:
        phases["between phases"] = whole - sum(phases.values())
    if work and whole > sum(work.values()):
        work["everything else"] = whole - sum(work.values())
    bars = {
        "Time by phase": (phases, "s"),
        "Time by kind of work": (work, "s"),
        "Network rows by phase": (calls, "rows"),
    }
    return {
        heading: stacked_bar(parts, unit=unit)
        for heading, (parts, unit) in bars.items()
        if sum(parts.values()) > 0
    }


def _sums(metrics: Metrics) -> dict[str, float]:
    """Sums over all iterations."""
    out: dict[str, float] = {}
    for row in metrics:
        for key, value in row.items():
            if isinstance(value, int | float):
                out[key] = out.get(key, 0.0) + value
    return out


def _phases(sums: dict[str, float], prefix: str) -> dict[str, float]:
    return {
        key.removeprefix(prefix): value
        for key, value in sums.items()
        if key.startswith(prefix) and not key.endswith(NOT_PHASES)
    }


def _kinds_of_work(sums: dict[str, float]) -> dict[str, float]:
    return {
        key.removeprefix("time/").removesuffix("_work"): seconds
        for key, seconds in sums.items()
        if key.startswith("time/") and key.endswith("_work") and seconds
    }


def _environment(run: RunFolder) -> dict[str, Any]:
    """Versions of the machine that ran it; {} where the run recorded none."""
    path = run.path / "environment.json"
    again = "resume the run, which writes it"
    return side_files.read(path, again=again) if path.exists() else {}


def _command_again(run: RunFolder, settings: dict[str, Any]) -> str:
    """The command that trains the same again, into another folder, from where this run was
    started."""
    folder = Path(str(settings.get("output") or f"runs/{run.path.name}"))
    if run.path.parts[-len(folder.parts) :] != folder.parts:  # the run folder was moved
        folder = run.path
    return shlex.join(["flowrl", "train", str(folder / "config.yaml"), f"output={folder}-again"])
