"""`flowrl report`: the report of a run, written again."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli.common import one_sentence_errors, show

Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="File for the page, in place of the run's report.html; also while the run is going.",
    ),
]


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")], output: Output = None
) -> None:
    """Write the report of a run, one HTML file that holds everything."""
    from flowrl.runtime.store import run_folder

    with one_sentence_errors():
        if output and output.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f'"{output.name}": the page is an .html file; end --output in .html')
        if output is None:
            run_folder.read(run)  # raises ValueError where the folder is not a run
        from flowrl.evaluation.places import own
        from flowrl.report import run_page

        with nullcontext() if output else own(run, "flowrl report"):
            show(f"{run_page.build(run, output)}", wrap=True)
