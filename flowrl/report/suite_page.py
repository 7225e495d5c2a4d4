"""What evaluation suites found, as tables for the terminal and as a section of report.html. Reads
the records of flowrl/evaluation/suites/runs.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from flowrl.report import answers
from flowrl.report.charts import COLOURS, ticks
from flowrl.runtime.run_folder import read_json

SHOWN = (1, 2, 4, 8, 16, 32, 64)  # sizes of best-of-N in tables


def records(run: Path) -> Iterator[dict[str, Any]]:
    """The records of run/suites, by name."""
    return (read_json(path) for path in sorted((run / "suites").glob("*.json")))


# ---------------------------------------------------------------------------
# sentences


def cell(entry: Mapping[str, Any] | None, key: str = "mean") -> str:
    """
    >>> cell({"mean": 0.81234, "ci": [0.79, 0.83]})
    '0.812 [0.790, 0.830]'
    >>> cell({"difference": 12.5, "ci": [-1.2, 26.0]}, "difference")
    '+12.5 [-1.2, +26.0]'
    """
    if entry is None or entry[key] is None:
        return ""
    low, high = entry["ci"] or (0.0, 0.0)
    least = 3 if max(abs(entry[key]), abs(low), abs(high)) < 10 else 1
    digits = min(7, max(least, 1 - math.floor(math.log10(high - low)))) if high > low else least
    form = f"{'+' if key == 'difference' else ''}.{digits}f"
    return f"{entry[key]:{form}}" + (f" [{low:{form}}, {high:{form}}]" if entry["ci"] else "")


def headline(record: Mapping[str, Any]) -> str:
    return next(iter(record["rows"][-1]["scores"]))


def heads(record: Mapping[str, Any]) -> list[str]:
    """Columns of the tables: a row of the record each, and the difference of "tuned" to each
    other."""
    return [
        "",
        *(f"{row['name']} ({_guidance(row)})" for row in record["rows"]),
        *(f"tuned - {name}" for name in record["paired"]),
    ]


def _guidance(row: Mapping[str, Any]) -> str:
    return "no guidance" if row["guidance"] == "none" else f"guidance {row['guidance']}"


def lines(record: Mapping[str, Any], level: str, reading: str | None = None) -> list[list[str]]:
    """Lines of a table: level scores or diversity, a line a reading; categories or details, a line
    a category of `reading`."""

    def of(holder: Mapping[str, Any]) -> Mapping[str, Any]:
        found = holder.get(level, {})
        return found if reading is None else found.get(reading, {})

    out = []
    for name in of(record["rows"][-1]):
        differences = [
            cell(of(paired).get(name), "difference") for paired in record["paired"].values()
        ]
        out.append(
            [
                f"{name}{_role(record, name) if level == 'scores' else ''}",
                *(cell(of(row).get(name)) for row in record["rows"]),
                *differences,
            ]
        )
    return out


def _role(record: Mapping[str, Any], reading: str) -> str:
    """Whether training saw the reward behind a reading."""
    label = reading.partition("/")[0]
    entry = {**record["suite"]["rewards"], **record["suite"]["held_out"]}[label]
    name = entry.get("name", label) if isinstance(entry, dict) else label
    return (
        " (trained on)"
        if name in record["trained"]
        else " (held out)"
        if label in record["suite"]["held_out"]
        else ""
    )


def best_lines(record: Mapping[str, Any]) -> list[list[str]]:
    """A line a size N of the best-of-N curve: powers of two, and the longest."""
    longest = len(record["rows"][-1]["best_of"])
    sizes = sorted({n for n in SHOWN if n < longest} | {longest})
    return [
        [f"best of {n}", *(cell(row["best_of"][n - 1]) for row in record["rows"])]
        for n in sizes
        if n
    ]


def sentences(record: Mapping[str, Any]) -> list[str]:
    """Peaks of held-out rewards in training, contamination, warnings."""
    out = []
    for name, p in record["peaks"].items():
        since = (
            ""
            if p["iteration"] == p["last_iteration"]
            else f"; at iteration {p['last_iteration']} it is {p['last']:.4g}"
        )
        out.append(
            f"Held-out {name} was highest, {p['value']:.4g}, at iteration {p['iteration']}{since}."
        )
    if found := record["contamination"]:
        out.append(
            f"Of {found['suite']} different prompts, {found['exact']} are training prompts,"
            f" {found['near']} more have nearly the same words, and {found['shared_8_grams']} share"
            f" eight words in a row with one ({found['training']} training prompts)."
        )
    return [*out, *(f"Note: {sentence}." for sentence in record["warnings"])]


# ---------------------------------------------------------------------------
# terminal


def tables(record: Mapping[str, Any]) -> list[Any]:
    """What `flowrl evaluate --suite` prints for a run."""
    suite, metric = record["suite"], headline(record)
    title = (
        f"{suite['title']}: {record['prompts']} prompts x {suite['images']}, {record['steps']}"
        f" steps, {record['run']}"
    )
    out = [_rich(title, heads(record), lines(record, "scores"))]
    for level in ("categories", "details"):
        if found := lines(record, level, metric):
            out.append(
                _rich(
                    f"{metric} by {'category' if level == 'categories' else 'question'}",
                    heads(record),
                    found,
                )
            )
    if found := lines(record, "diversity"):
        out.append(_rich("Mean distance between images of a prompt", heads(record), found))
    if len(found := best_lines(record)) > 1:
        out.append(
            _rich(
                f"Suite's score of the best of N images by {metric}",
                heads(record)[: 1 + len(record["rows"])],
                found,
            )
        )
    return [*out, *sentences(record)]


def matrix_table(matrix: Mapping[str, Any]) -> Any:
    """Side effects of several runs: tuned - base."""
    return _rich(
        "Side effects: tuned - base", ["trained on", *matrix["columns"]], matrix_lines(matrix)
    )


def matrix_lines(matrix: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            f"{', '.join(row['trained'])} ({row['run']})",
            *(cell(e, "difference") for e in row["entries"]),
        ]
        for row in matrix["rows"]
    ]


def _rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich import box
    from rich.table import Table

    out = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1))
    for i, name in enumerate(columns):
        out.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        out.add_row(*(text.replace(" [", "\n[") for text in row))
    return out


# ---------------------------------------------------------------------------
# html


def section(run: Path) -> str:
    """All suites of a run as HTML; "" where there are none."""
    return "".join(map(_suite, records(run)))


def _suite(record: Mapping[str, Any]) -> str:
    suite, metric = record["suite"], headline(record)
    setting = (
        f"{record['prompts']} prompts, {suite['images']} images each, {record['steps']} steps, seed"
        f" {record['seed']}, {record['checkpoint']}. Intervals: 95%, prompts resampled;"
        " differences: same prompts, same noise."
    )
    parts = [f"<h3>{escape(record['name'])}: {escape(suite['title'])}</h3><p>{escape(setting)}</p>"]
    parts.append(_table(heads(record), lines(record, "scores")))
    for level, what in (("categories", "category"), ("details", "question")):
        if found := lines(record, level, metric):
            parts.append(f"<h3>{escape(metric)} by {what}</h3>" + _table(heads(record), found))
    if found := lines(record, "diversity"):
        parts.append(
            "<h3>Diversity: mean distance between images of a prompt</h3>"
            + _table(heads(record), found)
        )
    curves = {row["name"]: [entry["mean"] for entry in row["best_of"]] for row in record["rows"]}
    if len(record["rows"][-1]["best_of"]) > 1:
        chart = curve_chart(f"best of N by {metric}", curves)
        parts.append(
            f"<figure>{chart}<figcaption>The suite's score of the best of N images by"
            f" {escape(metric)}.</figcaption></figure>"
        )
    parts.append(answers.folded(record["rows"]))
    if matrix := record.get("matrix"):
        parts.append(
            "<h3>Side effects: tuned - base</h3>"
            + _table(["trained on", *matrix["columns"]], matrix_lines(matrix))
        )
    notes = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(record))
    return "".join(parts) + f'<ul class="foot">{notes}</ul>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text -> HTML; an interval goes below its number."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = ""
    for row in rows:
        cells = (text.partition(" [") for text in row[1:])
        shown = "".join(
            f"<td>{escape(mean)}{f'<small>[{escape(ci)}</small>' if ci else ''}</td>"
            for mean, _, ci in cells
        )
        body += f"<tr><td>{escape(row[0])}</td>{shown}</tr>"
    return (
        "<div"
        f' class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def curve_chart(
    title: str, curves: Mapping[str, Sequence[float | None]], *, width: int = 640, height: int = 260
) -> str:
    """Curves over N = 1, 2, ... on a logarithmic axis, with a legend; a curve with a missing value
    is left out."""
    drawn = {
        name: [float(v) for v in own if v is not None]
        for name, own in curves.items()
        if None not in own
    }
    if not drawn:
        return ""
    longest = max(map(len, drawn.values()))
    low, high = min(map(min, drawn.values())), max(map(max, drawn.values()))
    ys = ticks(low, high if high > low else low + 1)
    left, right, top, bottom = 60, 150, 30, 34

    def place(n: int, y: float) -> tuple[float, float]:
        along = math.log(n) / math.log(longest) if longest > 1 else 0.5
        return left + along * (width - left - right), height - bottom - (y - ys[0]) / (
            ys[-1] - ys[0]
        ) * (height - top - bottom)

    parts = [
        f'<svg class="chart wide" viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{escape(title)}">'
    ]
    parts.append(f'<text class="name" x="20" y="16">{escape(title)}</text>')
    for y in ys:
        at = place(1, y)[1]
        parts.append(
            f'<line class="rule" x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{left - 6}" y="{at + 3.5:.1f}" text-anchor="end">{y:.4g}</text>'
        )
    for n in (2**k for k in range(longest.bit_length())):
        parts.append(
            f'<text class="tick" x="{place(n, ys[0])[0]:.1f}" y="{height - bottom + 15}"'
            f' text-anchor="middle">{n}</text>'
        )
    for i, (name, own) in enumerate(drawn.items()):
        colour = f"var(--s{i % COLOURS})"
        points = [place(n, y) for n, y in enumerate(own, 1)]
        d = " ".join(f"{'L' if k else 'M'}{x:.1f} {y:.1f}" for k, (x, y) in enumerate(points))
        parts.append(f'<path class="line" d="{d}" style="stroke: {colour}"/>')
        for n, (x, y) in enumerate(points, 1):
            said = f"{escape(name)}, best of {n}: {own[n - 1]:.4g}"
            parts.append(
                f'<circle class="hit" cx="{x:.1f}" cy="{y:.1f}"'
                f' r="7"><title>{said}</title></circle>'
            )
        at = top + 16 * (i + 1)
        parts.append(
            f'<circle cx="{width - right + 18}" cy="{at - 4}" r="5" style="fill: {colour}"/>'
        )
        parts.append(f'<text class="label" x="{width - right + 30}" y="{at}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])
