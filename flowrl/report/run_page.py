"""report.html: one file that shows what a run did, readable without a network and without this
program.

Reads a run folder (config.yaml, metrics.jsonl, evaluation.json, environment.json, samples/). A
missing piece leaves a sentence in its place; only a folder that holds no run is an error.
"""

from __future__ import annotations

import base64
import datetime
import os
import shlex
from html import escape
from pathlib import Path
from typing import Any

from flowrl.report import answers, suite_page
from flowrl.report.charts import interval_chart, line_chart, stacked_bar
from flowrl.report.html import PAGE, STYLE
from flowrl.report.numbers import (
    HEADS,
    decimals,
    evaluation_rows,
    interval_text,
    mean_text,
    metric_names,
    paired_sentence,
    row_head,
)
from flowrl.runtime.run_folder import Run, environment, read, read_json

NOT_PHASES = (
    "/iteration",
    "/total",
    "_work",
    "_fraction",
)  # endings of sums, kinds of work and shares


CURVES = {  # heading -> prefixes of metrics.jsonl
    "Reward": ("reward/",),
    "Held-out evaluation": ("eval/",),
    "Policy": ("policy/", "loss"),
}


def build(run_path: str | Path) -> Path:
    """Write <run_path>/report.html and return its path. A folder that is no run -> ValueError."""
    run = read(Path(run_path))
    settings = _settings(run)
    body = [
        _header(run, settings),
        *(f'<p class="note">{escape(note)}</p>' for note in run.notes),
        _section("Result", _result(run)),
        *(
            [_section("Evaluation suites", found)]
            if (found := suite_page.section(run.path))
            else []
        ),
        _section(
            "Before and after", _pictures(run) + answers.folded(evaluation_rows(run.evaluation))
        ),
        _section("Learning curves", _curves(run)),
        _section("Where the time went", _ledger(run)),
        _section("Reproduce", _reproduce(run, settings)),
        _section("Configuration", _folded("config.yaml", run.config)),
        _section("Environment", _environment(run)),
    ]
    page = PAGE.format(title=escape(f"flowrl: {run.path.name}"), style=STYLE, body="\n".join(body))
    target, unfinished = run.path / "report.html", run.path / "report.html.part"
    unfinished.write_text(page, encoding="utf-8")
    os.replace(unfinished, target)
    return target


def _settings(run: Run) -> dict[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(run.config) if run.config else {}
    except yaml.YAMLError as error:
        raise ValueError(f"{run.path / 'config.yaml'} is not YAML ({error})") from error
    return value if isinstance(value, dict) else {}


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body or _missing(f'Nothing was recorded for “{title.lower()}”.')}</section>"


def _folded(summary: str, text: str) -> str:
    return (
        f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
        if text
        else ""
    )


def _missing(sentence: str) -> str:
    return f'<p class="missing">{escape(sentence)}</p>'


def _header(run: Run, settings: dict[str, Any]) -> str:
    chips = []
    for key in ("model", "algorithm", "reward", "seed"):
        value = settings.get(key)
        if isinstance(value, dict):
            value = (
                value.get("name")
                or value.get("source")
                or (", ".join(map(str, value)) if key == "reward" else None)
            )
        if value is not None:
            chips.append(f"<li><span>{escape(key)}</span>{escape(str(value))}</li>")
    if run.metrics:
        seconds = sum(row.get("time/iteration") or 0.0 for row in run.metrics)
        chips.append(f"<li><span>iterations</span>{len(run.metrics)}</li>")
        chips.append(f"<li><span>training time</span>{_duration(seconds)}</li>" if seconds else "")
    kind = f'<p class="kind">flowrl report · {datetime.date.today().isoformat()}</p>'
    return (
        f"<header>{kind}<h1>{escape(run.path.name)}</h1><ul"
        f' class="chips">{"".join(chips)}</ul></header>'
    )


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {round(seconds) % 60:02d} s"


def _result(run: Run) -> str:
    rows, metrics = evaluation_rows(run.evaluation), metric_names(run.evaluation)
    if not rows or not metrics:
        return _missing(
            "There is no evaluation.json with rows: flowrl evaluate measures the policy before and"
            " after on held-out prompts."
        )
    first, paired = metrics[0], run.evaluation.get("paired", {})
    return (
        _headline(first, paired.get(first), rows)
        + _intervals(first, rows)
        + _table(rows, metrics, paired)
        + _parts(first, rows)
    )


def _headline(metric: str, paired: dict[str, Any] | None, rows: list[dict[str, Any]]) -> str:
    if paired is None:
        return _missing(
            "There is no paired difference in evaluation.json, so no interval of the improvement"
            " can be shown."
        )
    digits = decimals(paired["ci"])
    gain, low, high = (f"{value:+.{digits}f}" for value in (paired["difference"], *paired["ci"]))
    before, after = (mean_text(row.get("metrics", {}).get(metric)) for row in (rows[0], rows[-1]))
    verdict = (
        "improved"
        if paired["ci"][0] > 0
        else "got worse"
        if paired["ci"][1] < 0
        else "no clear change"
    )
    css = {"improved": "good", "got worse": "bad"}.get(verdict, "")
    over = (
        f"; {paired['clusters']} different prompts were resampled" if "clusters" in paired else ""
    )
    from_to = f": {before:.3f} → {after:.3f}" if before is not None and after is not None else ""
    return (
        f'<div class="headline"><strong class="{css}">{gain}</strong><div><b>{escape(metric)}'
        f" {verdict}{from_to}</b><p>95% interval of the paired difference: {low} to {high}, same"
        f" held-out prompts, same seeds{over}.</p></div></div>"
    )


def _intervals(metric: str, rows: list[dict[str, Any]]) -> str:
    entries = [(str(row.get("name", "")), row.get("metrics", {}).get(metric)) for row in rows]
    drawn = [
        (name, e["mean"], *e["ci"]) for name, e in entries if isinstance(e, dict) and e.get("ci")
    ]
    return (
        f"<figure>{interval_chart(drawn)}<figcaption>{escape(metric)}, mean and 95%"
        " interval</figcaption></figure>"
        if drawn
        else ""
    )


def _table(rows: list[dict[str, Any]], metrics: list[str], paired: dict[str, Any]) -> str:
    lines = []
    for row in rows:
        cells = [escape(cell) for cell in row_head(row)]
        for metric in metrics:
            mean, _, ci = interval_text(row.get("metrics", {}).get(metric)).partition(" ")
            cells.append(f"{mean}<small>{ci}</small>")
        lines.append(cells)
    foot = "".join(
        f"<li>{escape(paired_sentence(metric, paired[metric]))}</li>"
        for metric in metrics
        if metric in paired
    )
    return (
        _html_table(["", *HEADS, *metrics], lines, css="result") + f'<ul class="foot">{foot}</ul>'
    )


def _html_table(heads: list[str], lines: list[list[str]], css: str = "") -> str:
    """heads are text, cells are HTML."""
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" for cells in lines
    )
    return (
        '<div class="scroll"><table'
        f' class="{css}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _parts(metric: str, rows: list[dict[str, Any]]) -> str:
    """Accuracy a task, from the rows' "tasks": {metric: {task: mean}}."""
    columns = {str(row.get("name", "")): row.get("tasks", {}).get(metric, {}) for row in rows}
    tasks = list(dict.fromkeys(task for column in columns.values() for task in column))
    lines = [
        [
            escape(task.replace("_", " ")),
            *(interval_text(column.get(task)) for column in columns.values()),
        ]
        for task in tasks
    ]
    return (
        f"<h3>{escape(metric)} by task</h3>{_html_table(['task', *columns], lines, css='even')}"
        if tasks
        else ""
    )


def _pictures(run: Run) -> str:
    pair = run.path / "samples" / "before_after.png"
    if pair.exists():
        legend = (
            "Same prompt, same noise in each pair. Coloured edges, if there are any: green where"
            " the verifier accepts, red where not."
        )
        return f"<figure>{_image(pair)}<figcaption>{legend}</figcaption></figure>"
    single = [run.path / "samples" / f"{name}.png" for name in ("before", "after")]
    there = [
        f"<figure>{_image(p)}<figcaption>{p.stem}</figcaption></figure>"
        for p in single
        if p.exists()
    ]
    missing = [p.name for p in single if not p.exists()]
    lacking = (
        f"samples/before_after.png and samples/{' and samples/'.join(missing)} are missing: the run"
        " ended before it drew them."
    )
    return "".join(there) + (_missing(lacking) if missing else "")


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(path.stem.replace("_", " "))}" src="data:image/png;base64,{data}">'


def _curves(run: Run) -> str:
    names = list(
        dict.fromkeys(
            key for row in run.metrics for key, v in row.items() if isinstance(v, int | float)
        )
    )
    out = []
    for colour, (heading, prefixes) in enumerate(CURVES.items()):
        charts = []
        for name in sorted(
            (n for n in names if n.startswith(prefixes)), key=lambda n: (n != "reward/total", n)
        ):
            points = [
                (row.get("iteration", i), row[name])
                for i, row in enumerate(run.metrics)
                if isinstance(row.get(name), int | float)
            ]
            charts.append(line_chart(name, points, colour=colour))
        out.append(
            f'<h3>{heading}</h3><div class="charts">{"".join(charts)}</div>' if any(charts) else ""
        )
    out.append(_decisive(run))
    return "".join(out) or _missing(
        "metrics.jsonl is missing or holds no curves: the run stopped before its first iteration"
        " was over."
    )


def _decisive(run: Run) -> str:
    """Of a run whose plan forks: how much of the variance of rewards each step decides, a mean over
    iterations."""
    by_step: dict[int, list[float]] = {}
    for row in run.metrics:
        for key, value in row.items():
            if key.startswith("tree/variance/"):
                by_step.setdefault(int(key.rpartition("/")[2]), []).append(value)
    if not by_step:
        return ""
    points = [(float(step), sum(values) / len(values)) for step, values in sorted(by_step.items())]
    return (
        "<h3>Variance of rewards decided by each step</h3><div"
        f' class="charts">{line_chart("tree/variance", points, xlabel="step")}</div>'
    )


def _is_phase(key: str, value: Any, prefix: str) -> bool:
    return (
        key.startswith(prefix) and not key.endswith(NOT_PHASES) and isinstance(value, int | float)
    )


def _sums(run: Run, keep) -> dict[str, float]:
    """Sums over all iterations of the entries that keep(key, value) chooses."""
    out: dict[str, float] = {}
    for row in run.metrics:
        for key, value in row.items():
            if keep(key, value):
                out[key] = out.get(key, 0.0) + value
    return out


def _ledger(run: Run) -> str:
    phases = {
        key[5:]: value for key, value in _sums(run, lambda k, v: _is_phase(k, v, "time/")).items()
    }
    calls = {
        key[4:]: value for key, value in _sums(run, lambda k, v: _is_phase(k, v, "nfe/")).items()
    }
    whole = _sums(run, lambda k, v: k == "time/iteration" and v).get("time/iteration", 0.0)
    work = {
        k[5:-5]: v
        for k, v in _sums(
            run, lambda k, v: k.startswith("time/") and k.endswith("_work") and v
        ).items()
    }
    if whole > sum(phases.values()) > 0:
        phases["between phases"] = whole - sum(phases.values())
    if work and whole > sum(work.values()):
        work["everything else"] = whole - sum(work.values())
    bars = (
        ("Time by phase", phases, "s"),
        ("Time by kind of work", work, "s"),
        ("Network rows by phase", calls, "rows"),
    )
    out = [
        f"<h3>{heading}</h3>{stacked_bar(parts, unit=unit)}"
        for heading, parts, unit in bars
        if sum(parts.values()) > 0
    ]
    return "".join(out) or _missing("metrics.jsonl holds no time/ entries.")


def _reproduce(run: Run, settings: dict[str, Any]) -> str:
    """A command that trains the same again, into another folder, from where this run was
    started."""
    folder = Path(settings.get("output") or f"runs/{run.path.name}")
    if run.path.parts[-len(folder.parts) :] != folder.parts:  # the run was moved
        folder = run.path
    again = shlex.join(["flowrl", "train", str(folder / "config.yaml"), f"output={folder}-again"])
    return (
        f"<pre>{escape(again)}</pre><p>Type it where this run was started.</p>"
        if run.config
        else ""
    )


def _environment(run: Run) -> str:
    recorded = run.path / "environment.json"
    versions = read_json(recorded) if recorded.exists() else environment()
    note = (
        ""
        if recorded.exists()
        else "<p>Of the machine that wrote this report; the run itself recorded none.</p>"
    )
    return (
        note
        + '<dl class="env">'
        + "".join(
            f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in versions.items()
        )
        + "</dl>"
    )
