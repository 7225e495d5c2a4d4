"""The command line: train, generate, score, evaluate, report, show, check, serve, list.

Exit codes: 0 done, 1 a failure while running, 2 the user's input was wrong and nothing was started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="flowrl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Align image and video generators with reinforcement learning.",
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="A YAML file or experiment name first, then group=option or key.sub=value."
    ),
]
Call = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=VALUE of the pipeline's call, as height=512; with --lora RUN, its own."
    ),
]
Model = Annotated[
    str, typer.Argument(help="A name of configs/model, a folder in diffusers layout, or a hub id.")
]

MOST = 2**63 - 1  # of a seed


def main() -> None:
    """Entry point of the `flowrl` command."""
    app()


@contextmanager
def _input(*, disk: int = 2) -> Iterator[None]:
    """ValueError inside means that the user's input was wrong, a RewardBug that their reward is:
    one sentence, exit code 2.

    disk: the exit code of an OSError; 1 where something was done before it.
    """
    try:
        yield
    except BrokenPipeError:  # of `| head`
        raise typer.Exit(0) from None
    except (ValueError, OSError) as error:
        _stop(error, disk if isinstance(error, OSError) else 2)
    except RuntimeError as error:
        from flowrl.rewards import RewardBug, RewardUnavailable

        if isinstance(error, RewardUnavailable):
            _stop(error, 1)
        if not isinstance(error, RewardBug):
            raise
        _stop(error, 2)


def _stop(error: BaseException, code: int) -> None:
    typer.secho(f"flowrl: {error}", fg="red", err=True)
    raise typer.Exit(code) from None


def _config(overrides: list[str] | None) -> Any:
    from flowrl.compose import options
    from flowrl.config import load_config

    words = list(overrides or [])
    named = words and ("=" not in words[0]) and not words[0].startswith(("+", "~"))
    if named and not words[0].endswith((".yaml", ".yml")) and words[0] not in options("experiment"):
        from flowrl.registry import did_you_mean

        raise ValueError(
            f'"{words[0]}" is no YAML file, experiment or'
            f" key=value{did_you_mean(words[0], options('experiment'))}"
        )
    return load_config(words.pop(0) if named else None, words)


@app.command()
def train(
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue this run folder from its newest checkpoint.")
    ] = None,
) -> None:
    """Train. Prints what an iteration will cost before it starts."""
    from flowrl import log, loop, report
    from flowrl.config import load_config

    log.setup()
    with _input():
        if resume and not (resume / "config.yaml").is_file():
            raise ValueError(f"{resume} is not a run folder: it has no config.yaml")
        cfg = load_config(resume / "config.yaml", overrides or []) if resume else _config(overrides)
        trainer = loop.Trainer(cfg, resume=resume)
    _console().print(trainer.describe(), soft_wrap=True)
    try:
        run = trainer.run()
    except (RuntimeError, ValueError, OSError) as error:
        hint = (
            f"\nflowrl: resume with: flowrl train --resume {trainer.path}" if trainer.saved else ""
        )
        _stop(RuntimeError(f"{error}{hint}"), 1)
    if not trainer.world.main:
        return
    if run.evaluation:
        _console().print(report.table(run.evaluation))
    if run.stopped:
        _console().print(
            f"Stopped: {run.stopped}. Resume with:\n  flowrl train --resume {run.path}",
            soft_wrap=True,
        )
    _console().print(
        f"Run folder: {run.path}\nReport:     {run.path / 'report.html'}", soft_wrap=True
    )


@app.command()
def generate(
    model: Model,
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts.")],
    lora: Annotated[
        Path | None, typer.Option(help="A run folder, or a folder with LoRA weights.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 28,
    guidance: Annotated[
        str, typer.Option(help="A scale, none, or pipeline (the pipeline's own setting).")
    ] = "pipeline",
    rlg: Annotated[
        float,
        typer.Option(
            help=(
                "Reinforcement Learning Guidance: extrapolates from the base model through the"
                " LoRA."
            )
        ),
    ] = 1.0,
    best_of: Annotated[
        int,
        typer.Option(min=1, help="Candidates a prompt; the one with the highest reward is kept."),
    ] = 1,
    reward: Annotated[
        list[str] | None,
        typer.Option(help="What chooses: NAME, NAME=WEIGHT or NAME.SETTING=VALUE; once for each."),
    ] = None,
    pipeline: Call = None,
    seed: Annotated[
        int, typer.Option(min=0, max=MOST, help="Equal seeds give equal pictures.")
    ] = 0,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="out.png, out.mp4 ...; several prompts get numbers."),
    ] = Path("out.png"),
) -> None:
    """Make images or videos."""
    from flowrl import generation, log, media
    from flowrl.policy import load_policy
    from flowrl.rewards import load_set, parse_words
    from flowrl.setup import lora_of, pipeline_of

    log.setup()
    with _input():
        scale = _guidance(guidance)
        if rlg != 1 and lora is None:
            raise ValueError("--rlg compares the LoRA with the base model; give --lora too")
        chooser = load_set(parse_words(reward)) if reward else None
        weights, settings = lora_of(lora) if lora else (None, None)
        call = (pipeline_of(lora) if lora else {}) | _arguments(pipeline)
        policy = load_policy(model, lora=settings, **call)
        if weights:
            policy.load_lora(weights)
        made = generation.generate(
            policy,
            prompts,
            steps=steps,
            guidance=scale,
            seed=seed,
            rlg=rlg,
            best_of=best_of,
            reward=chooser,
            meta=_meta(chooser, prompts),
        )
        with _input(disk=1):
            for i, item in enumerate(made):
                name = output if len(prompts) == 1 else output.with_stem(f"{output.stem}-{i}")
                _console().print(f"{media.save(item, name)}", soft_wrap=True)


@app.command()
def score(
    media: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    reward: Annotated[
        list[str], typer.Option(help="NAME, NAME=WEIGHT or NAME.SETTING=VALUE; once for each.")
    ],
    prompt: Annotated[str | None, typer.Option(help="The prompt of all images.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A .jsonl list of file and prompt a line; default: the folder's own."),
    ] = None,
    keep_top: Annotated[
        str | None,
        typer.Option(
            help="Of each prompt, keep the best by total: a share such as 20%, or a count."
        ),
    ] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Most images scored at once.")] = 16,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="A folder for scores.jsonl and copies of the images, or a .jsonl file.",
        ),
    ] = None,
) -> None:
    """Score images, and make the folder that `flowrl train` learns from offline."""
    from flowrl import log, scoring
    from flowrl.rewards import load_set, parse_words

    log.setup()
    with _input():
        top = scoring.parse_keep(keep_top) if keep_top is not None else None
        rewards = load_set(parse_words(reward))
        samples = scoring.with_meta(scoring.collect(media, prompt=prompt, prompts=prompts), rewards)
        if output is not None:
            scoring.check_target(output, samples)
        scored, problems = scoring.score_files(samples, rewards, chunk=chunk)
        kept = scored if top is None else scoring.keep_top(scored, top)
        written = ""
        if output is not None and kept:  # before the table, whose reader may leave
            try:
                written = (
                    f"{len(kept)} of {len(samples)} images:"
                    f" {scoring.write(output, kept, rewards.weights)}"
                )
            except OSError as error:
                problems.append(f"-o {output} could not be written: {error}")
        _console().print(scoring.table(kept, rewards.weights))
        if written:
            _console().print(written, soft_wrap=True)
    for problem in problems:
        typer.secho(f"flowrl: {problem}", fg="red", err=True)
    if problems:
        raise typer.Exit(1)


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
    from flowrl import log

    log.setup()
    with _input():
        scale = None if guidance is None else _guidance(guidance)
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
    from flowrl import evaluation, report
    from flowrl.setup import autocast, load_run

    cfg, policy, rewards, prompts = load_run(run)
    report.read(run)  # its files are readable, before time is spent
    e = cfg.eval
    scale = e.guidance if guidance is None else guidance
    setting = {
        "guidance": scale,
        "steps": steps or e.steps,
        "solver": e.solver,
        "seed": e.seed if seed is None else seed,
    }
    policy.branches(scale)
    with _input(disk=1):
        result = evaluation.evaluate(
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
        _console().print(report.table(evaluation.add_row(run, name, result, prompts, **setting)))
        report.build(run)


def _evaluate_suite(runs: list[Path], suite: str, **chosen: Any) -> None:
    """Base and tuned model of every run on a suite."""
    from flowrl import report, suite_report, suite_runs

    with _input(disk=1):
        records = suite_runs.evaluate_runs(runs, suite, suite_runs.Options(**chosen))
        for record in records:
            for part in suite_report.tables(record):
                _console().print(part)
        if len(records) > 1:
            _console().print(suite_report.matrix_table(records[0]["matrix"]))
        for run in runs:
            _console().print(f"Report: {report.build(run)}", soft_wrap=True)


@app.command("report")
def report_(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Write report.html of a run: one file that holds everything it shows."""
    from flowrl import report

    with _input():
        _console().print(f"{report.build(run)}", soft_wrap=True)


@app.command()
def show(overrides: Overrides = None) -> None:
    """Print the resolved config."""
    from flowrl.config import dump

    with _input():
        typer.echo(dump(_config(overrides)), nl=False)


@app.command()
def check(
    model: Annotated[
        str | None, typer.Argument(help="A name of configs/model, a folder, or a hub id.")
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(help="Check this reward instead: NAME, and NAME.SETTING=VALUE."),
    ] = None,
    media: Annotated[
        list[Path] | None, typer.Option(help="Try the reward on these images, or folders of them.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Their prompts, as for score; default: the folder's own.")
    ] = None,
    count: Annotated[int | None, typer.Option(min=2, help="Pictures to try the reward on.")] = None,
    frames: Annotated[
        int | None,
        typer.Option(
            min=2, help="Try it on videos of so many frames; default: 8 if it is of videos."
        ),
    ] = None,
    pipeline: Call = None,
) -> None:
    """Show what was inferred about a model and how exactly it replays, or try a reward on pictures
    whose truth is known."""
    with _input():
        if (model is None) == (not reward):
            raise ValueError("give a model, or --reward NAME")
        if reward:
            _check_rewards(reward, media, prompts, count, frames)
            return
        if media or prompts or count or frames:
            raise ValueError(
                "--media, --prompts, --count and --frames are for a reward; give --reward NAME too"
            )
        from flowrl import log
        from flowrl.policy import load_policy

        log.setup()
        policy: Any = load_policy(
            model, **_arguments(pipeline)
        )  # of a name or folder: a pipeline's
        typer.echo(policy.describe())
        typer.echo(str(policy.self_check()))


@app.command()
def serve(
    reward: Annotated[
        list[str], typer.Argument(help="REWARD, REWARD=WEIGHT or REWARD.SETTING=VALUE.")
    ],
    host: Annotated[
        str, typer.Option(help="Address; beyond this machine it needs --token-env.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any.")] = 8321,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with the token that clients send.")
    ] = None,
    max_mb: Annotated[float, typer.Option(min=1, help="Of one request, in megabytes.")] = 512,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Most samples of several requests scored together.")
    ] = 64,
    device: Annotated[str | None, typer.Option(help="Default: a GPU if there is one.")] = None,
) -> None:
    """Serve rewards to other processes; reward=remote asks them."""
    from flowrl.rewards import parse_words
    from flowrl.serve import Server

    with _input():
        server = Server(
            parse_words(reward),
            host=host,
            port=port,
            token_env=token_env,
            max_mb=max_mb,
            max_batch=max_batch,
            device=device,
        )
    typer.echo(server.describe())
    server.run()


@app.command("list")
def list_(
    what: Annotated[
        str | None, typer.Argument(help="models, algorithms, rewards, data, experiments or suites.")
    ] = None,
) -> None:
    """List what a config can name."""
    from flowrl.compose import GROUPS, options
    from flowrl.registry import choices, did_you_mean

    groups: dict[str, Callable[[], list[str]]] = {
        ("data" if g == "data" else f"{g}s"): partial(options, g) for g in GROUPS
    }
    groups["rewards"] = lambda: choices("flowrl.rewards")
    groups["suites"] = partial(options, "suite")
    with _input():
        if what is not None and what not in groups:
            raise ValueError(f'unknown list "{what}"{did_you_mean(what, groups)}')
    for name in [what] if what else groups:
        typer.echo(f"{name}: " + ", ".join(groups[name]()))


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f'{option}={text} should be a number, "none" or "pipeline"') from None


def _guidance(text: str) -> float | str:
    return text if text in ("none", "pipeline") else _number("--guidance", text)


def _arguments(words: list[str] | None) -> dict[str, Any]:
    """--pipeline NAME=VALUE ..., the values as YAML reads them."""
    import yaml

    out: dict[str, Any] = {}
    for word in words or []:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"--pipeline {word} should be NAME=VALUE, such as height=512")
        try:
            out[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            out[name] = value
    return out


def _meta(rewards: Any, prompts: list[str]) -> list[dict[str, Any]] | None:
    """What the shapes reward, if it is among them, reads about prompts of its world."""
    if rewards is None or not any(reward.name == "shapes" for reward in rewards.rewards.values()):
        return None
    from flowrl.shapes.prompts import find

    return [find(prompt) for prompt in prompts]


def _check_rewards(
    words: list[str],
    media: list[Path] | None,
    prompts: Path | None,
    count: int | None,
    frames: int | None,
) -> None:
    from flowrl import canaries, specimens
    from flowrl.rewards import load_set, parse_words

    if media and frames:
        raise ValueError(
            f"--frames {frames} is of videos that are drawn, and --media names images; leave one of"
            " them out"
        )
    found = []
    for label, reward in load_set(parse_words(words)).rewards.items():
        own = specimens.files(reward, media, prompts=prompts, most=count or 16) if media else None
        shown = own or specimens.fits(reward, count=count, frames=frames)
        findings = canaries.check(reward, shown)
        typer.echo(
            f"{label}: {reward.scale}\nneeds:"
            f" {', '.join(sorted(reward.needs | reward.reads)) or 'nothing'}"
        )
        _console().print(canaries.table(findings))
        found += findings
    if canaries.failed(found):
        raise typer.Exit(1)


def _console() -> Any:
    from rich.console import Console

    return Console(file=sys.stdout)


if __name__ == "__main__":
    main()
