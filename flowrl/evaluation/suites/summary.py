"""The summary of a suite: values by image become rows with intervals, by model and task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.evaluation.suites.measure import DIMENSION, Measured
from flowrl.evaluation.suites.scores import (
    Cells,
    Design,
    Rule,
    best_of,
    cells,
    common,
    design,
    difference,
    score,
)
from flowrl.evaluation.suites.suite import BY_QUESTION, Task
from flowrl.rewards.core.domains import is_asked

Values = Mapping[str, np.ndarray]  # reading -> its values (P, n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The sums of a reading: over everything, and by category where there are categories."""

    # sums over all in one category, or by category where the rule takes the means of categories
    overall: Cells
    rule: Rule  # how `overall` becomes one score
    scale: float  # factor of scores
    categories: Cells | None = None  # sums by category
    details: Cells | None = None  # sums by details of categories, as "a - b" below "a"


def summary(task: Task, measured: dict[str, Measured], most: int) -> dict[str, Any]:
    """Sum up the readings of all rows -> {"rows", "paired"}; paired: other row -> differences of
    "tuned" to it. most: largest N of the best-of-N curve."""
    strata = task.categories or [""] * len(task.prompts)
    resampling = design([p["prompt"] for p in task.prompts], strata)
    readings = _readings(list(measured.values()), task)
    rows = [_row(task, resampling, name, row, readings, most) for name, row in measured.items()]
    others = {name: row for name, row in measured.items() if name != "tuned"}
    return {
        "rows": rows,
        "paired": {
            name: _paired(task, resampling, row, measured["tuned"], readings)
            for name, row in others.items()
        },
    }


def _readings(measured: Sequence[Measured], task: Task) -> list[str]:
    """Choose the readings to report: the headline, the other ones of the suite's rewards, then
    those held out.

    Dimensions of a checklist are left out, and so are parts of a reward that equal its score.
    """
    headline = task.suite.headline

    def repeats(name: str) -> bool:
        label, _, part = name.partition("/")
        return bool(part) and all(
            np.array_equal(m.values[name], m.values[label], equal_nan=True) for m in measured
        )

    others = [n for n in measured[-1].values if n != headline and DIMENSION not in n]
    kept = [name for name in others if not repeats(name)]
    kept.sort(key=lambda name: name.partition("/")[0] not in task.suite.rewards)
    return [headline, *kept]


def split(task: Task, resampling: Design, reading: str, values: Values) -> Split:
    """Sum a reading up: the suite's rewards by its rule, others by the mean of images."""
    by_rule = reading.partition("/")[0] in task.suite.rewards
    rule: Rule = task.suite.aggregate if by_rule else "mean"
    scale = task.suite.scale if by_rule else 1.0
    if task.suite.category == BY_QUESTION:
        return _by_question(task, resampling, reading, values, rule, scale)
    if task.categories is None:
        whole = cells({"": values[reading]}, resampling)
        return Split(overall=whole, rule="mean", scale=scale)
    member, asked = np.array(task.categories), _asked(task, reading)
    columns = {
        name: np.where((member == name)[:, None], values[reading], np.nan)
        for name in dict.fromkeys(task.categories)
        if asked[member == name].any()
    }
    categories = cells(columns, resampling)
    return Split(overall=categories, rule=rule, scale=scale, categories=categories)


def _asked(task: Task, reading: str) -> np.ndarray:
    """The prompts (P,) bool for whose images a reading was asked; see rewards/core/domains.py."""
    label = reading.partition("/")[0]
    return np.array([is_asked(task.rewards, label, prompt) for prompt in task.prompts])


def _by_question(
    task: Task, resampling: Design, reading: str, values: Values, rule: Rule, scale: float
) -> Split:
    """Sum up a checklist's score, and its answers by the dimensions of its questions."""
    whole = cells({"": values[reading]}, resampling)
    begin = f"{reading}/{DIMENSION}"
    columns = {
        name.removeprefix(begin): value for name, value in values.items() if name.startswith(begin)
    }
    if not columns:
        return Split(overall=whole, rule="mean", scale=scale)
    details = cells(columns, resampling, {name: _questions(task, name) for name in columns})
    categories = details.merged(lambda name: name.partition("-")[0].strip())
    overall = categories if rule == "category_mean" else whole
    return Split(overall=overall, rule=rule, scale=scale, categories=categories, details=details)


def _questions(task: Task, dimension: str) -> np.ndarray:
    """How many questions of each prompt (P,) are about a dimension."""
    dimensions = [[q["dimension"] for q in prompt["checklist"]] for prompt in task.prompts]
    return np.array([named.count(dimension) for named in dimensions], float)


def _row(
    task: Task, resampling: Design, name: str, measured: Measured, readings: list[str], most: int
) -> dict[str, Any]:
    """The row of a record for one setting."""
    values = measured.values
    missing = {
        reading: int(np.isnan(values[reading][_asked(task, reading)]).sum()) for reading in readings
    }
    diversity = {
        kind: cells({"": d[:, None]}, resampling) for kind, d in measured.diversity.items()
    }
    return {
        "name": name,
        "images": len(task.prompts) * task.suite.images,
        "nfe": measured.nfe,
        **_scores(
            {reading: split(task, resampling, reading, values) for reading in readings}, resampling
        ),
        "invalid": {reading: count for reading, count in missing.items() if count},
        "diversity": {kind: score(distances, resampling) for kind, distances in diversity.items()},
        "best_of": _curve(task, resampling, values, most),
        "answers": measured.answers,
        "values": {reading: _rounded(rows) for reading, rows in values.items()},
        "guidance": measured.guidance,
        "rlg": measured.rlg,
    }


def _scores(splits: dict[str, Split], resampling: Design) -> dict[str, Any]:
    """Scores of each reading: overall, by category, and below categories."""

    def by_part(table: Cells, scale: float) -> dict[str, Any]:
        return {part: score(table.only(part), resampling, scale=scale) for part in table.names}

    out: dict[str, Any] = {"scores": {}, "categories": {}, "details": {}}
    for reading, s in splits.items():
        out["scores"][reading] = score(s.overall, resampling, s.rule, s.scale)
        for level, table in (("categories", s.categories), ("details", s.details)):
            if table is not None:
                out[level][reading] = by_part(table, s.scale)
    return out


def _curve(task: Task, resampling: Design, values: Values, most: int) -> list[dict[str, Any]]:
    """The suite's score of the best of N images by the headline, N = 1..most, each summed up as the
    headline is."""
    headline = task.suite.headline
    begin = f"{headline}/{DIMENSION}"
    read = {name: v for name, v in values.items() if name == headline or name.startswith(begin)}
    best = best_of(values[headline], most, read)
    curve = []
    for n in range(most):
        of_n = {name: column[:, n : n + 1] for name, column in best.items()}
        s = split(task, resampling, headline, of_n)
        curve.append(score(s.overall, resampling, s.rule, s.scale))
    return curve


def _paired(
    task: Task, resampling: Design, before: Measured, after: Measured, readings: list[str]
) -> dict[str, Any]:
    """The differences after - before of each reading, overall and by category, over images that
    both have; and of each kind of diversity."""
    both = {
        name: common(before.values[name], after.values[name])
        for name in after.values
        if name in before.values
    }
    first, second = ({name: pair[i] for name, pair in both.items()} for i in (0, 1))
    out: dict[str, Any] = {"scores": {}, "categories": {}, "diversity": {}}
    for reading in readings:
        a, b = split(task, resampling, reading, first), split(task, resampling, reading, second)
        out["scores"][reading] = difference(a.overall, b.overall, resampling, a.rule, a.scale)
        if (old := a.categories) is not None and (new := b.categories) is not None:
            out["categories"][reading] = {
                part: difference(old.only(part), new.only(part), resampling, scale=a.scale)
                for part in old.names
            }
    for kind, distances in after.diversity.items():
        out["diversity"][kind] = _difference(before.diversity[kind], distances, resampling)
    return out


def _difference(before: np.ndarray, after: np.ndarray, resampling: Design) -> dict[str, Any] | None:
    """The difference of two columns with one value a prompt, (P,)."""
    a, b = (cells({"": column[:, None]}, resampling) for column in common(before, after))
    return difference(a, b, resampling)


def _rounded(rows: np.ndarray) -> list[list[float | None]]:
    """Numbers as JSON keeps them; None where a value is missing."""
    return [[round(v, 6) if np.isfinite(v) else None for v in images] for images in rows.tolist()]


def matrix(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Side effects of training: the change of every reading (columns) in every run (rows), tuned
    minus base with intervals."""
    first = records[0]
    shown = [
        name
        for name in first["paired"]["base"]["scores"]
        if "/" not in name or name == first["suite"]["metric"]
    ]
    rows = []
    for record in records:
        changes = record["paired"]["base"]["scores"]
        entries = [changes.get(column) for column in shown]
        rows.append({"run": record["run"], "trained": record["trained"], "entries": entries})
    return {"columns": shown, "rows": rows}
