"""One HTML file that puts several runs side by side; the markup is in templates/comparison.html."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from markupsafe import Markup

from flowrl.report import charts
from flowrl.report import comparison as compared
from flowrl.report.render import render
from flowrl.report.run_page import CURVES
from flowrl.report.watch_page import points
from flowrl.runtime.statistics import student
from flowrl.runtime.store import files

MOST = 60  # most points of a curve: a page may hold hundreds of curves


def build(groups: compared.Groups, output: Path) -> Path:
    """Write the page and return its path."""
    return files.write(output, page(groups))


def page(groups: compared.Groups, template: str = "comparison.html", **more: str) -> Markup:
    """Make the page, without writing anything. template: comparison.html, or one that extends it
    and takes `more`."""
    metrics = compared.metrics_of(groups)
    first = next(iter(metrics))
    return render(
        template,
        date=datetime.date.today().isoformat(),
        notes=compared.notes(groups),
        intervals=_intervals(groups, first),
        heads=[*compared.HEADS, *compared.COST],
        tables={title: compared.lines(groups, name) for name, title in metrics.items()},
        legend=[(name, i % charts.COLOURS) for i, name in enumerate(groups)],
        charts=charts.gallery(_curves(groups)),
        names=["", *groups],
        settings=[[key, *values] for key, values in compared.differences(groups).items()],
        runs=compared.lines({run.name: [run] for own in groups.values() for run in own}, first),
        **more,
    )


def _intervals(groups: compared.Groups, metric: str) -> Markup:
    """Draw the gain of each group, its interval over seeds or, with one run, over prompts."""
    drawn = []
    for i, (name, runs) in enumerate(groups.items()):
        row = compared.numbers_of(metric, name, runs)
        over = "prompts" if row["seeds_low"] is None else "seeds"
        entry = (name, row["gain"], row[f"{over}_low"], row[f"{over}_high"])
        drawn += [(entry, i % charts.COLOURS)] * (None not in entry)
    return charts.interval_chart(*zip(*drawn, strict=True)) if drawn else Markup()


def _curves(groups: compared.Groups) -> dict[str, list[charts.Curve]]:
    """The curves of every metric that a run's own page draws."""
    rows = [row for runs in groups.values() for run in runs for row in run.folder.metrics]
    names = sorted({key for row in rows for key in row}, key=lambda n: (n != "reward/total", n))
    shown = [n for prefixes in CURVES.values() for n in names if n.startswith(prefixes)]
    found = {n: [_curve(i, own, n) for i, own in enumerate(groups.items())] for n in shown}
    return {name: [curve for curve in curves if curve] for name, curves in found.items()}


def _curve(
    colour: int, group: tuple[str, Sequence[compared.ComparedRun]], metric: str
) -> charts.Curve | None:
    """Average a metric over a group's runs at the iterations that all of them have; the band is
    Student's interval. None without a value."""
    name, runs = group
    found = [own for run in runs if (own := dict(points(run.folder.metrics, metric)))]
    shared = sorted(set.intersection(*map(set, found))) if found else []
    if not shared:
        return None
    # noise is averaged within a run first: the band is about runs, and not about iterations
    lines = [[(x, own[x]) for x in shared] for own in found]
    lines = [charts.smooth(line) for line in lines] if len(shared) > charts.DOTTED else lines
    places = list(zip(*(charts.thin(line, MOST) for line in lines), strict=True))
    drawn = [(place[0][0], fmean(y for _, y in place)) for place in places]
    several = len(lines) > 1 and compared.apart(runs)
    ends = [(place[0][0], student([y for _, y in place]).ci) for place in places if several]
    low, high = ([(x, ci[end]) for x, ci in ends] for end in (0, 1))
    return charts.Curve(
        name=name,
        colour=colour % charts.COLOURS,
        points=drawn,
        texts=[f"{name}, iteration {x:g}: {charts.number(y)}" for x, y in drawn],
        band=[*low, *reversed(high)],
    )
