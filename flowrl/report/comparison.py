"""Several runs side by side: groups of seeds, gains with their intervals, cost, what differs.

It reads run folders only, and needs neither their models nor their files of prompts.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from flowrl.report import tables
from flowrl.report.numbers import distinct_metrics, interval_text, mean_of
from flowrl.report.run_page import name_of, settings_of
from flowrl.runtime.registry import did_you_mean
from flowrl.runtime.statistics import paired_over_runs, student
from flowrl.runtime.store.run_folder import RunFolder, config_file, read
from flowrl.runtime.text import listed
from flowrl.runtime.yaml_text import flatten

OWN = ("seed", "output")  # settings in which the runs of a group may differ
# keys of a row of evaluation.json
EVALUATED = ("steps", "guidance", "solver", "rlg", "seed", "height", "width", "images", "prompts")
UNSET = "unset"  # what stands for a setting that a run does not have
HEADS = ("", "seeds", "before", "after", "gain", "over seeds [95%]", "over prompts [95%]")
COST = ("iterations", "network rows", "seconds", "peak GB")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run that is compared."""

    name: str  # path of its folder, as it was given
    folder: RunFolder  # what its folder holds
    # dotted key of config.yaml -> value; a section -> name of what it chooses
    settings: dict[str, Any]

    @property
    def paired(self) -> dict[str, Any]:
        """Metric -> "after" minus "before"."""
        return self.folder.evaluation.get("paired") or {}

    def row(self, name: str) -> dict[str, Any]:
        """The row "before" or "after" of its evaluation; {} if there is none."""
        rows = self.folder.evaluation.get("rows", [])
        return next((row for row in rows if row["name"] == name), {})


Groups = dict[str, list[ComparedRun]]  # name of a group -> its runs


def grouped(paths: Sequence[Path], key: str | None = None) -> Groups:
    """Read runs and group them. key: a section, as algorithm, or a dotted setting, whose value
    names the group; None: every run is a group. A folder without a run -> ValueError."""
    places = [config_file(path).resolve() for path in paths]
    if twice := [
        path for path, place in zip(paths, places, strict=True) if places.count(place) > 1
    ]:
        raise ValueError(f"{twice[0]} and {twice[1]} are the same run; name each run once")
    runs = []
    for path in paths:
        config = settings_of(folder := read(path))
        named = {key: name for key, value in config.items() if (name := name_of(key, value))}
        settings = named | flatten(config)
        runs.append(ComparedRun(name=str(path), folder=folder, settings=settings))
    known = {name for run in runs for name in run.settings}
    if key is not None and key not in known:
        raise ValueError(f'no run has a setting "{key}"{did_you_mean(key, known)}')
    groups: Groups = {}
    for run in runs:
        name = str(run.settings.get(key)) if key else run.name
        groups.setdefault(f"{key}={name}" if key and "." in key else name, []).append(run)
    return groups


def metrics_of(groups: Groups) -> dict[str, str]:
    """Metric -> its title, for metrics of any run's evaluation, the headline first; "" where there
    are none."""
    runs = [run for group in groups.values() for run in group]
    rows = [row for run in runs for row in run.folder.evaluation.get("rows", [])]
    paired = {name: 0 for run in runs for name in run.paired}
    return distinct_metrics({"rows": rows, "paired": paired}) or {"": ""}


def numbers_of(metric: str, group: str, runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Means of a group by one metric, the ends of intervals of its gain, and the cost of a run;
    None: not known. seeds: number of runs that were measured before and after, else of all."""
    measured = [run for run in runs if metric in run.paired]
    gains = [run.paired[metric]["difference"] for run in measured]
    seeds = student(gains).ci if apart(measured) else (None, None)
    prompts = _over_prompts(metric, measured)
    before, after = (
        _mean(mean_of(run.row(side).get("metrics", {}).get(metric)) for run in measured or runs)
        for side in ("before", "after")
    )
    out = {"metric": metric, "group": group, "seeds": len(measured or runs), "before": before}
    out |= {"after": after, "gain": _mean(gains), "seeds_low": seeds[0], "seeds_high": seeds[1]}
    spent = [run.folder.metrics for run in runs]
    return out | {
        "prompts_low": prompts[0],
        "prompts_high": prompts[1],
        "iterations": fmean(map(len, spent)),
        "network_rows": _mean(sum(map(network_rows, rows)) for rows in spent),
        "seconds": _mean(sum(row.get("time/iteration") or 0 for row in rows) for rows in spent),
        "peak_gb": max((r.get("memory/peak_gb") or 0 for rows in spent for r in rows), default=0),
    }


def apart(runs: Sequence[ComparedRun]) -> bool:
    """Whether there are several runs, each with its own seed: else nothing is said over seeds."""
    return len({run.settings.get("seed") for run in runs}) == len(runs) > 1


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _over_prompts(metric: str, runs: Sequence[ComparedRun]) -> Sequence[float | None]:
    """Interval of the gain over prompts; none of one prompt, nor where the runs were not evaluated
    on the same."""
    if len(runs) == 1:
        return runs[0].paired[metric]["ci"] or (None, None)
    sides = [[run.row(side) for run in runs] for side in ("before", "after")]
    values = [[row.get("values", {}).get(metric) or [] for row in side] for side in sides]
    texts = [row.get("prompts") or [] for side in sides for row in side]
    images = {len(own) for side in values for own in side}
    if len(images) != 1 or not texts[0] or any(own != texts[0] for own in texts):
        return None, None
    if all(None in image for image in zip(*values[0], *values[1], strict=True)):
        return None, None
    groups = [texts[0][i % len(texts[0])] for i in range(images.pop())]
    known = ([[math.nan if v is None else v for v in own] for own in side] for side in values)
    return paired_over_runs(*known, groups=groups).ci or (None, None)


def network_rows(metrics: Mapping[str, Any]) -> float:
    """Network rows of an iteration. A row that is sampled or read counts 1, a trained row 3: its
    backward pass takes about twice its forward pass."""
    found = {k: v or 0 for k, v in metrics.items() if k.startswith("nfe/")}
    return sum(rows * (3 if name == "nfe/update" else 1) for name, rows in found.items())


# ---------------------------------------------------------------------------
# tables and sentences


def lines(groups: Groups, metric: str) -> list[list[str]]:
    """A line of text for each group, below HEADS and COST."""
    return [_line(numbers_of(metric, name, runs)) for name, runs in groups.items()]


def _line(row: Mapping[str, Any]) -> list[str]:
    ends = ([row[f"{over}_{end}"] for end in ("low", "high")] for over in ("seeds", "prompts"))
    entries = [{"difference": row["gain"], "ci": None if None in ci else ci} for ci in ends]
    seeds, prompts = (interval_text(entry, key="difference").partition(" ") for entry in entries)
    means = (interval_text({"mean": row[side]}) for side in ("before", "after"))
    cost = (f"{row[key]:,.0f}" for key in ("iterations", "network_rows", "seconds"))
    head = [row["group"], str(row["seeds"]), *means, prompts[0], seeds[2], prompts[2]]
    return [*head, *cost, f"{row['peak_gb']:.3g}"]


def written(groups: Groups, suffix: str) -> str:
    """All tables in the form of a file .md, .tex or .csv."""
    if suffix == ".csv":
        rows = [numbers_of(m, *group) for m in metrics_of(groups) for group in groups.items()]
        writer = csv.DictWriter(buffer := io.StringIO(), rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return buffer.getvalue()
    form, comment = (tables.latex, "% ") if suffix == ".tex" else (tables.markdown, "")
    parts = ["% needs \\usepackage{booktabs}"] * bool(comment)
    for metric, title in metrics_of(groups).items():
        parts += [comment + title, form((*HEADS, *COST), lines(groups, metric))]
    return "\n\n".join([*parts, *(comment + note for note in notes(groups))]) + "\n"


def notes(groups: Groups) -> list[str]:
    """Sentences about what limits the comparison: unlike evaluations, and groups whose runs are
    more, or less, than repetitions with other seeds."""
    runs = [run for group in groups.values() for run in group]
    rows = [run.row("after") for run in runs if run.row("after")]
    found = {key: {str(row.get(key, UNSET)) for row in rows} for key in EVALUATED}
    unlike = {key: sorted(values) for key, values in found.items() if len(values) > 1}
    said = [key if key == "prompts" else f"{key} ({listed(v)})" for key, v in unlike.items()]
    how = "These runs were not evaluated alike, so their numbers do not compare: they differ in"
    out = [f"{how} {', '.join(said)}."] if said else []
    for name, own in groups.items():
        if not apart(own) and len(own) > 1:
            out.append(f"Runs of {name} share a seed, so it has no interval over seeds.")
        if others := list(differences({run.name: [run] for run in own})):
            out.append(f"Runs of {name} differ in more than the seed: {listed(others)}.")
    none = "has no evaluation before and after, so it has no gain."
    out += [f"{run.name} {none}" for run in runs if not run.paired]
    return out + [f"{run.name}: {note}" for run in runs for note in run.folder.notes]


def differences(groups: Groups) -> dict[str, list[str]]:
    """Dotted setting -> its values in each group, for settings but OWN in which runs differ."""
    keys = {key for runs in groups.values() for run in runs for key in run.settings}
    # a setting .name or .label says what a section's short name does
    keys -= {key.rpartition(".")[0] for key in keys if key.endswith((".name", ".label"))}
    out = {}
    for key in sorted(keys - {*OWN}):
        values = [[run.settings.get(key, UNSET) for run in runs] for runs in groups.values()]
        texts = [
            dict.fromkeys(v if isinstance(v, str) else json.dumps(v) for v in own) for own in values
        ]
        if len({text for own in texts for text in own}) > 1:
            out[key] = [", ".join(own) for own in texts]
    return out
