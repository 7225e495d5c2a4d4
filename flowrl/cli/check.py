"""`flowrl check`: what was inferred about a pipeline, and whether a reward can be trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli.common import Call, app, call_arguments, console, one_sentence_errors


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
    with one_sentence_errors():
        if (model is None) == (not reward):
            raise ValueError("give a model, or --reward NAME")
        if reward:
            _check_rewards(reward, media, prompts, count, frames)
            return
        if media or prompts or count or frames:
            raise ValueError(
                "--media, --prompts, --count and --frames are for a reward; give --reward NAME too"
            )
        from flowrl.policy import load_policy
        from flowrl.runtime import log

        log.setup()
        policy: Any = load_policy(
            model, **call_arguments(pipeline)
        )  # of a name or folder: a pipeline's
        typer.echo(policy.describe())
        typer.echo(str(policy.self_check()))


def _check_rewards(
    words: list[str],
    media: list[Path] | None,
    prompts: Path | None,
    count: int | None,
    frames: int | None,
) -> None:
    from flowrl.rewards import load_set, parse_words
    from flowrl.rewards.checks import check as canaries
    from flowrl.rewards.checks import examples

    if media and frames:
        raise ValueError(
            f"--frames {frames} is of videos that are drawn, and --media names images; leave one of"
            " them out"
        )
    found = []
    for label, reward in load_set(parse_words(words)).rewards.items():
        own = examples.files(reward, media, prompts=prompts, most=count or 16) if media else None
        shown = own or examples.fits(reward, count=count, frames=frames)
        findings = canaries.check(reward, shown)
        typer.echo(
            f"{label}: {reward.scale}\nneeds:"
            f" {', '.join(sorted(reward.needs | reward.reads)) or 'nothing'}"
        )
        console().print(canaries.table(findings))
        found += findings
    if canaries.failed(found):
        raise typer.Exit(1)
