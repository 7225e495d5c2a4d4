"""`flowrl report`: the report of a run, written again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli.common import one_sentence_errors, show


def report(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Write report.html of a run: one file that holds everything it shows."""
    from flowrl.report import run_page

    with one_sentence_errors():
        show(f"{run_page.build(run)}", wrap=True)
