"""Old samples trained again beside new ones, for methods that read finished samples only.

The samples of replay.size iterations are kept. Some of their groups are drawn and trained whole,
each time with fresh noise and noise levels. The weight that a method gives a row is multiplied by
replay.taper**k if its sample is k iterations old, and an update is the weighted mean over all rows.

Advantages are those of the iteration that drew the samples: they compare with what the policy did
then, and statistics over an iteration (algorithm.std=global) cannot be made again from a part of
it. Groups without a signal are not kept.

Every process keeps the groups of all, on the CPU, and trains its part of those drawn. So a draw is
a function of the seed, the iteration and what was kept, and neither it nor a checkpoint depends on
how many processes there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.config.training import ReplayConfig
from flowrl.data.prompts import Prompts
from flowrl.runtime.processes.world import World
from flowrl.samplers import keys
from flowrl.types import PromptBatch, Rollout

# columns of an iteration's samples, in the order of prompts; see ReplayBuffer.keep
Leaves = dict[str, Tensor]


class ReplayBuffer:
    """The samples of the latest iterations, from all processes."""

    def __init__(self, config: ReplayConfig, prompts: Prompts, seed: int) -> None:
        self.config, self.prompts, self.seed = config, prompts, seed
        self.kept: dict[int, Leaves] = {}  # iteration, from 0 -> its samples

    def keep(
        self, iteration: int, batch: PromptBatch, rollout: Rollout, leaf: Tensor, world: World
    ) -> None:
        """Keep the groups of an iteration that have a signal; leaf (B,): their advantages.

        x0 (n, *L) fp32; advantage (n,) fp32; name (n,) int64, the leaf's key; id (n,), the place of
        its prompt; text (n,), a hash of it.
        """
        signal = torch.unique(rollout.group[leaf.nan_to_num(0.0) != 0])
        rows = torch.nonzero(torch.isin(rollout.group, signal)).flatten()
        ids = batch.ids.to(leaf.device)
        texts = torch.tensor([keys.digest(text) for text in batch.text]).to(ids)
        mine = {
            "x0": rollout.at(rollout.leaf[rows]),
            "advantage": leaf[rows],
            "name": rollout.leaf_key[rows],
            "id": ids[rollout.group[rows]],
            "text": texts[rollout.group[rows]],
        }
        found = {name: world.gather(value).cpu() for name, value in mine.items()}
        # a group lies within one process, and a stable sort keeps its order
        order = found["id"].argsort(stable=True)
        self.kept[iteration] = {name: value[order] for name, value in found.items()}

    def most(self, prompts: int) -> int:
        """How many old groups are trained at most, beside those of so many new prompts."""
        return max(1, round(self.config.share * prompts))

    def drawn(self, iteration: int, most: int) -> list[tuple[int, int]]:
        """(iteration, place of the prompt) of the groups that an iteration trains again: at most
        `most`, each group being as likely as another, whatever its weight."""
        first = iteration - self.config.size
        self.kept = {i: leaves for i, leaves in self.kept.items() if i >= first}
        groups = [
            (i, place)
            for i in sorted(self.kept)
            if i < iteration and self.taper(iteration - i) > 0
            for place in self.kept[i]["id"].unique().tolist()
        ]
        if not groups:
            return []
        when, where = torch.tensor(groups).unbind(1)
        order = keys.key(self.seed, "replay", iteration, when, where).argsort(stable=True)
        return [groups[k] for k in order[:most].tolist()]

    def taper(self, age: int) -> float:
        """Factor of the weight of samples that are `age` iterations old."""
        return self.config.taper**age

    def leaves(self, group: tuple[int, int]) -> Leaves:
        """The samples of a group."""
        found = self.kept[group[0]]
        rows = found["id"] == group[1]
        return {name: value[rows] for name, value in found.items()}

    def state(self, iterations: int) -> dict[str, Tensor]:
        """Tensors of a checkpoint after this many iterations: the groups that later iterations may
        draw, without those of an unfinished iteration."""
        return {
            f"{i}/{name}": value
            for i, leaves in self.kept.items()
            if iterations - self.config.size <= i < iterations
            for name, value in leaves.items()
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Inverse of `state`. Groups whose prompt is not in its place any more are forgotten."""
        texts = torch.tensor([keys.digest(prompt["prompt"]) for prompt in self.prompts])
        kept: dict[int, Leaves] = {}
        for full, value in state.items():
            iteration, _, name = full.partition("/")
            kept.setdefault(int(iteration), {})[name] = value
        for i, leaves in kept.items():
            place = leaves["id"].clamp(max=len(texts) - 1)
            rows = (place == leaves["id"]) & (texts[place] == leaves["text"])
            self.kept[i] = {name: value[rows] for name, value in leaves.items()}
