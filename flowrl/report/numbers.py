"""Numbers of a run as a report shows them: rows, intervals, digits, sentences."""

from __future__ import annotations

import json
from typing import Any

HEADS = ("guidance", "steps", "images", "calls/image")


def evaluation_rows(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows with "before" first and "after" last, whatever was measured in between and since."""
    return sorted(
        evaluation.get("rows", []),
        key=lambda row: (row.get("name") == "after") - (row.get("name") == "before"),
    )


def distinct_rows(evaluation: dict[str, Any]) -> list[str]:
    """Metrics, without those that repeat an earlier one in every row (a total of one reward)."""
    out: dict[str, str] = {}
    for name in metric_names(evaluation):
        out.setdefault(
            json.dumps([row.get("metrics", {}).get(name) for row in evaluation_rows(evaluation)]),
            name,
        )
    return list(out.values())


def metric_names(evaluation: dict[str, Any]) -> list[str]:
    """Metrics of any row; the headline comes first: one that is called strict, else the first with
    a paired difference."""
    paired = evaluation.get("paired", {})
    names = list(
        dict.fromkeys(
            name for row in evaluation_rows(evaluation) for name in row.get("metrics", {})
        )
    )
    return sorted(names, key=lambda name: (name not in paired, not name.endswith("strict")))


def row_head(row: dict[str, Any]) -> list[str]:
    show = [row.get(key) for key in ("name", "guidance", "steps", "images", "nfe")]
    return ["" if v is None else f"{v:,}" if isinstance(v, int) else str(v) for v in show]


def mean_text(entry: Any) -> float | None:
    return entry.get("mean") if isinstance(entry, dict) else entry


def interval_text(entry: Any, between: str = " ") -> str:
    mean, ci = mean_text(entry), entry.get("ci") if isinstance(entry, dict) else None
    if mean is None:
        return ""
    digits = decimals(ci)
    return f"{mean:.{digits}f}" + (
        f"{between}[{ci[0]:.{digits}f}, {ci[1]:.{digits}f}]" if ci else ""
    )


def decimals(ci: Any) -> int:
    """Decimals that show an interval: 3, and 5 or 7 where both ends would be alike."""
    width = ci[1] - ci[0] if ci else 1.0
    return 3 if width >= 0.002 or width == 0 else 5 if width >= 2e-5 else 7


def paired_sentence(metric: str, paired: dict[str, Any]) -> str:
    low, high = paired["ci"]
    digits = decimals(paired["ci"])
    p = f", p = {paired['p']:.2g}" if paired.get("p") is not None else ""
    return (
        f"{metric} {paired['difference']:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]{p},"
        " 95% paired bootstrap"
    )
