"""`flowrl train`: from a config to a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli.common import Overrides, app, console, one_sentence_errors, parse_config, stop


@app.command()
def train(
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue this run folder from its newest checkpoint.")
    ] = None,
) -> None:
    """Train. Prints what an iteration will cost before it starts."""
    from flowrl.config.load import load_config
    from flowrl.report import terminal
    from flowrl.runtime import log
    from flowrl.training import loop

    log.setup()
    with one_sentence_errors():
        if resume and not (resume / "config.yaml").is_file():
            raise ValueError(f"{resume} is not a run folder: it has no config.yaml")
        cfg = (
            load_config(resume / "config.yaml", overrides or [])
            if resume
            else parse_config(overrides)
        )
        trainer = loop.Trainer(cfg, resume=resume)
    console().print(trainer.describe(), soft_wrap=True)
    try:
        run = trainer.run()
    except (RuntimeError, ValueError, OSError) as error:
        hint = (
            f"\nflowrl: resume with: flowrl train --resume {trainer.path}" if trainer.saved else ""
        )
        stop(RuntimeError(f"{error}{hint}"), 1)
    if not trainer.world.main:
        return
    if run.evaluation:
        console().print(terminal.evaluation_table(run.evaluation))
    if run.stopped:
        console().print(
            f"Stopped: {run.stopped}. Resume with:\n  flowrl train --resume {run.path}",
            soft_wrap=True,
        )
    console().print(
        f"Run folder: {run.path}\nReport:     {run.path / 'report.html'}", soft_wrap=True
    )
