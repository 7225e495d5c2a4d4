"""Which samples an iteration trains: those it drew, or a part of them, and old ones beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.data.prompts import select
from flowrl.rollouts.join import join, of_leaves, take
from flowrl.rollouts.records import Drawn, Source
from flowrl.rollouts.redraw import chosen
from flowrl.types import Columns, Rollout, expand


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """The samples that an iteration trains on this process: new ones, and old ones after them."""

    rollout: Rollout  # B samples in P groups
    leaf: Tensor  # (B,) fp32, the advantage of each sample; NaN: it could not be scored
    turns: Tensor  # (P,) int64, which of the iteration's updates trains the rows of a prompt
    tapers: Tensor  # (P,) fp32, factor of the weight of these rows: 1 for new samples
    metrics: dict[str, float]  # replay/*, the same on all processes; {} without replay.size
    prompts: int  # number of prompts whose samples are new, at the beginning
    kl_gate: Tensor | None = None  # (B,) fp32 factor of each sample's KL; None: 1 for all

    @property
    def fresh(self) -> Tensor:
        """(B,) bool: new samples that could be scored."""
        return ~self.leaf.isnan() & (self.rollout.group < self.prompts)

    def weighed(self, rows: Columns) -> Columns:
        """The rows of the method with their weights times the taper of their prompt."""
        taper = expand(self.tapers[rows.prompt], rows.weight)
        return Columns({**rows.data, "weight": rows.weight * taper})


def what_to_train(
    source: Source, iteration: int, drawn: Drawn, leaf: Tensor, kl_gate: Tensor | None = None
) -> TrainingBatch:
    """Choose what an iteration trains of samples with advantages `leaf` and `kl_gate` (B,): all
    that were drawn, or with draw.mode=balance a part of them; and with replay.size old groups
    beside them."""
    cfg, rollout, size = source.cfg, drawn.rollout, len(drawn.batch)
    if drawn.threshold is not None:  # chosen only now, because all draws entered the baselines
        rows = chosen(drawn, cfg.batch.group).to(leaf.device)
        rollout, leaf = take(rollout, rows), leaf[rows]
        kl_gate = None if kl_gate is None else kl_gate[rows]
    new = TrainingBatch(
        rollout=rollout,
        leaf=leaf,
        turns=torch.arange(size, device=leaf.device) * cfg.batch.updates // size,
        tapers=torch.ones(size, device=leaf.device),
        metrics={},
        prompts=size,
        kl_gate=kl_gate,
    )
    if source.buffer is None:
        return new
    groups = source.buffer.drawn(iteration, source.buffer.most(cfg.batch.prompts))
    out = with_old(source, iteration, drawn, new, groups)
    source.buffer.keep(iteration, drawn.batch, rollout, leaf, source.world)
    return out


def with_old(
    source: Source, iteration: int, drawn: Drawn, new: TrainingBatch, groups: list[tuple[int, int]]
) -> TrainingBatch:
    """The new samples, and after them this process's share of old groups.

    groups: (iteration, place of the prompt) of the old groups of all processes.
    """
    world, buffer, like = source.world, source.buffer, new.leaf
    assert buffer is not None
    ages = [iteration - i for i, _ in groups]
    metrics = {
        "replay/groups": float(len(groups)),
        "replay/age": sum(ages) / len(ages) if ages else 0.0,
    }
    if not (mine := range(len(groups))[world.rank :: world.size]):
        return replace(new, metrics=metrics)
    # Prompts are encoded again, new and old together: a rollout has one conditioning.
    old = [buffer.leaves(groups[k]) for k in mine]
    batch = select(
        source.prompts, torch.cat([drawn.batch.ids, torch.tensor([groups[k][1] for k in mine])])
    )
    cond = source.encode(batch)
    # Old samples become a rollout of their final states, which is all that their methods read.
    number = torch.arange(len(old)).repeat_interleave(
        torch.tensor([len(leaves["id"]) for leaves in old])
    )
    x0, advantage, name = (
        torch.cat([leaves[what] for leaves in old]).to(like.device)
        for what in ("x0", "advantage", "name")
    )
    rollout = of_leaves(x0, name, number.to(like.device), new.rollout.plan, cond)
    places = torch.arange(len(batch)).split([len(drawn.batch), len(old)])
    joined = join([new.rollout, rollout], list(places))
    # Updates are dealt by place among all old groups, so that they do not depend on the processes.
    turns = [k * source.cfg.batch.updates // len(groups) for k in mine]
    tapers = [buffer.taper(ages[k]) for k in mine]
    return TrainingBatch(
        rollout=replace(joined, cond=cond),
        leaf=torch.cat([new.leaf, advantage]),
        turns=torch.cat([new.turns, torch.tensor(turns).to(new.turns)]),
        tapers=torch.cat([new.tapers, torch.tensor(tapers).to(new.tapers)]),
        metrics=metrics,
        prompts=new.prompts,
    )
