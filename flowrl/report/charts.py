"""Charts of the report: curves, intervals, a stacked bar.

Lines are SVG that stretches with the page, and texts are HTML, whose size the page's width does not
change. To change a colour, edit --chart-0 to --chart-7 at the top of templates/style.css: charts
name their colours by number, so that light and dark pages need no second picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from flowrl.report.described import sentence
from flowrl.report.numbers import EQUAL, interval_text
from flowrl.report.render import render

Points = Sequence[tuple[float, float]]
COLOURS = 8  # --chart-0 to --chart-7
MOST_POINTS = 300  # longer curves are averaged in equal bins
DOTTED = 30  # most points with a dot each; longer curves are noisy and get an average on top


@dataclass(frozen=True, slots=True)
class Scale:
    """A straight axis."""

    low: float  # number that lies at 0
    high: float  # number that lies at 1

    def __call__(self, value: float) -> float:
        """The place of a number; the middle where all numbers are equal."""
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve of a chart."""

    name: str  # name in the legend
    colour: int  # number of the colour, from 0 to COLOURS - 1
    points: Points  # points in units of the data
    texts: Sequence[str]  # text that each point shows on hover
    average: Points = ()  # average that is drawn as the curve, while the points become faint
    dots: bool = False  # whether each point is drawn
    band: Points = ()  # outline of an area behind the curve


def gallery(charts: Mapping[str, Sequence[Curve]], *, xlabel: str = "iteration") -> Markup:
    """Draw charts side by side: metric -> its curves. Equal charts are drawn once, under all their
    names, and those of numbers that never change are folded below a line that says the numbers. ""
    without a curve."""
    names: dict[tuple[tuple[Any, ...], ...], list[str]] = {}
    for name, curves in charts.items():
        if curves:
            names.setdefault(tuple(tuple(curve.points) for curve in curves), []).append(name)
    varied, constant = [], []
    for lines, own in names.items():
        title, values = EQUAL.join(own), {y for line in lines for _, y in line}
        chart = common_chart(title, charts[own[0]], xlabel=xlabel)
        if len(values) == 1 and max(map(len, lines)) > 1:
            constant.append((f"{title} {number(*values)}", chart))
        else:
            varied.append(chart)
    return render("gallery.html", varied=varied, constant=constant)


def common_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    xlabel: str = "iteration",
    x_ticks: Sequence[tuple[float, str]] = (),
    y_ticks: Sequence[tuple[float, str]] = (),
    **more: Any,
) -> Markup:
    """Draw curves on common axes; bands end where the axis does. "" without a curve. x_ticks,
    y_ticks: (place, text); (): round numbers. more: see templates/curves.html."""
    if not curves:
        return Markup()
    along = [x for curve in curves for x, _ in curve.points]
    first, last = min(along), max(along)
    xs = [t for t in ticks(first, last) if first <= t <= last] if last > first else [first]
    # there is no iteration 1.5
    if all(float(x).is_integer() for x in along):
        xs = [t for t in xs if float(t).is_integer()]
    ys = _ticks_around([y for curve in curves for _, y in curve.points])
    y_ticks = y_ticks or [(t, tick_text(t, ys)) for t in ys]
    low, high = y_ticks[0][0], y_ticks[-1][0]
    # a wide band would flatten the curves, if the axis followed it
    bands = [[(x, min(max(y, low), high)) for x, y in curve.band] for curve in curves]
    return render(
        "curves.html",
        title=title,
        x=Scale(first, last),
        y=Scale(low, high),
        x_ticks=x_ticks or [(t, tick_text(t, xs)) for t in xs],
        y_ticks=y_ticks,
        xlabel=xlabel,
        curves=[replace(curve, band=band) for curve, band in zip(curves, bands, strict=True)],
        **{"says": sentence(title.partition(EQUAL)[0]), "legend": False, "marks": ()} | more,
    )


def measured(
    name: str, points: Points, *, xlabel: str = "iteration", colour: int = 0
) -> list[Curve]:
    """The curve of a metric; [] without a finite value. A long curve is noisy, and gets an
    average."""
    points = thin([(x, y) for x, y in points if math.isfinite(y)])
    noisy = len(points) > DOTTED
    curve = Curve(
        name=name,
        colour=colour % COLOURS,
        points=points,
        texts=[f"{xlabel} {x:g}: {number(y)}" for x, y in points],
        average=smooth(points) if noisy else (),
        dots=not noisy,
    )
    return [curve] * bool(points)


def against_chart(
    title: str, curves: Mapping[str, Points], *, marks: Sequence[tuple[float, str]] = ()
) -> Markup:
    """Draw curves over iterations, each from its own lowest to its own highest value, which the
    legend shows; marks: (iteration, text) of vertical lines. "" unless every curve has a finite
    value."""
    # each curve has an axis of its own: a common one would flatten the curve with the smaller range
    found = [measured(name, own, colour=i) for i, (name, own) in enumerate(curves.items())]
    if not all(found):
        return Markup()
    drawn = []
    for (curve,) in found:
        low, high = min(y for _, y in curve.points), max(y for _, y in curve.points)
        own, name = Scale(low, high), f"{curve.name} {number(low)} to {number(high)}"
        scaled = [(x, own(y)) for x, y in curve.points]
        average = [(x, own(y)) for x, y in curve.average]
        drawn.append(replace(curve, name=name, points=scaled, average=average))
    return common_chart(
        title,
        drawn,
        says="Each curve from its own lowest to its own highest value. Where the trained reward"
        " rises and the other one falls, the trained reward is being exploited.",
        y_ticks=[(0, "lowest"), (1, "highest")],
        legend=True,
        marks=marks,
    )


def best_of_chart(title: str, curves: Mapping[str, Sequence[float | None]]) -> Markup:
    """Draw curves over N = 1, 2, ... on a logarithmic axis, without those that lack a value."""
    drawn = {name: own for name, own in curves.items() if None not in own}
    longest = max(map(len, drawn.values()), default=0)
    found = [_best_of(name, own, i) for i, (name, own) in enumerate(drawn.items())]
    x_ticks = [(math.log(2**k), str(2**k)) for k in range(longest.bit_length())]
    return common_chart(title, found, xlabel="N", x_ticks=x_ticks, legend=True)


def _best_of(name: str, values: Sequence[float], colour: int) -> Curve:
    sizes = range(1, len(values) + 1)
    return Curve(
        name=name,
        colour=colour % COLOURS,
        points=[(math.log(n), value) for n, value in zip(sizes, values, strict=True)],
        texts=[f"{name}, best of {n}: {y:.4g}" for n, y in zip(sizes, values, strict=True)],
    )


def interval_chart(
    rows: Sequence[tuple[str, float, float, float]], colours: Sequence[int] = ()
) -> Markup:
    """Draw means with whiskers, one row each: (label, mean, low, high). colours: those of the rows;
    (): the last row is coloured."""
    low, high = min(r[2] for r in rows), max(r[3] for r in rows)
    if low >= 0 and high <= 1:
        low = 0.0
    xs = ticks(low, high, 5)
    return render(
        "intervals.html",
        x=Scale(xs[0], xs[-1]),
        x_ticks=[(t, tick_text(t, xs)) for t in xs],
        rows=[
            (label, mean, low, high, interval_text({"mean": mean, "ci": (low, high)}), colour)
            for (label, mean, low, high), colour in zip(
                rows, colours or [7] * (len(rows) - 1) + [0], strict=True
            )
        ],
    )


def stacked_bar(parts: Mapping[str, float], *, unit: str) -> Markup:
    """Draw shares of a whole, the largest first, with a legend that holds the numbers."""
    total = sum(parts.values())
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    shares = [
        (min(i, COLOURS - 1), name, 100 * value / total if total else 0, f"{number(value)} {unit}")
        for i, (name, value) in enumerate(ranked)
    ]
    return render("stacked_bar.html", shares=shares)


# ---------------------------------------------------------------------------
# numbers and points


def number(value: float) -> str:
    """Write a number with three significant digits, thousands with separators, tiny numbers in
    powers of ten."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Choose about `count` round numbers that cover [low, high], 1, 2, 2.5 or 5 times 10**k apart.

    A range without width becomes one of width 1.
    """
    high = high if high > low else low + 1
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, last + 1)]


def _ticks_around(values: Sequence[float]) -> list[float]:
    """Ticks that leave a margin around the values, which does not cross 0."""
    low, high = min(values), max(values)
    margin = 0.02 * (high - low) or 0.05 * abs(high) or 0.5
    return ticks(max(0.0, low - margin) if low >= 0 else low - margin, high + margin)


def tick_text(value: float, all_ticks: Sequence[float]) -> str:
    """Write a tick with the digits that its neighbours need."""
    step = all_ticks[1] - all_ticks[0] if len(all_ticks) > 1 else 1
    if not 1e-7 <= step < 1e5:
        return number(value)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    # steps of 2.5 need one digit more
    digits += abs(round(step * 10**digits) - step * 10**digits) > 1e-6
    return f"{value + 0.0:,.{digits}f}"


def thin(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Reduce points to at most `most`, the means of equal bins."""
    size = -(-len(points) // most) or 1
    bins = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in bins]


def smooth(points: Points) -> list[tuple[float, float]]:
    """The exponential average over about a tenth of a curve, without the bias of its start."""
    keep, total, weight, out = 1 - 10 / max(len(points), 20), 0.0, 0.0, []
    for x, y in points:
        total, weight = keep * total + y, keep * weight + 1
        out.append((x, total / weight))
    return out
