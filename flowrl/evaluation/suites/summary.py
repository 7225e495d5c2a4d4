"""The summary of a suite: values by image become rows with intervals, by model and task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.evaluation.suites import statistics
from flowrl.evaluation.suites.measure import DIMENSION, Measured
from flowrl.evaluation.suites.statistics import Cells, Design, Rule
from flowrl.evaluation.suites.suite import BY_QUESTION, Task

Values = dict[str, np.ndarray]  # reading -> (P, n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A reading's sums: overall with its rule, and by category (None: there are none); details:
    below categories, as "a - b" below "a"."""

    overall: Cells
    rule: Rule
    scale: float
    categories: Cells | None = None
    details: Cells | None = None


def summary(task: Task, measured: dict[str, Measured], most: int) -> dict[str, Any]:
    """{"rows", "paired": other row -> reading -> difference of "tuned" to it, overall and by
    category}."""
    chosen = statistics.design(
        [p["prompt"] for p in task.prompts], task.categories or [""] * len(task.prompts)
    )
    values: dict[str, Values] = {
        name: {k: v.double().numpy() for k, v in own.values.items()}
        for name, own in measured.items()
    }
    readings = _distinct(values, task.suite.headline)
    readings.sort(
        key=lambda name: (
            name != task.suite.headline,
            name.partition("/")[0] not in task.suite.rewards,
        )
    )
    rows = [
        _row(task, chosen, name, values[name], own, readings, most)
        for name, own in measured.items()
    ]
    paired = {
        name: _paired(task, chosen, values[name], values["tuned"], readings)
        for name in measured
        if name != "tuned"
    }
    for name, differences in paired.items():
        first, second = (
            {k: d.double().numpy()[:, None] for k, d in measured[row].diversity.items()}
            for row in (name, "tuned")
        )
        differences["diversity"] = {
            kind: _difference(first[kind], second[kind], chosen) for kind in second
        }
    return {"rows": rows, "paired": paired}


def _distinct(values: dict[str, Values], headline: str) -> list[str]:
    """Readings, the headline first; without a reward's part that is its score."""

    def repeats(name: str) -> bool:
        label, _, part = name.partition("/")
        return (
            bool(part)
            and name != headline
            and all(np.array_equal(v[name], v[label], equal_nan=True) for v in values.values())
        )

    return [
        headline,
        *(
            name
            for name in values["tuned"]
            if name != headline and DIMENSION not in name and not repeats(name)
        ),
    ]


def split(task: Task, chosen: Design, reading: str, values: Values) -> Split:
    """How a reading is summed up: the suite's own rewards by the suite's rule, all others by the
    mean over images."""
    suite, label = task.suite, reading.partition("/")[0]
    own = label in suite.rewards
    rule: Rule = suite.aggregate if own else "mean"
    whole, scale = statistics.cells({"": values[reading]}, chosen), suite.scale if own else 1.0
    if suite.category == BY_QUESTION:
        begin = f"{label}/{DIMENSION}"
        columns = {
            name.removeprefix(begin): value
            for name, value in values.items()
            if name.startswith(begin)
        }
        if reading != label or not columns:
            return Split(overall=whole, rule="mean", scale=scale)
        asked = {
            name: np.array(
                [sum(q["dimension"] == name for q in p["checklist"]) for p in task.prompts], float
            )
            for name in columns
        }
        details = statistics.cells(columns, chosen, asked)
        categories = details.merged(lambda name: name.partition("-")[0].strip())
        overall = categories if rule == "category_mean" else whole
        return Split(
            overall=overall, rule=rule, scale=scale, categories=categories, details=details
        )
    if task.categories is None:
        return Split(overall=whole, rule="mean", scale=scale)
    member = np.array(task.categories)
    columns = {
        name: np.where((member == name)[:, None], values[reading], np.nan)
        for name in dict.fromkeys(task.categories)
    }
    categories = statistics.cells(columns, chosen)
    return Split(overall=categories, rule=rule, scale=scale, categories=categories)


def _row(
    task: Task,
    chosen: Design,
    name: str,
    values: Values,
    own: Measured,
    readings: list[str],
    most: int,
) -> dict[str, Any]:
    splits = {reading: split(task, chosen, reading, values) for reading in readings}
    tables = {
        level: {
            reading: {
                part: statistics.score(table.only(part), chosen, scale=s.scale)
                for part in table.names
            }
            for reading, s in splits.items()
            if (table := getattr(s, level)) is not None
        }
        for level in ("categories", "details")
    }
    return {
        "name": name,
        "images": len(task.prompts) * task.suite.images,
        "nfe": own.nfe,
        "scores": {
            reading: statistics.score(s.overall, chosen, s.rule, s.scale)
            for reading, s in splits.items()
        },
        **tables,
        "invalid": {
            reading: n for reading in readings if (n := int(np.isnan(values[reading]).sum()))
        },
        "diversity": {
            kind: statistics.score(
                statistics.cells({"": d.double().numpy()[:, None]}, chosen), chosen
            )
            for kind, d in own.diversity.items()
        },
        "best_of": _curve(task, chosen, values, most),
        "answers": own.answers,
        "values": {
            reading: [[_rounded(v) for v in images] for images in rows.tolist()]
            for reading, rows in values.items()
        },
    }


def _curve(task: Task, chosen: Design, values: Values, most: int) -> list[dict[str, Any]]:
    """The suite's score of the best of N images by the headline, N = 1..most, summed up as the
    headline is."""
    headline = task.suite.headline
    read = {
        name: value
        for name, value in values.items()
        if name == headline or name.startswith(f"{headline}/{DIMENSION}")
    }
    best = statistics.best_of(values[headline], most, read)
    splits = [
        split(task, chosen, headline, {name: curve[:, n : n + 1] for name, curve in best.items()})
        for n in range(most)
    ]
    return [statistics.score(s.overall, chosen, s.rule, s.scale) for s in splits]


def _paired(
    task: Task, chosen: Design, before: Values, after: Values, readings: list[str]
) -> dict[str, Any]:
    both = {name: statistics.common(before[name], after[name]) for name in after if name in before}
    first, second = ({name: pair[i] for name, pair in both.items()} for i in (0, 1))
    out: dict[str, Any] = {"scores": {}, "categories": {}}
    for reading in readings:
        a, b = split(task, chosen, reading, first), split(task, chosen, reading, second)
        out["scores"][reading] = statistics.difference(
            a.overall, b.overall, chosen, a.rule, a.scale
        )
        if a.categories is not None and b.categories is not None:
            out["categories"][reading] = {
                part: statistics.difference(
                    a.categories.only(part), b.categories.only(part), chosen, scale=a.scale
                )
                for part in a.categories.names
            }
    return out


def _difference(before: np.ndarray, after: np.ndarray, chosen: Design) -> dict[str, Any] | None:
    a, b = (statistics.cells({"": own}, chosen) for own in statistics.common(before, after))
    return statistics.difference(a, b, chosen)


def _rounded(value: float) -> float | None:
    return round(value, 6) if np.isfinite(value) else None


def matrix(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Side effects: a row a run (what was trained), a column a reading (what was measured), entries
    tuned minus base with intervals."""
    first = records[0]
    shown = [
        name
        for name in first["paired"]["base"]["scores"]
        if "/" not in name or name == first["suite"]["metric"]
    ]
    return {
        "columns": shown,
        "rows": [
            {
                "run": r["run"],
                "trained": r["trained"],
                "entries": [r["paired"]["base"]["scores"].get(c) for c in shown],
            }
            for r in records
        ],
    }
