"""Sampling again, in rounds, until groups can teach something.

draw.mode=refill is DAPO's dynamic sampling (arXiv:2503.14476): prompts whose rewards do not differ
are joined by fresh ones. balance is Reinforce-Ada (arXiv:2510.04996): a prompt is sampled again
until half a group is good and half is not; its baseline comes from all draws. Which prompts are
drawn again is agreed by all processes.

Departures: balance's reference knows right and wrong answers; here a sample is good when its reward
exceeds draw.positive, or the median of the iteration's first round, and advantages are divided by
the spread that algorithm.std names (there, by none). All samples, of flat groups too, count in the
logged rewards. Over several processes, refill adds a multiple of their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.data import prompts
from flowrl.rewards import RewardUnavailable
from flowrl.rewards import concat as concat_rewards
from flowrl.rewards.core.domains import domains_of
from flowrl.rollouts.join import join
from flowrl.rollouts.records import Drawn, Source
from flowrl.samplers import keys
from flowrl.types import PromptBatch, Rollout

Sample = Callable[..., Drawn]  # function (ids, round_=0) -> one group of samples of each prompt


def refill(
    source: Source, sample: Sample, iteration: int, batch: PromptBatch, first: Drawn
) -> Drawn:
    """Add a fresh prompt for each flat group of the round before, in up to draw.rounds more rounds.

    first: the first round. batch: the prompts of all processes.
    """
    cfg, world, drawn = source.cfg, source.world, [first]
    order = keys.permutation(keys.key(cfg.seed, "refill", iteration), len(source.prompts))
    fresh = order[~torch.isin(order, batch.ids)]
    for _ in range(cfg.draw.rounds):
        flat = int(total(source, (~spread_out(drawn[-1], cfg.draw.spread)).sum()))
        # every process samples the same number
        flat = min(flat, len(fresh)) // world.size * world.size
        if not flat:
            break
        picked, fresh = fresh[:flat], fresh[flat:]
        with world.all_or_none(RewardUnavailable):
            drawn.append(sample(picked[world.share(flat)]))
    return beside(source, drawn)


def balance(source: Source, sample: Sample, first: Drawn) -> Drawn:
    """Sample prompts again until half of their samples are good, in draw.rounds more rounds at
    most."""
    cfg, world, threshold = source.cfg, source.world, thresholds(source, first)
    drawn, rows = [first], [torch.arange(len(first.batch))]
    half = cfg.batch.group // 2
    good, bad = counts(first, threshold)
    for r in range(1, cfg.draw.rounds + 1):
        unbalanced = (good < half) | (bad < cfg.batch.group - half)
        again = torch.nonzero(unbalanced).flatten().cpu()
        if not total(source, torch.tensor(len(again))):
            break
        with world.all_or_none(RewardUnavailable):
            if len(again):
                drawn.append(sample(first.batch.ids[again], round_=r))
        if len(again):
            rows.append(again)
            for count, more in zip((good, bad), counts(drawn[-1], threshold[again]), strict=True):
                count[again.to(count.device)] += more
    return replace(within(drawn, rows), threshold=threshold)


def thresholds(source: Source, first: Drawn) -> Tensor:
    """The reward (P,) fp32 that a good sample of each prompt exceeds: draw.positive, or the median
    of its domain in the first round of all processes."""
    cfg, world, found = source.cfg, source.world, first.rewards
    names = domains_of(source.rewards, first.batch.meta) or [""] * len(first.batch)
    if cfg.draw.positive is not None:
        return torch.full((len(names),), cfg.draw.positive)
    totals = world.gather(found.total)
    if found.domain is None:
        return torch.full((len(names),), middle(totals))
    whose = [name for part in world.collect(found.domain) for name in part]
    of = {
        domain: middle(totals[torch.tensor([name == domain for name in whose])])
        for domain in {*whose}
    }
    return torch.tensor([of[name] for name in names])


def total(source: Source, count: Tensor) -> float:
    """The sum of a number over all processes."""
    return float(source.world.sum(count.to(source.policy.device, torch.float32)))


def beside(source: Source, drawn: list[Drawn]) -> Drawn:
    """Join draws of different prompts to one."""
    if len(drawn) == 1:
        return drawn[0]
    batch = prompts.select(source.prompts, torch.cat([d.batch.ids for d in drawn]))
    rows = list(torch.arange(len(batch)).split([len(d.batch) for d in drawn]))
    whole = within(drawn, rows)
    rollout = replace(whole.rollout, cond=source.encode(batch))
    return replace(whole, batch=batch, rollout=rollout)


def within(drawn: list[Drawn], rows: list[Tensor]) -> Drawn:
    """Join draws to one with the prompts of the first; rows[i]: the places of draw i's prompts
    among these."""
    if len(drawn) == 1:
        return drawn[0]
    first = drawn[0]
    rollout = replace(join([d.rollout for d in drawn], rows), cond=first.rollout.cond)
    return replace(first, rollout=rollout, rewards=concat_rewards([d.rewards for d in drawn]))


def joined(source: Source, made: list[tuple[PromptBatch, Rollout]], batch: PromptBatch) -> Rollout:
    """Join the rollouts of parts of a batch to one of the whole batch."""
    places = torch.arange(len(batch)).split([len(part) for part, _ in made])
    whole = join([rollout for _, rollout in made], list(places))
    return replace(whole, cond=source.encode(batch))


def spread_out(drawn: Drawn, least: float) -> Tensor:
    """(P,) bool: groups whose valid rewards have a standard deviation above `least`."""
    out = []
    for g in range(len(drawn.batch)):
        r = drawn.rewards.total[drawn.rollout.group == g].double()
        r = r[~r.isnan()]
        out.append(len(r) > 1 and float(r.std(correction=0)) > least)
    return torch.tensor(out)


def middle(rewards: Tensor) -> float:
    """Median of the valid rewards (B,); where none lies above it, the highest below it, so that 0/1
    rewards that are mostly 1 are split at 0."""
    r = rewards[~rewards.isnan()]
    if not len(r):
        return 0.0
    below = r[r < r.median()]
    return float(below.max() if len(below) and not bool((r > r.median()).any()) else r.median())


def counts(drawn: Drawn, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Count each prompt's valid samples above its threshold (P,), and at or below it -> (P,),
    (P,)."""
    group, rewards = drawn.rollout.group, drawn.rewards.total
    threshold = thresholds.to(group.device)[group]
    zeros = torch.zeros(len(drawn.batch), dtype=torch.int64, device=group.device)
    good, bad = rewards > threshold, rewards <= threshold  # both are False for NaN
    return zeros.index_add(0, group, good.long()), zeros.index_add(0, group, bad.long())


def chosen(drawn: Drawn, group_size: int) -> Tensor:
    """Choose the leaves that balance trains -> rows: `group_size` of each prompt, half of them
    good.

    The first ones are taken, in order. Where one half has too few, the other fills up, as in
    Reinforce-Ada's fallback.
    """
    assert drawn.threshold is not None
    everything = torch.arange(len(drawn.rollout.leaf))
    group, rewards = drawn.rollout.group.cpu(), drawn.rewards.total.cpu()
    kept: list[int] = []
    for g in range(len(drawn.batch)):
        good = everything[(group == g) & (rewards > drawn.threshold[g])].tolist()
        bad = everything[(group == g) & (rewards <= drawn.threshold[g])].tolist()
        half = max(min(len(good), group_size // 2), group_size - len(bad))
        kept += sorted(good[:half] + bad[: max(group_size - half, 0)])[:group_size]
    return torch.tensor(kept, dtype=torch.int64)
