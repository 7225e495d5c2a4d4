"""`flowrl report`: the report of a run, written again, or several runs side by side."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli.common import one_sentence_errors, show

Runs = Annotated[list[Path], typer.Argument(help="A run folder, or several to compare.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="File for the page, in place of the run's report.html, also while the run is going, or"
        " of comparison.html here.",
    ),
]
Group = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Runs with the same value of this setting are a group, as algorithm or optimizer.lr."
        " Default: every run stands alone.",
    ),
]
TableFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the table of a comparison, as .md, .tex or .csv."),
]
PAGES, TABLES = (".html", ".htm"), (".md", ".tex", ".csv")


def report(runs: Runs, output: Output = None, group: Group = None, table: TableFile = None) -> None:
    """Write the report of a run, one HTML file that holds everything. Several runs, --group or
    --table compare them: curves and results side by side, means and intervals over seeds."""
    from flowrl.runtime.store import run_folder

    with one_sentence_errors():
        if output and output.suffix.lower() not in PAGES:
            raise ValueError(f'"{output.name}": the page is an .html file; end --output in .html')
        if table and table.suffix.lower() not in TABLES:
            raise ValueError(f'"{table.name}": a table ends in {", ".join(TABLES)}; name it so')
        if len(runs) > 1 or group is not None or table:
            compare(runs, output or Path("comparison.html"), group, table)
            return
        if output is None:
            run_folder.read(runs[0], spare=True)  # raises ValueError where the folder is not a run
        from flowrl.evaluation.places import own
        from flowrl.runtime import log

        log.setup()  # what is damaged is said here, too
        from flowrl.report import run_page

        with nullcontext() if output else own(runs[0], "flowrl report"):
            show(f"{run_page.build(runs[0], output)}", wrap=True)


def compare(
    runs: list[Path], output: Path, group: str | None = None, table: Path | None = None
) -> None:
    """Print a comparison of runs, and write its page and its table."""
    from rich.table import Table

    from flowrl.report import comparison, comparison_page, terminal
    from flowrl.runtime.store import files

    groups = comparison.grouped(runs, group)
    written = [comparison_page.build(groups, output)]
    if table:
        written.append(files.write(table, comparison.written(groups, table.suffix.lower())))
    for part in [*terminal.comparison_tables(groups), *written]:
        show(part, wrap=not isinstance(part, Table))
