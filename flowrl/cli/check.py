"""`flowrl check`: what was inferred about a pipeline, whether a reward can be trusted, and what a
user's own media and pairs hold."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from flowrl.cli.common import (
    MOST,
    REWARD,
    Call,
    Dtype,
    Hints,
    Json,
    as_json,
    call_arguments,
    check_model,
    echo,
    one_sentence_errors,
    parse_rewards,
    show,
)

Model = Annotated[
    str | None,
    typer.Argument(help="A name of configs/model, a folder, or a hub id."),
]
Rewards = Annotated[
    list[str] | None,
    typer.Option(metavar=REWARD, help="Check this reward instead, with these settings."),
]
Media = Annotated[
    list[Path] | None, typer.Option(help="Try the reward on these images, or folders of them.")
]
Prompts = Annotated[
    str | None,
    typer.Option(
        help="Prompts of --media, as for score (default: the folder's own); of a module of your"
        " own, two that it is tried with."
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="Check media or pairs of your own for data.offline: a folder or a list.",
    ),
]
Count = Annotated[int | None, typer.Option(min=2, help="Pictures to try the reward on.")]
Frames = Annotated[
    int | None,
    typer.Option(min=2, help="Try it on videos of so many frames; default: 8 if it is of videos."),
]


def check(
    model: Model = None,
    reward: Rewards = None,
    media: Media = None,
    prompts: Prompts = None,
    count: Count = None,
    frames: Frames = None,
    data: Data = None,
    pipeline: Call = None,
    hints: Hints = None,
    dtype: Dtype = "fp32",
    json: Json = None,
) -> None:
    """Look at a model, a reward or data before training. Shows what was inferred about a model and
    how exactly it is repeated, tries a reward on pictures whose truth is known, or lists every
    fault of media and pairs of your own."""
    with one_sentence_errors():
        # a command checks a model, a reward or data, each with the options that it reads
        if sum((model is not None, bool(reward), data is not None)) != 1:
            raise ValueError("give a model, or --reward NAME, or --data PATH")
        if data is not None:
            if media or prompts or count or frames or pipeline or hints:
                raise ValueError("--data has one further option, --json; leave the others out")
            _check_data(data, json)
        elif reward:
            if pipeline or hints:
                raise ValueError("--pipeline and --hints are for a model; leave them out")
            entries = parse_rewards(reward)
            if prompts and not media:
                raise ValueError("--prompts are those of --media; give --media too")
            if media and frames:
                drawn = f"--frames {frames} is of videos that are drawn"
                raise ValueError(f"{drawn}, and --media names images; leave one of them out")
            _check_rewards(entries, media, prompts, count, frames, json)
        elif json or media or count or frames:
            options = "--media, --count, --frames and --json"
            raise ValueError(f"{options} are for a reward; give --reward NAME too")
        elif model is not None:
            check_model(model)
            _check_model(model, prompts, pipeline, hints, dtype)


def _check_model(
    model: str, prompts: str | None, pipeline: list[str] | None, hints: str | None, dtype: str
) -> None:
    from flowrl.config.build import DTYPES
    from flowrl.data.prompts import load_prompts
    from flowrl.policy import GeneratorPolicy, load_policy
    from flowrl.policy.module import ModulePolicy
    from flowrl.runtime import log

    log.setup()
    log.hush()
    policy: Any = load_policy(model, hints=hints, dtype=DTYPES[dtype], **call_arguments(pipeline))
    if not hasattr(policy, "describe"):
        raise ValueError(f"{model} makes a {type(policy).__name__}; only pipelines are inferred")
    own = {}
    if prompts:
        if not isinstance(policy, ModulePolicy | GeneratorPolicy):
            raise ValueError("a pipeline is tried with two prompts of ours; leave --prompts out")
        texts = dict.fromkeys(row["prompt"] for row in load_prompts(prompts))
        own["prompts"] = list(texts)[:2]
    echo(policy.describe())
    echo(policy.self_check(**own))
    if found := getattr(policy, "readers", tuple)():
        echo(f"  tokens of a prompt that are read: {', '.join(map(str, found))}")


def _check_data(path: Path, json: str | None) -> None:
    """Print what a folder or list of media or pairs holds; exit code 2 where a row has a fault."""
    from rich import box
    from rich.table import Table

    from flowrl.data.scan import command, facts, scan
    from flowrl.data.supervised import is_supervised

    if path.exists() and not is_supervised(path):
        raise ValueError(
            f"{path} holds scores of `flowrl score`, which a run checks itself; --data takes media"
            " with their prompts, or pairs"
        )
    found = scan(path)
    # as JSON, or a table of what is there and below it the sentences of each kind
    record = {"rows": found.media + found.pairs, "pairs": found.pairs, "ties": found.ties}
    groups = {"faults": found.faults, "notes": found.notes}
    if not as_json(record | groups, json):
        out = Table("", "", box=box.SIMPLE, show_header=False)
        for row in facts(found):
            out.add_row(*row)
        show(out)
        for name, group in groups.items():
            for kind, said in group.items():
                more = len(said) - MOST
                echo(f"{name[:-1]}: {kind} ({len(said):,})")
                echo("\n".join(f"  {sentence}" for sentence in said[:MOST]))
                if more > 0:
                    echo(f"  and {more:,} more (--json FILE lists them)")
        if found.faults:
            echo("correct the faults, or leave these rows out; notes may stay")
        else:
            show(f"no faults; train with: {command(found, path)}", wrap=True)
    if found.faults:
        raise typer.Exit(2)


def _check_rewards(
    entries: dict[str, dict[str, Any]],
    media: list[Path] | None,
    prompts: str | None,
    count: int | None,
    frames: int | None,
    json: str | None,
) -> None:
    """Print the findings about each reward on the user's own pictures, or on drawn ones whose truth
    is known; exit code 1 where a check failed."""
    from flowrl.rewards import load_set
    from flowrl.rewards.checks import check as checks
    from flowrl.rewards.checks import examples

    listed, found = Path(prompts) if prompts else None, {}
    for label, reward in load_set(entries).rewards.items():
        own = examples.files(reward, media, prompts=listed, most=count or 16) if media else []
        shown = own or examples.fits(reward, count=count, frames=frames)
        found[label] = checks.check(reward, shown)
        if json != "-":  # with "-", stdout holds nothing but the JSON
            needs = ", ".join(sorted(reward.needs | reward.reads)) or "nothing"
            echo(f"{label}: {reward.scale}\nneeds: {needs}")
            show(checks.table(found[label]))
    warned = sum(finding.verdict == "warn" for own in found.values() for finding in own)
    if json != "-" and not any(map(checks.failed, found.values())):
        words = " ".join(f"reward={quote(str(e.get('name', n)))}" for n, e in entries.items())
        show(f"nothing failed; {warned} warnings; train with: flowrl train {words}", wrap=True)
    as_json({label: [asdict(finding) for finding in own] for label, own in found.items()}, json)
    if any(map(checks.failed, found.values())):
        raise typer.Exit(1)
