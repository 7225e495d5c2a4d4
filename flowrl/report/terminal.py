"""Tables for terminals: evaluations, suites, scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from flowrl.report import comparison, suite_page
from flowrl.report.numbers import (
    HEADS,
    distinct_metrics,
    evaluation_rows,
    interval_text,
    of_texts,
    paired_sentence,
    row_head,
)
from flowrl.runtime.text import printable


def evaluation_table(evaluation: dict[str, Any]) -> Table:
    """Show a row for each setting, with mean and interval of the metrics; the paired difference
    stands below."""
    rows, metrics = evaluation_rows(evaluation), [*distinct_metrics(evaluation)][:2]
    out = _table(", ".join(["Held-out prompts", *_same(rows)]), caption_justify="left")
    out.add_column("", overflow="fold")
    for name in (HEADS[0], HEADS[-1].replace("/", "/\n"), *metrics):
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        name, guidance, *_, calls = row_head(row)
        cells = [interval_text(row.get("metrics", {}).get(metric), "\n") for metric in metrics]
        style = "bold" if row is rows[-1] else ""
        out.add_row(printable(name), guidance, calls, *cells, style=style)
    paired = evaluation.get("paired", {})
    found = [paired_sentence(evaluation, metric) for metric in metrics if metric in paired]
    out.caption = "\n".join(found) or None
    return out


def _same(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings that all rows have in common, which the title says."""
    return [
        f"{rows[0][key]} {key}" + (of_texts(rows[0]) if key == "images" else "")
        for key in ("images", "steps")
        if rows and len({row.get(key) for row in rows}) == 1 and key in rows[0]
    ]


def suite_tables(record: suite_page.Record) -> list[Table | str]:
    """Tables, then sentences, that `flowrl evaluate --suite` prints for a run."""
    suite, metric, heads = record["suite"], suite_page.headline(record), suite_page.heads(record)
    setting = f"{record['prompts']} prompts x {suite['images']}, {record['steps']} steps"
    title = f"{suite['title']}: {setting}, {record['run']}"
    out = [_text_table(title, heads, suite_page.lines(record, "scores"))]
    out += [_text_table(title, heads, lines) for title, lines in suite_page.breakdowns(record)]
    if found := suite_page.lines(record, "diversity"):
        out.append(_text_table("Mean distance between images of a prompt", heads, found))
    if len(found := suite_page.best_lines(record)) > 1:
        title = f"Suite's score of the best of N images by {metric}"
        out.append(_text_table(title, heads[: 1 + len(record["rows"])], found))
    return [*out, *suite_page.sentences(record)]


def matrix_table(matrix: Mapping[str, Any]) -> Table:
    """Side effects of several runs: tuned - base."""
    heads, lines = suite_page.matrix_heads(matrix), suite_page.matrix_lines(matrix)
    return _text_table("Side effects: tuned - base", heads, lines)


def comparison_tables(groups: comparison.Groups) -> list[Table | str]:
    """Tables and sentences that `flowrl report` prints for several runs."""
    heads, out = [*comparison.HEADS[:4], "gain [over seeds]", "over prompts"], []
    for metric, title in comparison.metrics_of(groups).items():
        lines = comparison.lines(groups, metric)
        cells = [[*line[:4], " ".join(line[4:6]).strip(), line[6]] for line in lines]
        out += [_text_table(f"{title}, held out, 95% intervals", heads, cells)] * bool(metric)
    cost = [[line[0], *line[len(comparison.HEADS) :]] for line in lines]
    out.append(_text_table("Cost of a run", ["", *comparison.COST], cost))
    return [*out, *comparison.notes(groups)]


def score_table(scored: Sequence[Any], weights: Mapping[str, float]) -> Table:
    """Show for each file what each reward scored, and the total. scored: ScoredSample, whose module
    needs torch, which the other tables do not."""
    out = _table()
    out.add_column("file", overflow="fold")
    for label, weight in weights.items():
        out.add_column(label if weight == 1 else f"{label} x {weight:g}", justify="right")
    out.add_column("total", justify="right")
    for item in scored:
        scores = [f"{item.scores[label]:.4g}" for label in weights]
        out.add_row(str(item.sample.path), *scores, f"{item.total:.4g}")
    return out


def _text_table(title: str, heads: Sequence[str], lines: suite_page.Lines) -> Table:
    """Make a table of texts, in which an interval goes below its number."""
    out = _table(title)
    for i, name in enumerate(heads):
        out.add_column(name, justify="right" if i else "left", overflow="fold")
    for line in lines:
        name, *cells = map(printable, line)
        out.add_row(name, *(text.replace(" [", "\n[") for text in cells))
    return out


def _table(title: str | None = None, **options: Any) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1), **options)
