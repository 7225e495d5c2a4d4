"""Tables for terminals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.data.scored_folder import Scored
from flowrl.report.numbers import (
    HEADS,
    distinct_rows,
    evaluation_rows,
    interval_text,
    paired_sentence,
    row_head,
)


def evaluation_table(evaluation: dict[str, Any]):
    """The headline table for the terminal: one row a setting, mean and interval of the metrics, the
    paired difference below."""
    from rich import box
    from rich.table import Table

    rows, metrics, paired = (
        evaluation_rows(evaluation),
        distinct_rows(evaluation)[:2],
        evaluation.get("paired", {}),
    )
    same = [
        f"{rows[0][key]} {key}"
        for key in ("images", "steps")
        if rows and len({row.get(key) for row in rows}) == 1 and key in rows[0]
    ]
    title = ", ".join(["Held-out prompts", *same])
    out = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        padding=(0, 1),
    )
    out.add_column("", overflow="fold")
    for name in (HEADS[0], HEADS[-1].replace("/", "/\n"), *metrics):
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        name, guidance, *_, calls = row_head(row)
        cells = [interval_text(row.get("metrics", {}).get(metric), "\n") for metric in metrics]
        out.add_row(name, guidance, calls, *cells, style="bold" if row is rows[-1] else "")
    out.caption = (
        "\n".join(paired_sentence(metric, paired[metric]) for metric in metrics if metric in paired)
        or None
    )
    return out


def score_table(scored: Sequence[Scored], weights: Mapping[str, float]) -> Any:
    """File, each reward as it scored, and the total, for the terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    out.add_column("file", overflow="fold")
    for label, weight in weights.items():
        out.add_column(label if weight == 1 else f"{label} x {weight:g}", justify="right")
    out.add_column("total", justify="right")
    for item in scored:
        out.add_row(
            Text(str(item.sample.path)),
            *(f"{item.scores[label]:.4g}" for label in weights),
            f"{item.total:.4g}",
        )
    return out
