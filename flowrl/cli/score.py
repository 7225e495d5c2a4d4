"""`flowrl score`: rewards of image files, and the best of each prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli.common import app, console, one_sentence_errors


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
    from flowrl.data import scored_folder
    from flowrl.report import terminal
    from flowrl.rewards import load_set, parse_words
    from flowrl.rewards.core import files
    from flowrl.runtime import log

    log.setup()
    with one_sentence_errors():
        top = scored_folder.parse_keep(keep_top) if keep_top is not None else None
        rewards = load_set(parse_words(reward))
        samples = files.with_meta(
            scored_folder.collect(media, prompt=prompt, prompts=prompts), rewards
        )
        if output is not None:
            scored_folder.check_target(output, samples)
        scored, problems = files.score_files(samples, rewards, chunk=chunk)
        kept = scored if top is None else scored_folder.keep_top(scored, top)
        written = ""
        if output is not None and kept:  # before the table, whose reader may leave
            try:
                written = (
                    f"{len(kept)} of {len(samples)} images:"
                    f" {scored_folder.write(output, kept, rewards.weights)}"
                )
            except OSError as error:
                problems.append(f"-o {output} could not be written: {error}")
        console().print(terminal.score_table(kept, rewards.weights))
        if written:
            console().print(written, soft_wrap=True)
    for problem in problems:
        typer.secho(f"flowrl: {problem}", fg="red", err=True)
    if problems:
        raise typer.Exit(1)


def meta_for(rewards: Any, prompts: list[str]) -> list[dict[str, Any]] | None:
    """What the shapes reward, if it is among them, reads about prompts of its world."""
    if rewards is None or not any(reward.name == "shapes" for reward in rewards.rewards.values()):
        return None
    from flowrl.shapes.prompts import find

    return [find(prompt) for prompt in prompts]
