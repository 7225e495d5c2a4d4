"""`flowrl show`, `flowrl list` and `flowrl report`: they only read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli.common import Overrides, app, console, one_sentence_errors, parse_config


@app.command("report")
def report_(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Write report.html of a run: one file that holds everything it shows."""
    from flowrl.report import run_page

    with one_sentence_errors():
        console().print(f"{run_page.build(run)}", soft_wrap=True)


@app.command()
def show(overrides: Overrides = None) -> None:
    """Print the resolved config."""
    from flowrl.config.load import dump

    with one_sentence_errors():
        typer.echo(dump(parse_config(overrides)), nl=False)


@app.command("list")
def list_(
    what: Annotated[
        str | None, typer.Argument(help="models, algorithms, rewards, data, experiments or suites.")
    ] = None,
) -> None:
    """List what a config can name."""
    from flowrl.config.compose import GROUPS, options
    from flowrl.runtime.registry import choices, did_you_mean

    groups: dict[str, Callable[[], list[str]]] = {
        ("data" if g == "data" else f"{g}s"): partial(options, g) for g in GROUPS
    }
    groups["rewards"] = lambda: choices("flowrl.rewards")
    groups["suites"] = partial(options, "suite")
    with one_sentence_errors():
        if what is not None and what not in groups:
            raise ValueError(f'unknown list "{what}"{did_you_mean(what, groups)}')
    for name in [what] if what else groups:
        typer.echo(f"{name}: " + ", ".join(groups[name]()))
