"""Results of evaluation suites, as lines of text and as a section of report.html. terminal.py
prints the same lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from markupsafe import Markup

from flowrl.report import answers
from flowrl.report.charts import best_of_chart
from flowrl.report.numbers import interval_text
from flowrl.report.render import render
from flowrl.runtime.store import side_files
from flowrl.runtime.text import printable

Record = Mapping[str, Any]  # record of one suite on one run
Lines = list[list[str]]  # lines of cells, whose first column holds names

SHOWN = (1, 2, 4, 8, 16, 32, 64)  # sizes N of the best-of-N curve that tables show


def section(run: Path, notes: list[str]) -> Markup:
    """All suites of a run as HTML, by name; "" where there are none. A damaged file is left out,
    with a sentence in `notes`."""
    found = sorted((run / "suites").glob("*.json"))
    return Markup().join(side_files.spared(notes, _of_file, path, empty=Markup()) for path in found)


def _of_file(path: Path) -> Markup:
    """Show what `flowrl evaluate --suite` wrote; a file that was edited or damaged ->
    ValueError."""
    again = "evaluate again: flowrl evaluate --suite"
    record = side_files.read(path, again=again)
    try:
        return _suite(record)
    except (LookupError, TypeError, ValueError, AttributeError, TemplateError) as error:
        what = printable(f"{type(error).__name__}: {error}", 60)
        raise ValueError(
            f"{path} {side_files.EDITED} ({what}); restore it, or delete it and {again}"
        ) from error


def _suite(record: Record) -> Markup:
    metric, matrix = headline(record), record.get("matrix")
    curves = {row["name"]: [entry["mean"] for entry in row["best_of"]] for row in record["rows"]}
    several = len(record["rows"][-1]["best_of"]) > 1
    return render(
        "suite.html",
        record=record,
        metric=metric,
        heads=heads(record),
        scores=lines(record, "scores"),
        breakdowns=breakdowns(record),
        diversity=lines(record, "diversity"),
        best_of=best_of_chart(f"best of N by {metric}", curves) if several else None,
        answers=answers.folded(record["rows"]),
        matrix={"heads": matrix_heads(matrix), "lines": matrix_lines(matrix)} if matrix else None,
        sentences=sentences(record),
    )


# ---------------------------------------------------------------------------
# tables of text


def headline(record: Record) -> str:
    """The metric that the suite is about."""
    return next(iter(record["rows"][-1]["scores"]))


def heads(record: Record) -> list[str]:
    """Head the columns: one for each row of the record, and one for the difference of "tuned" to
    each other row."""
    return [
        "",
        *(f"{row['name']} ({_guidance(row)})" for row in record["rows"]),
        *(f"tuned - {name}" for name in record["paired"]),
    ]


def _guidance(row: Mapping[str, Any]) -> str:
    own = "no guidance" if row["guidance"] == "none" else f"guidance {row['guidance']}"
    w = row.get("rlg", 1.0)  # records of earlier versions have no rlg
    return own if w == 1 else f"{own}, rlg {w:g}"


def lines(record: Record, level: str, reading: str | None = None) -> Lines:
    """Make lines of cells. Levels scores and diversity have a line a reading; categories and
    details have a line a category of `reading`."""

    def of(holder: Mapping[str, Any]) -> Mapping[str, Any]:
        found = holder.get(level, {})
        return found if reading is None else found.get(reading, {})

    out = []
    for name in of(record["rows"][-1]):
        means = [interval_text(of(row).get(name)) for row in record["rows"]]
        differences = [
            interval_text(of(paired).get(name), key="difference")
            for paired in record["paired"].values()
        ]
        role = _role(record, name) if level == "scores" else ""
        out.append([f"{name}{role}", *means, *differences])
    return out


def _role(record: Record, reading: str) -> str:
    """Say whether training saw the reward behind a reading."""
    label, suite = reading.partition("/")[0], record["suite"]
    entry = {**suite["rewards"], **suite["held_out"]}.get(label)
    name = entry.get("name", label) if isinstance(entry, dict) else label
    if name in record["trained"]:
        return " (trained on)"
    return " (held out)" if label in suite["held_out"] else ""


def breakdowns(record: Record) -> list[tuple[str, Lines]]:
    """(title, lines) of the headline metric by category and by question, where there are any."""
    metric = headline(record)
    found = [
        (f"{metric} by category", lines(record, "categories", metric)),
        (f"{metric} by question", lines(record, "details", metric)),
    ]
    return [(title, of) for title, of in found if of]


def best_lines(record: Record) -> Lines:
    """Make a line for each size N of the best-of-N curve: powers of two, and the longest."""
    longest = len(record["rows"][-1]["best_of"])
    sizes = sorted({n for n in SHOWN if n < longest} | {longest}) if longest else []
    return [
        [f"best of {n}", *(interval_text(row["best_of"][n - 1]) for row in record["rows"])]
        for n in sizes
    ]


def matrix_heads(matrix: Mapping[str, Any]) -> list[str]:
    return ["trained on", *matrix["columns"]]


def matrix_lines(matrix: Mapping[str, Any]) -> Lines:
    """Make a line for each run: what its training changed in each column."""
    return [
        [
            f"{', '.join(row['trained'])} ({row['run']})",
            *(interval_text(entry, key="difference") for entry in row["entries"]),
        ]
        for row in matrix["rows"]
    ]


def sentences(record: Record) -> list[str]:
    """Write sentences about peaks of held-out rewards in training, contamination, and warnings."""
    out = [_peak(name, peak) for name, peak in record["peaks"].items()]
    if found := record["contamination"]:
        out.append(
            f"Of {found['suite']} different prompts, {found['exact']} are training prompts,"
            f" {found['near']} more have nearly the same words, and {found['shared_8_grams']} share"
            f" eight words in a row with one ({found['training']} training prompts)."
        )
    return [*out, *(f"Note: {sentence}." for sentence in record["warnings"])]


def _peak(name: str, peak: Mapping[str, Any]) -> str:
    at, last = peak["iteration"], peak["last_iteration"]
    since = "" if at == last else f"; at iteration {last} it is {peak['last']:.4g}"
    return f"Held-out {name} was highest, {peak['value']:.4g}, at iteration {at}{since}."
