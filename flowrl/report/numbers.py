"""Numbers of a run as a report shows them: rows, intervals, digits, sentences."""

from __future__ import annotations

import json
from typing import Any

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
    return ["" if v is None else f"{v:,}" if isinstance(v, int) else str(v) for v in shown]


def mean_of(entry: Any) -> float | None:
    """The mean of {"mean", "ci"}, or a bare number itself."""
    return entry.get("mean") if isinstance(entry, dict) else entry


def interval_text(entry: Any, between: str = " ") -> str:
    """A mean, and its interval in brackets where it has one."""
    mean, ci = mean_of(entry), entry.get("ci") if isinstance(entry, dict) else None
    if mean is None:
        return ""
    digits = decimals(ci)
    interval = f"{between}[{ci[0]:.{digits}f}, {ci[1]:.{digits}f}]" if ci else ""
    return f"{mean:.{digits}f}{interval}"


def decimals(ci: Any) -> int:
    """Decimals that show an interval: 3, and 5 or 7 where both ends would be alike."""
    width = ci[1] - ci[0] if ci else 1.0
    if width >= 0.002 or width == 0:
        return 3
    return 5 if width >= 2e-5 else 7


def paired_sentence(metric: str, paired: dict[str, Any]) -> str:
    """The difference of a metric, "after" minus "before", with its interval and p."""
    low, high = paired["ci"]
    digits = decimals(paired["ci"])
    interval = f"{paired['difference']:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
    p = f", p = {paired['p']:.2g}" if paired.get("p") is not None else ""
    return f"{metric} {interval}{p}, 95% paired bootstrap"
