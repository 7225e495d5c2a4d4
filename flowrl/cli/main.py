"""The command line: train, budget, generate, score, evaluate, report, show, check, serve, list.

Exit codes: 0 done, 1 a failure while running, 2 the user's input was wrong and nothing was started.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from flowrl.cli import budget, check, evaluate, generate, report, score, serve, show, train
from flowrl.cli import list as list_
from flowrl.cli.common import Command, one_sentence_errors
from flowrl.runtime.paths import expanded
from flowrl.runtime.streams import keep_streams_open

COMMANDS = {  # in the order of `flowrl --help`
    "train": train.train,
    "budget": budget.budget,
    "generate": generate.generate,
    "score": score.score,
    "evaluate": evaluate.evaluate,
    "report": report.report,
    "show": show.show,
    "check": check.check,
    "serve": serve.serve,
    "list": list_.list_choices,
}

app = typer.Typer(
    name="flowrl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Align image and video generators with reinforcement learning.",
)


def _expanding(command: Any) -> Callable[..., None]:
    """The command with ~ and variables written out in its paths: a shell leaves --output=~/x."""

    def written_out(value: Any) -> Any:
        if isinstance(value, list):
            return [written_out(entry) for entry in value]
        return Path(expanded(str(value))) if isinstance(value, Path) else value

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        with one_sentence_errors():
            given = {name: written_out(value) for name, value in given.items()}
        command(**given)

    return wrapped


for _name, _command in COMMANDS.items():
    app.command(_name, cls=Command)(_expanding(_command))


def main() -> None:
    """Entry point of the `flowrl` command."""
    keep_streams_open()
    try:
        app()
    except SystemExit as end:
        from flowrl.runtime.timed import caller, leave

        # a reward that hangs, and processes that wait for one that is gone, would keep us here
        lost = end.code and int(os.environ.get("WORLD_SIZE", "1")) > 1
        if caller.late or lost:
            leave(end.code if isinstance(end.code, int) else 0)
        raise
