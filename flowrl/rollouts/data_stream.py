"""A stream of media with their prompts beside an iteration's samples (anchor.data).

What an iteration sees is a function of the seed and the iteration, so that a resumed run goes on in
the same place. Each prompt of the iteration brings as many media as every other, to the process
that samples it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.data.prompts import select
from flowrl.data.scored_dataset import Dataset
from flowrl.rollouts import from_files
from flowrl.rollouts.records import Source
from flowrl.samplers import keys
from flowrl.types import Plan, Rollout


def encoded(dataset: Dataset, source: Source, ids: Tensor, plan: Plan) -> Rollout:
    """Encode the media at `ids` (n,) with their prompts."""
    batch, items = select(dataset.prompts, ids), [dataset.items[i] for i in ids.tolist()]
    with source.ledger.phase("rollout"), source.autocast():
        return from_files.rollout(
            source.policy,
            batch,
            items,
            plan,
            weights={},
            crop=source.cfg.data.crop,
            cache=source.latents,
        )[0]


def draw_media(
    dataset: Dataset,
    source: Source,
    iteration: int,
    each: int,
    plan: Plan,
    encode: Callable[[Dataset, Source, Tensor, Plan], Rollout] = encoded,
) -> Rollout:
    """Draw this process's media of an iteration: `each` for every prompt that it samples, in their
    order -> the media at sigma 0, each with a row of cond. One that comes twice is noised anew."""
    prompts = source.cfg.batch.prompts
    place = torch.arange(prompts * each).view(prompts, each)[source.world.share(prompts)].flatten()
    order = places(
        len(dataset.items), iteration=iteration, size=prompts * each, seed=source.cfg.seed
    )
    made = encode(dataset, source, order[place], plan)
    names = keys.key("anchor", made.leaf_key, place.to(made.leaf_key.device))
    return replace(made, leaf_key=names)


def places(count: int, *, iteration: int, size: int, seed: int) -> Tensor:
    """Choose the `size` of `count` items that an iteration sees -> (size,) int64 places.

    Epochs, each shuffled by (seed, epoch), follow one another without a remainder; an iteration may
    see the end of one and the beginning of the next.
    """
    first = iteration * size
    epochs = range(first // count, (first + size - 1) // count + 1)
    orders = [keys.permutation(torch.tensor(keys.key(seed, "anchor", e)), count) for e in epochs]
    return torch.cat(orders)[first - epochs[0] * count :][:size]
