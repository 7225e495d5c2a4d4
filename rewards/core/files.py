"""Files are read, put together in batches and scored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.data import conditions
from flowrl.data.media import read_media
from flowrl.data.samples import Sample
from flowrl.data.scored_folder import ScoredSample
from flowrl.rewards import RewardBug, RewardSet, RewardUnavailable, check_needs, score
from flowrl.rewards.core.score import check_kind, check_meta
from flowrl.runtime.log import Progress

WAITING = 4  # most chunks of images, of all sizes, that wait until one size fills a chunk
HELD = 2**28  # most fp32 values that wait, however few images they are: 1 GB


def score_files(
    samples: Sequence[Sample],
    rewards: RewardSet,
    *,
    chunk: int = 16,
    frames: int = 16,
    progress: bool = False,
) -> tuple[list[ScoredSample], list[str]]:
    """Score files -> scores in the order of `samples`, and a sentence for each file that is left
    out or lacks the score of a reward of weight 0.

    Images of equal size are scored `chunk` at a time; at most WAITING x chunk are in memory,
    whatever the number of files. At most `frames` frames of a video or an animated picture are
    read. progress: show a bar. When a reward breaks down after the first scores, each remaining
    file gets its sentence, and the scores are kept: they may have been paid for.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scored: dict[int, ScoredSample] = {}
    problems: dict[int, str] = {}
    bar = Progress(len(samples), title="score", show=progress)
    try:
        with bar:
            for rows, media in _chunks(samples, rewards, chunk, frames, problems):
                some = {i: samples[i] for i in rows}
                _score_chunk(some, media.to(device), rewards, scored, problems)
                bar.update(len(scored.keys() | problems.keys()))
    # Scores that a judge was paid for are kept; if there are none, the error is raised.
    except (RewardBug, RewardUnavailable) as error:
        if not scored:
            raise
        rest = [i for i in range(len(samples)) if i not in scored and i not in problems]
        problems |= {i: f"left out: {samples[i].path} was not scored: {error}" for i in rest}
    return [scored[i] for i in sorted(scored)], [problems[i] for i in sorted(problems)]


def _score_chunk(
    samples: Mapping[int, Sample],
    media: Tensor,
    rewards: RewardSet,
    scored: dict[int, ScoredSample],
    problems: dict[int, str],
) -> None:
    """Score samples by number, whose images are media (n, 3, H, W), into `scored` or `problems`."""
    context = conditions.context_of([sample.meta for sample in samples.values()], media)
    found = score(media, [sample.prompt for sample in samples.values()], rewards, context)
    raw = {label: values.tolist() for label, values in found.raw.items()}
    totals, why = found.total.tolist(), "; ".join(found.errors)
    for place, (i, sample) in enumerate(samples.items()):
        if not math.isfinite(totals[place]):
            problems[i] = f"left out: {sample.path} could not be scored: {why}"
            continue
        # an absent score is kept as one that is missing, and is no problem of the file
        scores = {label: values[place] for label, values in raw.items()}
        scored[i] = ScoredSample(sample=sample, scores=scores, total=totals[place])
        absent = [label for label, asked in found.asked.items() if not asked[place]]
        lacking = [k for k, v in scores.items() if not math.isfinite(v) and k not in absent]
        if lacking:
            problems[i] = f"{sample.path} has no score of {', '.join(lacking)}: {why}"


def _chunks(
    samples: Sequence[Sample],
    rewards: RewardSet,
    most: int,
    frames: int,
    problems: dict[int, str],
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield (rows of samples, their media (n, 3, H, W) or (n, F, 3, H, W)), n <= most, of one size.

    A file that cannot be read, or is of a kind that a reward does not take, enters `problems`
    instead.
    """
    waiting: dict[torch.Size, dict[int, Tensor]] = {}
    for i, sample in enumerate(samples):
        try:
            picture = read_media(sample.path, frames=frames)
        except ValueError as error:
            problems[i] = f"left out: {error}"
            continue
        try:
            check_kind(rewards.rewards, picture[None], [sample.prompt])
        except ValueError as error:
            problems[i] = f"left out: {sample.path}: {error}"
            continue
        # Images wait for others of their size, because a reward takes one tensor.
        waiting.setdefault(picture.shape, {})[i] = picture
        full = len(waiting[picture.shape]) == most
        held = sum(size.numel() * len(pictures) for size, pictures in waiting.items())
        if full or held >= HELD or sum(map(len, waiting.values())) == WAITING * most:
            longest = max(waiting, key=lambda size: len(waiting[size]))
            yield _batch(waiting.pop(longest))
    yield from map(_batch, waiting.values())


def _batch(pictures: dict[int, Tensor]) -> tuple[list[int], Tensor]:
    return list(pictures), torch.stack(list(pictures.values()))


def with_meta(
    samples: Sequence[Sample], rewards: RewardSet, *, columns: Sequence[str] = ("meta",)
) -> list[Sample]:
    """Samples with the meta that the rewards read, which is known for prompts of the shapes world.

    columns: columns of the context that the caller will offer; "source" joins them where each
    sample names its picture "image". Missing or wrong meta -> ValueError.
    """
    samples = list(samples)
    shown = conditions.has_source([sample.meta for sample in samples])
    check_needs(rewards, [*columns, *["source"] * shown])
    if any(reward.name == "shapes" for reward in rewards.rewards.values()):
        samples = _with_clauses(samples)
    check_meta(rewards, {"the list of images": [{"prompt": s.prompt, **s.meta} for s in samples]})
    return samples


def _with_clauses(samples: list[Sample]) -> list[Sample]:
    """Samples whose meta holds the clauses of prompts of the shapes world."""
    from flowrl.shapes.prompts import find

    texts = dict.fromkeys(s.prompt for s in samples if "include" not in s.meta)
    found = {text: find(text) for text in texts}
    known = {
        text: {key: value for key, value in prompt.items() if key != "prompt"}
        for text, prompt in found.items()
    }
    return [
        s if "include" in s.meta else replace(s, meta=known[s.prompt] | s.meta) for s in samples
    ]
