"""Prompts of several files, from which each iteration draws by weight (data.mixture)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flowrl.samplers import keys


class Mixture(list[dict[str, Any]]):
    """The prompts of all files, one file after the other; their places are their ids."""

    def __init__(self, parts: Mapping[str, Sequence[dict[str, Any]]], weights: Sequence[float]):
        """parts: name of a file -> its prompts. weights: those of the files, above 0."""
        super().__init__(prompt for rows in parts.values() for prompt in rows)
        self.sizes = {name: len(rows) for name, rows in parts.items()}
        ends = [*accumulate(weights)]
        self.ends = [end / ends[-1] for end in ends]  # where each file's share of 1 ends

    def drawn(self, iteration: int, size: int, seed: int) -> Tensor:
        """The places (size,) of an iteration's prompts, a function of the arguments alone.

        A file gives size times its share of the weights, rounded up or down by one offset of the
        iteration, so that the mean is exact (systematic sampling). Which of its prompts follows
        shuffled epochs, cut for the larger number. A file with too few prompts -> ValueError.
        """
        offset = float(keys.uniform(keys.key(seed, "mixture", iteration)))
        bounds = [0, *(math.floor(size * end + offset) for end in self.ends)]
        found, start, before = [], 0, 0.0
        for number, (name, count) in enumerate(self.sizes.items()):
            # fp64 rounds size x share, which may be a whole number
            most = math.ceil(size * (self.ends[number] - before) - 1e-9)
            if most > count:
                raise ValueError(
                    f"data.mixture: {name} has {count} prompts, and its weight asks for up to"
                    f" {most} of batch.prompts={size}; add prompts, or lower its weight"
                )
            own = seed if number == 0 else keys.key(seed, "file", number)
            places = epoch_part(count, iteration=iteration, size=most, seed=own)
            found.append(start + places[: bounds[number + 1] - bounds[number]])
            start, before = start + count, self.ends[number]
        whole = torch.cat(found)
        if len(found) == 1:
            return whole
        # files are mixed, because updates and processes each take a part of the batch
        return whole[keys.permutation(keys.key(seed, "mixed", iteration), size)]


def epoch_part(count: int, *, iteration: int, size: int, seed: int) -> Tensor:
    """The places (size,) of an iteration's prompts among `count`, in shuffled epochs cut into whole
    batches."""
    epoch, place = divmod(iteration, count // size)
    order = keys.permutation(torch.tensor(keys.key(seed, "prompts", epoch)), count)
    return order[place * size : (place + 1) * size]
