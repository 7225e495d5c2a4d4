"""The command line: train, budget, generate, score, evaluate, report, show, check, serve, list.

Exit codes: 0 done, 1 a failure while running, 2 the user's input was wrong and nothing was started.
"""

from __future__ import annotations

import os

import typer

from flowrl.cli import budget, check, evaluate, generate, report, score, serve, show, train
from flowrl.cli import list as list_
from flowrl.cli.common import Command
from flowrl.runtime.install import foreign
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
for _name, _command in COMMANDS.items():
    app.command(_name, cls=Command)(_command)


def main() -> None:
    """Entry point of the `flowrl` command."""
    keep_streams_open()
    if found := foreign():
        typer.echo(f"flowrl: {found}", err=True)
    try:
        app()
    except SystemExit as end:
        from flowrl.runtime.timed import caller, leave

        # Leave at once: a reward that hangs, or processes that wait for a lost one, would keep this
        # process alive.
        lost = end.code and int(os.environ.get("WORLD_SIZE", "1")) > 1
        if caller.late or lost:
            leave(end.code if isinstance(end.code, int) else 0)
        raise
