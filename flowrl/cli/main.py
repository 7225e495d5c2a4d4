"""The command line: one function a command, in the groups of `flowrl --help`.

Exit codes: 0 done, 1 a failure while running, or a budget that does not fit, 2 the user's input was
wrong and nothing was started.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flowrl import __version__
from flowrl.cli import (
    budget,
    check,
    env,
    evaluate,
    export,
    generate,
    init,
    live,
    report,
    score,
    serve,
    show,
    train,
)
from flowrl.cli import list as list_
from flowrl.cli.common import Command, echo, usage_errors, write_sections
from flowrl.runtime.streams import keep_streams_open

COMMANDS: dict[str, dict[str, Any]] = {  # heading -> its commands, in the order of `flowrl --help`
    "Train": {"init": init.init, "budget": budget.budget, "train": train.train},
    "Use": {
        "generate": generate.generate,
        "export": export.export,
        "score": score.score,
        "serve": serve.serve,
    },
    "Look": {
        "evaluate": evaluate.evaluate,
        "report": report.report,
        "live": live.live,
        "show": show.show,
        "list": list_.list_choices,
        "env": env.env,
    },
    "Own models and rewards": {"check": check.check},
}


class Commands(TyperGroup):
    """All commands, whose help lists them under their headings."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with usage_errors(self):
            return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [
            (heading, (f"{name:8}", self.commands[name].get_short_help_str(formatter.width)))
            for heading, commands in COMMANDS.items()
            for name in commands
        ]
        write_sections(formatter, rows)


app = typer.Typer(
    name="flowrl",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _commands in COMMANDS.values():
    for _name, _command in _commands.items():
        app.command(_name, cls=Command)(_command)


def _print_version(asked: bool) -> None:
    if asked:
        echo(f"flowrl {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
]


@app.callback(epilog="`flowrl COMMAND -h` says more about a command, with examples.")
def options(version: Version = False) -> None:
    """Align image and video generators with reinforcement learning."""


def main() -> None:
    """Entry point of the `flowrl` command."""
    keep_streams_open()
    try:
        app()
    except SystemExit as end:
        from flowrl.runtime.processes.launcher import launched
        from flowrl.runtime.timed import caller, leave

        # Leave at once: a reward that hangs, or processes that wait for a lost one, would keep this
        # process alive.
        lost = end.code and launched() > 1
        if caller.late or lost:
            leave(end.code if isinstance(end.code, int) else 0)
        raise
