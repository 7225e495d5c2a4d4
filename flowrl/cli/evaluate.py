"""`flowrl evaluate`: a run or a suite on held-out prompts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli.common import MOST, app, console, one_sentence_errors, parse_guidance


@app.command()
def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="A run folder; with --suite, one or more.")],
    suite: Annotated[
        str | None,
        typer.Option(
            help="A name of configs/suite or a YAML file; default: the run's held-out prompts."
        ),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(
            min=1, help="Images, with --suite of each prompt; default: as run or suite say."
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="ODE steps; default: as the run did.")
    ] = None,
    guidance: Annotated[
        str | None, typer.Option(help="A scale or none; default: as the run did.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=MOST, help="Seed of the noise; default: as the run did, with --suite 0."
        ),
    ] = None,
    best_of: Annotated[
        int | None,
        typer.Option(min=1, help="With --suite: longest best-of-N curve; default: all images."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="With --suite: only so many prompts, spread over the file."),
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="With --suite: the prompt file.")] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(help="With --suite: NAME.SETTING=VALUE of its rewards; once for each."),
    ] = None,
    held_out: Annotated[
        list[str] | None,
        typer.Option(help="With --suite: read NAME too, or NAME.SETTING=VALUE; once for each."),
    ] = None,
) -> None:
    """Evaluate the averaged weights of a run's newest checkpoint on held-out prompts or on a suite;
    results join its report."""
    from flowrl.runtime import log

    log.setup()
    with one_sentence_errors():
        scale = None if guidance is None else parse_guidance(guidance)
        if suite is not None:
            chosen = {
                "best_of": best_of,
                "count": count,
                "prompts": prompts,
                "rewards": reward or (),
                "held_out": held_out or (),
            }
            _evaluate_suite(
                runs, suite, images=images, steps=steps, guidance=scale, seed=seed or 0, **chosen
            )
            return
        if len(runs) > 1 or any((best_of, count, prompts, reward, held_out)):
            options = "--best-of, --count, --prompts, --reward and --held-out"
            raise ValueError(
                f"several runs, {options} need a suite; add --suite shapes, for example"
            )
        _evaluate_run(runs[0], images=images, steps=steps, guidance=scale, seed=seed)


def _evaluate_run(
    run: Path,
    *,
    images: int | None,
    steps: int | None,
    guidance: float | str | None,
    seed: int | None,
) -> None:
    """Add a row to a run's evaluation.json."""
    from flowrl.config.build import autocast, load_run
    from flowrl.evaluation import held_out as evaluation_held_out
    from flowrl.evaluation import record as evaluation_record
    from flowrl.report import run_page, terminal
    from flowrl.runtime import run_folder

    cfg, policy, rewards, prompts = load_run(run)
    run_folder.read(run)  # its files are readable, before time is spent
    e = cfg.eval
    scale = e.guidance if guidance is None else guidance
    setting = {
        "guidance": scale,
        "steps": steps or e.steps,
        "solver": e.solver,
        "seed": e.seed if seed is None else seed,
    }
    policy.branches(scale)
    with one_sentence_errors(disk=1):
        result = evaluation_held_out.evaluate(
            policy,
            prompts,
            rewards,
            images=images or e.images,
            micro=cfg.batch.micro,
            decode=cfg.batch.decode,
            autocast=partial(autocast, cfg.train.precision, policy.device),
            **setting,
        )
        name = f"evaluate, {setting['steps']} steps, guidance {scale}, seed {setting['seed']}"
        console().print(
            terminal.evaluation_table(
                evaluation_record.add_row(run, name, result, prompts, **setting)
            )
        )
        run_page.build(run)


def _evaluate_suite(runs: list[Path], suite: str, **chosen: Any) -> None:
    """Base and tuned model of every run on a suite."""
    from flowrl.evaluation.suites import runs as suite_runs
    from flowrl.report import run_page, suite_page

    with one_sentence_errors(disk=1):
        records = suite_runs.evaluate_runs(runs, suite, suite_runs.Options(**chosen))
        for record in records:
            for part in suite_page.tables(record):
                console().print(part)
        if len(records) > 1:
            console().print(suite_page.matrix_table(records[0]["matrix"]))
        for run in runs:
            console().print(f"Report: {run_page.build(run)}", soft_wrap=True)
