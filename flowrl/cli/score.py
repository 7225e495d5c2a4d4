"""`flowrl score`: rewards of image files, and the best of each prompt."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli.common import Columns, complain, one_sentence_errors, parse_columns, show

Media = Annotated[list[Path], typer.Argument(help="Files of images or videos, or folders of them.")]
Rewards = Annotated[
    list[str], typer.Option(help="NAME, NAME=WEIGHT or NAME.SETTING=VALUE; once for each.")
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
) -> None:
    """Score images, and make the folder that `flowrl train` learns from offline."""
    from flowrl.data import scored_folder
    from flowrl.data.media import MEDIA_SUFFIXES, has_frames
    from flowrl.data.samples import collect
    from flowrl.report import terminal
    from flowrl.rewards import load_set, parse_words
    from flowrl.rewards.core import files
    from flowrl.runtime import log

    log.setup(libraries=verbose)
    with one_sentence_errors(), _calm(verbose):
        # everything the user gave is checked before anything is scored
        top = scored_folder.parse_keep(keep_top) if keep_top is not None else None
        rewards = load_set(parse_words(reward))
        chosen: Any = {"prompts": prompts, "columns": parse_columns(columns)}
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
        # written before the table is printed: the reader of a pipe may leave and end the command
        place = _write(output, kept, rewards.weights, problems) if output and kept else None
        with one_sentence_errors(disk=1):
            show(terminal.score_table(kept, rewards.weights))
            if place is not None:
                show(f"{len(kept)} of {len(samples)} images: {place}", wrap=True)
    for problem in problems:
        complain(problem)
    if problems:
        raise typer.Exit(1)


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
