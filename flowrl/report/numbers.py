"""Numbers of a run as a report shows them: rows, intervals, digits, sentences."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.runtime.statistics import ENOUGH

HEADS = ("guidance", "steps", "images", "calls/image")


def evaluation_rows(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows with "before" first and "after" last, whatever was measured in between and since."""

    def place(row: dict[str, Any]) -> int:
        return {"before": -1, "after": 1}.get(row.get("name", ""), 0)

    return sorted(evaluation.get("rows", []), key=place)


def metric_names(evaluation: dict[str, Any]) -> list[str]:
    """Metrics of any row. The headline comes first: one that is called strict, else the first
    with a paired difference."""
    paired = evaluation.get("paired", {})
    rows = evaluation_rows(evaluation)
    names = dict.fromkeys(name for row in rows for name in row.get("metrics", {}))
    return sorted(names, key=lambda name: (name not in paired, not name.endswith("strict")))


def distinct_metrics(evaluation: dict[str, Any]) -> list[str]:
    """Metrics without those that repeat an earlier one in every row (a total of one reward)."""
    rows = evaluation_rows(evaluation)
    out: dict[str, str] = {}
    for name in metric_names(evaluation):
        values = [row.get("metrics", {}).get(name) for row in rows]
        out.setdefault(json.dumps(values), name)
    return list(out.values())


def row_head(row: dict[str, Any]) -> list[str]:
    """The name of a row and the values of HEADS; "" for what the row does not say."""
    shown = [row.get(key) for key in ("name", "guidance", "steps", "images", "nfe")]
    cells = ["" if v is None else f"{v:,}" if isinstance(v, int) else str(v) for v in shown]
    return [*cells[:3], cells[3] + of_texts(row), cells[4]]


def of_texts(row: Mapping[str, Any]) -> str:
    """How many different texts the images of a row show; "" where it is not known."""
    entries = [entry for entry in row.get("metrics", {}).values() if isinstance(entry, dict)]
    texts = max((entry.get("clusters") or 0 for entry in entries), default=0)
    return f" of {texts:,} text{'s' if texts > 1 else ''}" if texts else ""


def mean_of(entry: Any) -> float | None:
    """The mean of {"mean", "ci"}, or a bare number itself."""
    return entry.get("mean") if isinstance(entry, dict) else entry


def interval_of(entry: Mapping[str, Any]) -> Sequence[float] | None:
    """The ends of an interval; None of one prompt, also where an earlier version wrote them."""
    return None if entry.get("clusters") == 1 else entry.get("ci")


def interval_text(entry: Any, between: str = " ") -> str:
    """A mean, and its interval in brackets where it has one."""
    mean, ci = mean_of(entry), interval_of(entry) if isinstance(entry, dict) else None
    if mean is None:
        return ""
    digits = decimals(mean, *(ci or ()))
    interval = f"{between}[{ci[0]:.{digits}f}, {ci[1]:.{digits}f}]" if ci else ""
    return f"{mean:.{digits}f}{interval}"


def decimals(*values: float, least: int = 3) -> int:
    """Decimals, at least `least`, that show three digits of the largest value and one of their
    range."""
    sizes = [(max(map(abs, values)), 2), (max(values) - min(values), 0)]
    wanted = [digits - math.floor(math.log10(size)) for size, digits in sizes if size > 0]
    return min(9, max([least, *wanted]))


def of_enough(paired: Mapping[str, Any]) -> bool:
    """Whether a difference is of as many prompts as a p-value and a verdict need; a record of an
    earlier version may not say of how many it is."""
    return (paired.get("clusters") or ENOUGH) >= ENOUGH


def paired_sentence(metric: str, paired: dict[str, Any]) -> str:
    """The difference of a metric, "after" minus "before", with its interval and p, or why it has
    none."""
    prompts, ci = paired.get("clusters"), interval_of(paired)
    digits = decimals(paired["difference"], *(ci or ()))
    said = f"{metric} {paired['difference']:+.{digits}f}"
    if ci is None:
        images = f"the {paired.get('n', 'only')} images are of 1 prompt"
        return f"{said}, no interval: {images}; raise eval.images"
    said += f" [{ci[0]:+.{digits}f}, {ci[1]:+.{digits}f}]"
    if not of_enough(paired):
        return f"{said}, 95% paired bootstrap; {prompts} prompts are too few for a p-value"
    p = f", p = {paired['p']:.2g}" if paired.get("p") is not None else ""
    return f"{said}{p}, 95% paired bootstrap"
