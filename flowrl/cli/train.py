"""`flowrl train`: from a config to a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli.common import Overrides, one_sentence_errors, parse_config, show, stop

Resume = Annotated[
    Path | None, typer.Option(help="Continue this run folder from its newest checkpoint.")
]


def train(overrides: Overrides = None, resume: Resume = None) -> None:
    """Train. Prints what an iteration will cost before it starts."""
    from flowrl.runtime import log
    from flowrl.runtime.checkpoint import steps
    from flowrl.training import loop
    from flowrl.training.records import NothingTrained

    log.setup()
    with one_sentence_errors():
        cfg = _config_of(resume, overrides) if resume else parse_config(overrides)
        trainer = loop.Trainer(cfg, resume=resume)
    show(trainer.describe(), wrap=True)
    try:
        run = trainer.run()
    except NothingTrained as error:
        if trainer.world.main:
            _conclude(error.run)
        stop(error, 1)
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        hint = f"resume with: flowrl train --resume {trainer.path}"
        stop(error, 1, hint=hint if steps(trainer.path) else "")
    if trainer.world.main:
        _conclude(run)


def _config_of(run: Path, overrides: list[str] | None) -> Any:
    """The Config of a run that goes on, changed by overrides."""
    from flowrl.config.load import load_config

    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} is not a run folder: it has no config.yaml")
    return load_config(run / "config.yaml", overrides or [])


def _conclude(run: Any) -> None:
    """Print what a run (flowrl.Run) found and where it is."""
    from flowrl.report import terminal

    if run.evaluation:
        show(terminal.evaluation_table(run.evaluation))
    if run.stopped:
        again = f"Resume with:\n  flowrl train --resume {run.path}"
        show(f"Stopped: {run.stopped}. {again}", wrap=True)
    show(f"Run folder: {run.path}\nReport:     {run.path / 'report.html'}", wrap=True)
