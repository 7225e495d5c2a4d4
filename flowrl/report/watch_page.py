"""The report's section on a watched run: the trained reward against the held-out one, with its
peak, and the detectors below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from flowrl.report.charts import Points, against_chart, gallery, measured

# names that are no detectors
OF_THE_PEAK = ("held_out", "best", "peak", "below", "past_peak", "rate")


def against(metrics: Sequence[dict[str, Any]], peak: dict[str, Any]) -> Markup:
    """Plot the trained reward against the held-out one; "" where no peak was sought or found. peak:
    peak.json."""
    if not peak:
        return Markup()
    curves = {
        "trained": points(metrics, "reward/total"),
        f"{peak['held_out']}, held out": points(metrics, f"reward/{peak['held_out']}/mean"),
    }
    marks = [(peak["iteration"], f"peak {peak['value']:.3g}")]
    return against_chart("Proxy against held-out", curves, marks=marks)


def detectors(metrics: Sequence[dict[str, Any]]) -> Markup:
    """Draw a chart of each detector of the run."""
    names = dict.fromkeys(name for row in metrics for name in row if name.startswith("watch/"))
    shown = [name for name in names if name.removeprefix("watch/") not in OF_THE_PEAK]
    return gallery({name: measured(name, points(metrics, name), colour=3) for name in shown})


def points(metrics: Sequence[dict[str, Any]], name: str) -> Points:
    """(iteration, value) of a metric."""
    return [
        (row.get("iteration", i), row[name])
        for i, row in enumerate(metrics)
        if isinstance(row.get(name), int | float)
    ]


def sentence(peak: dict[str, Any]) -> str:
    """Say what peak.json says, and where the weights of the peak are; "" where it says nothing."""
    if not peak:
        return ""
    said = (
        f"The held-out reward {peak['held_out']} was highest, {peak['value']:.4g}, around iteration"
        f" {peak['iteration']:g}; its running mean is {peak['last']:.4g} now."
    )
    where = f"The checkpoint nearest to that, {peak['checkpoint']}, is kept"
    return f"{said} {where}" + (f"; its LoRA is in {peak['lora']}." if peak["lora"] else ".")
