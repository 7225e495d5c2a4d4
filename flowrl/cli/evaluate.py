"""`flowrl evaluate`: a run or a suite on held-out prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli.common import LARGEST_SEED, Json, as_json, one_sentence_errors, parse_guidance, show

DOING = "flowrl evaluate"
Runs = Annotated[list[Path], typer.Argument(help="A run folder; with --suite, one or more.")]
Suite = Annotated[
    str | None,
    typer.Option(
        help="A name of configs/suite or a YAML file; default: the run's held-out prompts."
    ),
]
Images = Annotated[
    int | None,
    typer.Option(min=1, help="Images, with --suite of each prompt; default: as run or suite say."),
]
Steps = Annotated[int | None, typer.Option(min=1, help="ODE steps; default: as the run did.")]
Guidance = Annotated[str | None, typer.Option(help="A scale or none; default: as the run did.")]
Rlg = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Reinforcement Learning Guidance: 0 the base model, 1 the run's, above 1 beyond it;"
        " default: as the run did.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=LARGEST_SEED,
        help="Seed of the noise; default: as the run did, with --suite 0.",
    ),
]
BestOf = Annotated[
    int | None,
    typer.Option(min=1, help="With --suite: longest best-of-N curve; default: all images."),
]
Count = Annotated[
    int | None,
    typer.Option(min=1, help="With --suite: only so many prompts, spread over the file."),
]
Prompts = Annotated[str | None, typer.Option(help="With --suite: the prompt file.")]
Rewards = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME.SETTING=VALUE", help="With --suite: a setting of its rewards."),
]
HeldOut = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[.SETTING=VALUE]", help="With --suite: a reward to read too; once for each."
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="Folder for the results, in place of the run; also while the run is going.",
    ),
]


def evaluate(
    runs: Runs,
    suite: Suite = None,
    images: Images = None,
    steps: Steps = None,
    guidance: Guidance = None,
    rlg: Rlg = None,
    seed: Seed = None,
    best_of: BestOf = None,
    count: Count = None,
    prompts: Prompts = None,
    reward: Rewards = None,
    held_out: HeldOut = None,
    output: Output = None,
    json: Json = None,
) -> None:
    """Measure a run on held-out prompts or on a suite. Takes the averaged weights of the newest
    checkpoint; results join its report, unless they go elsewhere."""
    from flowrl.runtime import log
    from flowrl.runtime.excerpt import part
    from flowrl.runtime.store.run_folder import config_file

    log.setup()
    with one_sentence_errors():
        scale = None if guidance is None else parse_guidance(guidance)
        how: dict[str, Any] = {"images": images, "steps": steps, "guidance": scale, "rlg": rlg}
        of_suites: dict[str, Any] = {"best_of": best_of, "count": count, "prompts": prompts}
        words = {"rewards": reward or (), "held_out": held_out or ()}
        if suite is None and (len(runs) > 1 or any((*of_suites.values(), reward, held_out))):
            options = "--best-of, --count, --prompts, --reward and --held-out"
            needs = f"several runs, {options} need a suite"
            raise ValueError(f"{needs}; add --suite shapes, for example")
        if suite is not None:
            part("flowrl.evaluation.suites.suite", "suite_file")(suite)
        for run in runs:
            config_file(run)  # raises ValueError where the folder is not a run

        from flowrl.evaluation.of_run import evaluate_run
        from flowrl.evaluation.places import places
        from flowrl.report import terminal
        from flowrl.runtime.processes.world import here

        log.hush()
        world = here()
        if suite is not None:
            chosen = {"seed": seed or 0, **how, **of_suites, **words}
            _evaluate_suite(runs, suite, output, world, json, **chosen)
        else:
            with places(runs, output, DOING, world) as into, one_sentence_errors(disk=1):
                found = evaluate_run(runs[0], into=into[runs[0]], world=world, seed=seed, **how)
                if world.main and not as_json(found, json):
                    show(terminal.evaluation_table(found))


def _evaluate_suite(
    runs: list[Path],
    suite: str,
    output: Path | None,
    world: Any,
    json: str | None,
    **chosen: Any,
) -> None:
    """Evaluate base and tuned model of every run on a suite, and print the tables."""
    from flowrl.evaluation.places import places
    from flowrl.evaluation.suites import runs as suite_runs
    from flowrl.report import run_page, terminal

    with one_sentence_errors(disk=1), places(runs, output, DOING, world) as into:
        options = suite_runs.SuiteOptions(**chosen)
        records = suite_runs.evaluate_runs(runs, suite, options, into=into, world=world)
        if not world.main:
            return
        said = [
            f"Results: {place}" if output else f"Report: {run_page.build(run)}"
            for run, place in into.items()
        ]
        # prints the numbers as JSON, or each run's tables and then the side effects of several runs
        if as_json(records, json):
            return
        for record in records:
            for part in terminal.suite_tables(record):
                show(part)
        if len(records) > 1:
            show(terminal.matrix_table(records[0]["matrix"]))
        show("\n".join(said), wrap=True)
