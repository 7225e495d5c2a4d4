"""`flowrl train`: from a config to a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli.common import Overrides, one_sentence_errors, parse_config, show, stop

Resume = Annotated[
    Path | None,
    typer.Option(
        help="Continue this run folder from its newest checkpoint; without one, from its start."
    ),
]
Accept = Annotated[
    bool,
    typer.Option(
        "--accept-changes",
        help="With --resume: go on although settings, files or code are others than before.",
    ),
]


def train(
    overrides: Overrides = None, resume: Resume = None, accept_changes: Accept = False
) -> None:
    """Train. Prints what an iteration will cost before it starts."""
    from flowrl.runtime import log
    from flowrl.runtime.memory import ran_out
    from flowrl.training.records import NothingTrained
    from flowrl.training.resume import config_of
    from flowrl.training.train import start

    log.setup()
    # Until the run has started, an error is the user's: one sentence, and exit code 2.
    with one_sentence_errors():
        if accept_changes and resume is None:
            raise ValueError("--accept-changes is about a run that goes on; add --resume RUN")
        cfg = config_of(resume, overrides) if resume else parse_config(overrides)
        trainer = start(cfg, resume=resume, accept_changes=accept_changes)
    # From here on it is a failure while running: exit code 1, and how to go on.
    try:
        if trainer.world.main:
            show(trainer.describe(), wrap=True)
        run = trainer.run()
    except NothingTrained as error:
        if trainer.world.main:
            _conclude(error.run)
        stop(error, 1)
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        hint = f"resume with: flowrl train --resume {trainer.path}"
        no_resume = ran_out(error) or not (trainer.path / "config.yaml").exists()
        stop(error, 1, hint="" if no_resume else hint)
    if trainer.world.main:
        _conclude(run)


def _conclude(run: Any) -> None:
    """Print what a run (flowrl.Run) found and where it is."""
    from flowrl.report import terminal, watch_page

    if run.evaluation:
        show(terminal.evaluation_table(run.evaluation))
    if run.stopped:
        again = f"Resume with:\n  flowrl train --resume {run.path}"
        show(f"Stopped: {run.stopped}. {again}", wrap=True)
    if run.peak:
        show(watch_page.sentence(run.peak), wrap=True)
    show(f"Run folder: {run.path}\nReport:     {run.path / 'report.html'}", wrap=True)
