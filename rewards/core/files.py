"""Scoring files: read, batched, scored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flowrl.data.media import read_image
from flowrl.data.scored_folder import Sample, Scored
from flowrl.rewards import RewardBug, RewardSet, RewardUnavailable, check_needs, score
from flowrl.rewards.core.score import check_meta
from flowrl.types import MediaContext, replace

WAITING = 4  # chunks of images, of all sizes, that are held until some size has a whole one


def score_files(
    samples: Sequence[Sample], rewards: RewardSet, *, chunk: int = 16
) -> tuple[list[Scored], list[str]]:
    """Scores in the order of `samples`, and a sentence for each file that is left out, or lacks the
    score of a reward of weight 0.

    Images of equal size are scored `chunk` at a time; at most WAITING x chunk are in memory,
    whatever the number of files. When a reward breaks down after the first scores, the files that
    are left have its sentence: scores may have been paid for.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scored: dict[int, Scored] = {}
    problems: dict[int, str] = {}
    try:
        for rows, media in _chunks(samples, chunk, problems):
            context = MediaContext(meta=[samples[i].meta for i in rows])
            found = score(media.to(device), [samples[i].prompt for i in rows], rewards, context)
            raw, why = (
                {label: value.tolist() for label, value in found.raw.items()},
                "; ".join(found.errors),
            )
            for place, (i, total) in enumerate(zip(rows, found.total.tolist(), strict=True)):
                if not math.isfinite(total):
                    problems[i] = f"left out: {samples[i].path} could not be scored: {why}"
                    continue
                scored[i] = Scored(
                    sample=samples[i],
                    scores={label: value[place] for label, value in raw.items()},
                    total=total,
                )
                if lacking := [
                    label for label, value in scored[i].scores.items() if not math.isfinite(value)
                ]:
                    problems[i] = f"{samples[i].path} has no score of {', '.join(lacking)}: {why}"
    except (RewardBug, RewardUnavailable) as error:
        if not scored:
            raise
        rest = [i for i in range(len(samples)) if i not in scored and i not in problems]
        problems |= {i: f"left out: {samples[i].path} was not scored: {error}" for i in rest}
    return [scored[i] for i in sorted(scored)], [problems[i] for i in sorted(problems)]


def _chunks(
    samples: Sequence[Sample], most: int, problems: dict[int, str]
) -> Iterator[tuple[list[int], Tensor]]:
    """(rows of samples, their images (n, 3, H, W)), n <= most, of one size; a file that cannot be
    read enters `problems` instead."""
    waiting: dict[torch.Size, dict[int, Tensor]] = {}
    for i, sample in enumerate(samples):
        try:
            picture = read_image(sample.path)
        except ValueError as error:
            problems[i] = f"left out: {error}"
            continue
        waiting.setdefault(picture.shape, {})[i] = picture
        full = len(waiting[picture.shape]) == most
        if full or sum(map(len, waiting.values())) == WAITING * most:
            longest = max(waiting, key=lambda size: len(waiting[size]))
            yield _batch(waiting.pop(longest))
    yield from map(_batch, waiting.values())


def _batch(pictures: dict[int, Tensor]) -> tuple[list[int], Tensor]:
    return list(pictures), torch.stack(list(pictures.values()))


def with_meta(
    samples: Sequence[Sample], rewards: RewardSet, *, columns: Sequence[str] = ("meta",)
) -> list[Sample]:
    """Samples that carry what the rewards read; of prompts of the shapes world it is known. Missing
    or wrong -> ValueError.

    columns: of the context, that the caller will offer.
    """
    check_needs(rewards, columns)
    samples = list(samples)
    if any(reward.name == "shapes" for reward in rewards.rewards.values()):
        from flowrl.shapes.prompts import find

        world = {
            text: find(text)
            for text in dict.fromkeys(s.prompt for s in samples if "include" not in s.meta)
        }
        known = {
            text: {key: value for key, value in prompt.items() if key != "prompt"}
            for text, prompt in world.items()
        }
        samples = [
            s if "include" in s.meta else replace(s, meta=known[s.prompt] | s.meta) for s in samples
        ]
    check_meta(rewards, {"the list of images": [{"prompt": s.prompt, **s.meta} for s in samples]})
    return samples
