"""`flowrl score`: rewards of image files, and the best of each prompt."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from flowrl.cli.common import (
    REWARD,
    Columns,
    Json,
    as_json,
    complain,
    next_steps,
    one_sentence_errors,
    parse_columns,
    parse_rewards,
    show,
)
from flowrl.runtime.excerpt import part

Media = Annotated[list[Path], typer.Argument(help="Files of images or videos, or folders of them.")]
Rewards = Annotated[
    list[str],
    typer.Option(metavar=REWARD, help="A reward and its settings; once for each."),
]
Prompt = Annotated[str | None, typer.Option(help="The prompt of all images.")]
Prompts = Annotated[
    Path | None,
    typer.Option(help="A list of files and prompts (.jsonl, .csv ...); default: the folder's own."),
]
KeepTop = Annotated[
    str | None,
    typer.Option(help="Of each prompt, keep the best by total: a share such as 20%, or a count."),
]
Chunk = Annotated[int, typer.Option(min=1, help="Most images scored at once.")]
Frames = Annotated[
    int | None,
    typer.Option(
        min=1, help="Most frames of a video or animated picture, evenly spaced (default: 16)."
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show what libraries say while they load models.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="A folder for scores.jsonl and copies of the images, or a .jsonl, .csv or .parquet"
        " list.",
    ),
]


def score(
    media: Media,
    reward: Rewards,
    prompt: Prompt = None,
    prompts: Prompts = None,
    columns: Columns = None,
    keep_top: KeepTop = None,
    chunk: Chunk = 16,
    frames: Frames = None,
    verbose: Verbose = False,
    output: Output = None,
    json: Json = None,
) -> None:
    """Score images or videos by rewards. With --output, also write the folder that `flowrl train`
    learns from offline."""
    from flowrl.runtime import log

    log.setup()
    with one_sentence_errors(), _calm(verbose):
        # everything the user gave is checked before anything is scored; words need no torch
        parse_keep = part("flowrl.data.scored_folder", "parse_keep")
        top = parse_keep(keep_top) if keep_top is not None else None
        entries, named = parse_rewards(reward), parse_columns(columns)

        from flowrl.data import scored_folder
        from flowrl.data.media import MEDIA_SUFFIXES, has_frames
        from flowrl.data.samples import collect
        from flowrl.report import terminal
        from flowrl.rewards import load_set
        from flowrl.rewards.core import files

        if not verbose:
            log.hush()
        rewards = load_set(entries)
        chosen: Any = {"prompts": prompts, "columns": named}
        found = collect(media, prompt=prompt, **chosen, suffixes=MEDIA_SUFFIXES)
        samples = files.with_meta(found, rewards)
        if frames and not any(has_frames(path) for path in {s.path for s in samples}):
            complain(f"--frames {frames} has no effect: none of the files holds several frames")
        if output is not None:
            scored_folder.check_target(output, samples)
        scored, problems = files.score_files(
            samples, rewards, chunk=chunk, frames=frames or 16, progress=True
        )
        kept = scored if top is None else scored_folder.keep_top(scored, top)
        weights = rewards.weights
        # written before the table is printed: the reader of a pipe may leave and end the command
        place = _write(output, kept, weights, problems) if output and kept else None
        with one_sentence_errors(disk=1):
            lines = [scored_folder.entry(item, str(item.sample.path), weights) for item in kept]
            printed = as_json(lines, json)
            if not printed:
                show(terminal.score_table(kept, weights))
            if place is not None and not printed:
                show(f"{len(kept)} of {len(samples)} images: {place}", wrap=True)
    for problem in problems:
        complain(problem)
    if problems:
        raise typer.Exit(1)
    _say_next(output if place else None, next(iter(weights)))


def _say_next(written: Path | None, label: str) -> None:
    """Say how to train on the written list, or how to write one. label: label of a reward."""
    if written is None:
        next_steps("the same with --keep-top 20% -o best keeps the best of each prompt")
        return
    offline = f"algorithm=raft data.offline={quote(str(written))}"
    next_steps(f"flowrl train model=MODEL {offline} reward={label} data.eval=null")


@contextmanager
def _calm(verbose: bool) -> Iterator[None]:
    """Inside, libraries neither warn nor log below errors, unless they should."""
    if verbose:
        yield
        return
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            root.setLevel(level)


def _write(
    output: Path, kept: Sequence[Any], weights: Mapping[str, float], problems: list[str]
) -> Path | None:
    """Write the list and return its path; where that fails, add a problem and return None."""
    from flowrl.data import scored_folder

    try:
        return scored_folder.write(output, kept, weights)
    except OSError as error:
        problems.append(str(error))
        return None
