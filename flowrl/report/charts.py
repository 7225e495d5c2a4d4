"""Small pictures for the report, as SVG and HTML text: a line chart, intervals, a stacked bar.
Imports nothing of ours.

Colours are CSS variables of the page (--ink, --faint, --rule, --s0 to --s7), so that light and dark
need no second picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

Points = Sequence[tuple[float, float]]
COLOURS = 8
MOST_POINTS = 300  # longer curves are averaged in equal bins


def number(value: float) -> str:
    """Three significant digits, thousands with separators, tiny numbers in powers of ten."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return (
        f"{value:.1e}" if size < 1e-3 else f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"
    )


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers (1, 2, 2.5 or 5 times a power of ten apart) that cover [low,
    high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, last + 1)]


def thin(points: Points) -> list[tuple[float, float]]:
    """At most MOST_POINTS points: means of equal bins."""
    size = -(-len(points) // MOST_POINTS) or 1
    bins = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in bins]


def smooth(points: Points) -> list[tuple[float, float]]:
    """Exponential average over about a tenth of the curve, without the bias of its start."""
    keep, total, weight, out = 1 - 10 / max(len(points), 20), 0.0, 0.0, []
    for x, y in points:
        total, weight = keep * total + y, keep * weight + 1
        out.append((x, total / weight))
    return out


def line_chart(
    title: str,
    points: Points,
    *,
    xlabel: str = "iteration",
    width: int = 340,
    height: int = 190,
    colour: int = 0,
) -> str:
    """One curve with axes; points show their value on hover. Noisy curves (over 30 points) get an
    average drawn on top."""
    points = thin([(x, y) for x, y in points if math.isfinite(y)])
    if not points:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin = 0.02 * (high - low) or 0.05 * abs(high) or 0.5
    ys = ticks(max(0.0, low - margin) if low >= 0 else low - margin, high + margin)
    x0, x1 = points[0][0], points[-1][0]
    xs = [t for t in ticks(x0, x1) if x0 <= t <= x1] if x1 > x0 else [x0]
    left, right, top, bottom = 52, 12, 30, 34

    def place(x: float, y: float) -> tuple[float, float]:
        along = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        return left + along * (width - left - right), height - bottom - (y - ys[0]) / (
            ys[-1] - ys[0]
        ) * (height - top - bottom)

    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{escape(title)}">'
    ]
    parts.append(f'<text class="name" x="{left - 40}" y="16">{escape(title)}</text>')
    for y in ys:
        _, at = place(x0, y)
        parts.append(
            f'<line class="rule" x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{left - 6}" y="{at + 3.5:.1f}"'
            f' text-anchor="end">{_tick(y, ys)}</text>'
        )
    for x in xs:
        at, _ = place(x, ys[0])
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{height - bottom + 15}"'
            f' text-anchor="middle">{_tick(x, xs)}</text>'
        )
    parts.append(
        f'<text class="tick" x="{width - right}" y="{height - 4}"'
        f' text-anchor="end">{escape(xlabel)}</text>'
    )
    parts += _curve(points, place, colour, xlabel)
    return "".join([*parts, "</svg>"])


def _tick(value: float, all_ticks: Sequence[float]) -> str:
    """A tick with the digits that its neighbours need."""
    step = all_ticks[1] - all_ticks[0] if len(all_ticks) > 1 else 1
    if not 1e-7 <= step < 1e5:
        return number(value)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    digits += abs(round(step * 10**digits) - step * 10**digits) > 1e-6  # steps of 2.5
    return f"{value + 0.0:,.{digits}f}"


def _curve(points: Points, place, colour: int, xlabel: str) -> list[str]:
    def path(which: Points, css: str) -> str:
        d = " ".join(
            f"{'L' if i else 'M'}{a:.1f} {b:.1f}"
            for i, (a, b) in enumerate(place(x, y) for x, y in which)
        )
        return f'<path class="{css}" d="{d}" style="stroke: var(--s{colour % COLOURS})"/>'

    noisy = len(points) > 30
    parts = [path(points, "raw"), path(smooth(points), "line")] if noisy else [path(points, "line")]
    for x, y in points:
        at = "cx='{:.1f}' cy='{:.1f}'".format(*place(x, y))
        if not noisy:
            parts.append(f'<circle {at} r="2.4" style="fill: var(--s{colour % COLOURS})"/>')
        parts.append(
            f'<circle class="hit" {at} r="7"><title>{escape(xlabel)} {x:g}:'
            f" {number(y)}</title></circle>"
        )
    return parts


def interval_chart(
    rows: Sequence[tuple[str, float, float, float]], *, width: int = 640, label_width: int = 190
) -> str:
    """Means with whiskers, one row each: (label, mean, low, high)."""
    low, high = min(r[2] for r in rows), max(r[3] for r in rows)
    if low >= 0 and high <= 1:
        low = 0.0
    xs = ticks(low, high if high > low else low + 1, 5)
    step, top = 34, 8
    height = top + step * len(rows) + 26

    def place(x: float) -> float:
        return label_width + (x - xs[0]) / (xs[-1] - xs[0]) * (width - label_width - 30)

    parts = [
        f'<svg class="chart wide" viewBox="0 0 {width} {height}" role="img" aria-label="intervals">'
    ]
    for x in xs:
        parts.append(
            f'<line class="rule" x1="{place(x):.1f}" x2="{place(x):.1f}" y1="{top}"'
            f' y2="{height - 24}"/>'
        )
        parts.append(
            f'<text class="tick" x="{place(x):.1f}" y="{height - 8}"'
            f' text-anchor="middle">{_tick(x, xs)}</text>'
        )
    for i, (label, mean, lo, hi) in enumerate(rows):
        y, style = top + step * (i + 0.5), "var(--s0)" if i == len(rows) - 1 else "var(--s7)"
        parts.append(
            f'<text class="label" x="{label_width - 14}" y="{y + 4:.1f}"'
            f' text-anchor="end">{escape(label)}</text>'
        )
        parts.append(
            f'<line x1="{place(lo):.1f}" x2="{place(hi):.1f}" y1="{y}" y2="{y}" style="stroke:'
            f' {style}; stroke-width: 3"/>'
        )
        parts.append(
            f'<circle cx="{place(mean):.1f}" cy="{y}" r="6" style="fill:'
            f' {style}"><title>{escape(label)}: {number(mean)} [{number(lo)},'
            f" {number(hi)}]</title></circle>"
        )
        parts.append(
            f'<text class="value" x="{place(mean):.1f}" y="{y - 9:.1f}"'
            f' text-anchor="middle">{mean:.3f}</text>'
        )
    return "".join([*parts, "</svg>"])


def stacked_bar(parts: dict[str, float], *, unit: str) -> str:
    """Shares of a whole, largest first, with a legend that holds the numbers."""
    total = sum(parts.values())
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    bar, legend = [], []
    for i, (name, value) in enumerate(ranked):
        share = 100 * value / total if total else 0
        text = f"{name}: {number(value)} {unit} ({share:.1f}%)"
        colour = f"var(--s{min(i, COLOURS - 1)})"
        bar.append(
            f'<span style="width: {share:.3f}%; background: {colour}"'
            f' title="{escape(text)}"></span>'
        )
        legend.append(
            '<li><i style="background:'
            f' {colour}"></i>{escape(name)}<b>{share:.1f}%</b><em>{number(value)}'
            f" {escape(unit)}</em></li>"
        )
    return f'<div class="bar">{"".join(bar)}</div><ul class="legend">{"".join(legend)}</ul>'
