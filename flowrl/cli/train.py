"""`flowrl train`: from a config to a finished run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli.common import (
    Overrides,
    next_steps,
    one_sentence_errors,
    parse_run,
    show,
    stop,
    to_try,
)

Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Continue this run folder from its newest checkpoint; without one, from its start.",
    ),
]
Accept = Annotated[
    bool,
    typer.Option(
        "--accept-changes",
        help="With --resume: go on although settings, files or code are others than before.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check all that a start checks, try the rewards, and say what would run; nothing is"
        " written.",
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        metavar="SEED,SEED,...",
        help="Train with each of these seeds, into output=FOLDER/seed-SEED, and compare the runs;"
        " the same command goes on where it was stopped.",
    ),
]


def train(
    overrides: Overrides = None,
    seeds: Seeds = None,
    resume: Resume = None,
    accept_changes: Accept = False,
    dry_run: DryRun = False,
) -> None:
    """Train, and say first what an iteration will cost."""
    from flowrl.runtime import log

    log.setup()
    # Until the run has started, an error is the user's: one sentence, and exit code 2.
    with one_sentence_errors():
        if accept_changes and resume is None:
            raise ValueError("--accept-changes is about a run that goes on; add --resume RUN")
        if seeds is not None:
            _train_seeds(seeds, overrides, "--resume" * bool(resume) or "--dry-run" * dry_run)
            return
        cfg = parse_run(overrides, resume, accept_changes)  # the words; what follows needs torch
        from flowrl.config import run_rules
        from flowrl.runtime.memory import ran_out
        from flowrl.runtime.processes.launcher import is_main
        from flowrl.training import finished, outputs
        from flowrl.training.records import NothingTrained
        from flowrl.training.train import start

        log.hush()
        if resume and (done := finished.finished(cfg, resume, accept=accept_changes)):
            if is_main():
                show(f"{finished.sentence(done)}.", wrap=True)
                tokens = bool(run_rules.has_tokens(cfg.model.source))
                _conclude(done, prompt=_to_try(cfg, tokens=tokens))
            return
        trainer = start(cfg, resume=resume, accept_changes=accept_changes)
        if dry_run:
            outputs.rehearse(trainer)
            if trainer.world.main:
                show(trainer.describe(), wrap=True)
                show("Nothing was written. Without --dry-run, the same command trains.")
            return
    # From here on, an error is a failure while running: exit code 1, and how to go on.
    try:
        if trainer.world.main:
            show(trainer.describe(), wrap=True)
        run = trainer.run()
    except NothingTrained as error:
        if trainer.world.main:
            _conclude(error.run)
        stop(error, 1)
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        hint = f"resume with: flowrl train --resume {shlex.quote(str(trainer.path))}"
        if not trainer.iteration:
            left = (trainer.path / "config.yaml").exists()
            what = "nothing was trained; start again with another output=, or remove"
            hint = f"{what} {trainer.path}" if left else ""
        stop(error, 1, hint="" if ran_out(error) else hint)  # its sentence says how to go on
    if trainer.world.main:
        policy, cfg = trainer.policy, trainer.cfg
        prompt = _to_try(cfg, tokens=policy.unmasks)
        _conclude(run, readable=policy.has_lora_format, prompt=prompt)


def _train_seeds(seeds: str, overrides: list[str], single: str) -> None:
    """Train one run a seed. single: an option beside --seeds that is about one run, or ""."""
    if single:
        raise ValueError(f"{single} is about one run; leave out --seeds, or {single}")
    from flowrl.cli import seeds as several

    several.train_all(*several.plan(*several.split(seeds, overrides)))


def _to_try(cfg: Any, *, tokens: bool) -> str:
    """Return what `flowrl generate RUN` draws, with its options. tokens: whether the model is a
    masked generator, which may have fewer tokens than the usual number of steps."""
    return to_try(cfg) + (f" --steps {cfg.sampler.steps}" if tokens else "")


def _conclude(run: Any, *, readable: bool = False, prompt: str | None = None) -> None:
    """Print what a run (flowrl.Run) found, where it is, and the commands that use it. readable:
    whether diffusers reads its LoRA. prompt: what they draw, see to_try; None: nothing was
    trained."""
    from flowrl.report import terminal, watch_page
    from flowrl.runtime.store.run_folder import trained_iterations

    if run.evaluation:
        show(terminal.evaluation_table(run.evaluation))
    if run.stopped:
        number = max(trained_iterations(run.metrics), default=0)
        show(f"Stopped after {number} iterations: {run.stopped}.", wrap=True)
    if run.peak:
        show(watch_page.sentence(run.peak), wrap=True)
    show(f"Run folder: {run.path}\nReport:     {run.path / 'report.html'}", wrap=True)
    if prompt is None:
        return
    path = shlex.quote(str(run.path))
    steps = [f"flowrl train --resume {path}"] * bool(run.stopped)
    steps.append(f"flowrl generate {path} {prompt}")
    steps += [f"flowrl evaluate {path} --seed 1"] * bool(run.evaluation)
    if readable and (run.path / "lora").is_dir():
        steps.append(f'in diffusers: pipe.load_lora_weights("{run.path / "lora"}")')
    next_steps(*steps)
