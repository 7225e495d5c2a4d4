"""Numbers of a run as a report shows them: rows, intervals, digits, sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flowrl.runtime.statistics import ENOUGH

HEADS = ("guidance", "steps", "images", "calls/image")
EQUAL = " = "  # between names of metrics that are equal


def evaluation_rows(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows with "before" first and "after" last, whatever was measured in between and since."""

    def place(row: dict[str, Any]) -> int:
        return {"before": -1, "after": 1}.get(row.get("name", ""), 0)

    return sorted(evaluation.get("rows", []), key=place)


def distinct_metrics(evaluation: dict[str, Any]) -> dict[str, str]:
    """Metric -> its title, for metrics of any row. The headline comes first: macro, the mean over
    domains, or one that is called strict, else the first with a paired difference. A metric that
    shows the numbers of an earlier one in every row (a total of one reward) is named in the title
    of the earlier one."""
    rows, paired = evaluation_rows(evaluation), evaluation.get("paired", {})
    names = dict.fromkeys(name for row in rows for name in row.get("metrics", {}))
    equal: dict[tuple[str, ...], list[str]] = {}

    def place(name: str) -> tuple[bool, bool, bool]:
        return name not in paired, name != "macro", not name.endswith("strict")

    for name in sorted(names, key=place):
        shown = tuple(interval_text(row.get("metrics", {}).get(name)) for row in rows)
        equal.setdefault(shown, []).append(name)
    return {own[0]: EQUAL.join(own) for own in equal.values()}


def before_and_after(evaluation: dict[str, Any], metric: str) -> list[str]:
    """A metric's means in the rows "before" and "after", as tables show them; [] where one is
    missing."""
    rows = {row.get("name"): row for row in evaluation.get("rows", [])}
    found = [rows.get(side, {}).get("metrics", {}).get(metric) for side in ("before", "after")]
    texts = [interval_text(entry).partition(" ")[0] for entry in found]
    return texts if all(texts) else []


def too_small(evaluation: dict[str, Any], metric: str) -> bool:
    """Whether a metric is the same before and after in the digits that are shown: then no p-value
    is told, and no verdict."""
    return len({*before_and_after(evaluation, metric)}) == 1


def row_head(row: dict[str, Any]) -> list[str]:
    """The name of a row and the values of HEADS; "" for what the row does not say."""
    shown = [row.get(key) for key in ("name", "guidance", "steps", "images", "nfe")]
    return ["" if v is None else f"{v:,}" if isinstance(v, int) else str(v) for v in shown]


def evaluation_cells(evaluation: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads of the table of evaluations, and its rows."""
    titles, out = distinct_metrics(evaluation), []
    for row in evaluation_rows(evaluation):
        cells = (interval_text(row.get("metrics", {}).get(name)) for name in titles)
        out.append([*row_head(row), *cells])
    return ["evaluation", *HEADS, *titles.values()], out


def of_texts(row: Mapping[str, Any]) -> str:
    """How many different texts the images of a row show; "" where it is not known."""
    entries = [entry for entry in row.get("metrics", {}).values() if isinstance(entry, dict)]
    texts = max((entry.get("clusters") or 0 for entry in entries), default=0)
    return f" of {texts:,} text{'s' if texts > 1 else ''}" if texts else ""


def mean_of(entry: Any) -> float | None:
    """The mean of {"mean", "ci"}, or a bare number itself."""
    return entry.get("mean") if isinstance(entry, dict) else entry


def interval_text(entry: Any, between: str = " ", key: str = "mean") -> str:
    """
    >>> interval_text({"mean": 0.81234, "ci": [0.79, 0.83]})
    '0.812 [0.790, 0.830]'
    >>> interval_text({"difference": 12.5, "ci": [-1.2, 26.0]}, key="difference")
    '+12.5 [-1.2, +26.0]'
    """
    mean, ci = (entry.get(key), entry.get("ci")) if isinstance(entry, dict) else (entry, None)
    if mean is None:
        return ""
    form = f"{'+' if key == 'difference' else ''}.{decimals(mean, *(ci or ()))}f"
    return f"{mean:{form}}" + (f"{between}[{ci[0]:{form}}, {ci[1]:{form}}]" if ci else "")


def decimals(*values: float) -> int:
    """Decimals that show three digits of the largest value and one of their range: at least 3, and
    1 from 10 on."""
    sizes = [(max(map(abs, values)), 2), (max(values) - min(values), 0)]
    wanted = [digits - math.floor(math.log10(size)) for size, digits in sizes if size > 0]
    return min(9, max([3 if sizes[0][0] < 10 else 1, *wanted]))


def of_few(paired: Mapping[str, Any]) -> bool:
    """Whether a difference is of fewer prompts than a p-value and a verdict need, if it says so."""
    return paired.get("clusters", ENOUGH) < ENOUGH


def paired_sentence(evaluation: dict[str, Any], metric: str, title: str = "") -> str:
    """The difference of a metric, "after" minus "before", with its interval and p, if it has."""
    paired = evaluation["paired"][metric]
    said = f"{title or metric} {interval_text(paired, key='difference')}"
    if paired["ci"] is None:
        images = f"the {paired.get('n', 'only')} images are of 1 prompt"
        return f"{said}, no interval: {images}; raise eval.images"
    if of_few(paired):
        return f"{said}, no p-value of {paired['clusters']} prompts, 95% paired bootstrap"
    p = f", p = {paired['p']:.2g}" if paired.get("p") is not None else ""
    if too_small(evaluation, metric):
        p = ", no p-value of means that are equal in the digits shown"
    return f"{said}{p}, 95% paired bootstrap"
