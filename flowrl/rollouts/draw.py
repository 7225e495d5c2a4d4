"""What one iteration trains on: sampled once, in rounds until groups can teach something, or read
from a scored folder.

draw.mode=refill is DAPO's dynamic sampling (arXiv:2503.14476): prompts whose rewards do not differ
are joined by fresh ones. balance is Reinforce-Ada (arXiv:2510.04996): a prompt is sampled again
until half a group is good and half is not; its baseline comes from all draws. Which prompts are
drawn again is agreed by all processes, and every sample is named by (prompt, copy), so results do
not depend on how prompts are dealt out.

Departures: balance's code knows right and wrong answers; here a sample is good when its reward
exceeds draw.positive, or the median of the iteration's first round, and advantages are divided by
the spread that algorithm.std names (by none in the code). All samples, of flat groups too, count in
the logged rewards. Over several processes, refill adds a multiple of their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowrl.data import prompts, scored_dataset
from flowrl.rewards import RewardSet, RewardUnavailable
from flowrl.rewards import concat as concat_rewards
from flowrl.rollouts import from_files
from flowrl.rollouts.join import join
from flowrl.rollouts.roll_out import SHOWN, roll_out
from flowrl.rollouts.scorer import Scorer, decode_into
from flowrl.samplers import keys
from flowrl.types import Plan, PromptBatch, Rewards, Rollout, replace

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The samples of an iteration on this process, and which of them are trained."""

    batch: PromptBatch
    rollout: Rollout
    rewards: Rewards
    shown: Tensor  # media of the first samples, SHOWN of them or more; empty for samples from files
    threshold: float | None = None  # balance: what a good sample's reward exceeds


class Collector:
    """Makes Collected; parts: what flowrl.training.build.build made."""

    def __init__(self, parts: Any) -> None:
        self.parts, self.cfg, self.world = parts, parts.cfg, parts.world

    def __call__(self, iteration: int, plan: Plan, rewards: RewardSet) -> Collected:
        cfg, parts = self.cfg, self.parts
        whole = prompts.batch(
            parts.prompts, iteration=iteration, size=cfg.batch.prompts, seed=cfg.seed
        )
        mine = whole.ids[self.world.share(len(whole))]
        if parts.dataset is not None:
            return self._from_files(iteration, plan, mine)
        first = self._agreed(partial(self._sample, iteration, plan, rewards, mine))
        if cfg.draw.mode == "refill":
            first = self._refilled(iteration, plan, rewards, whole, first)
        elif cfg.draw.mode == "balance":
            first = self._balanced(iteration, plan, rewards, first)
        if not parts.references:
            return first
        with parts.ledger.phase("reward"):
            rollout, scored = self._agreed(
                lambda: from_files.with_references(
                    parts.policy,
                    first.rollout,
                    first.batch,
                    first.rewards,
                    rewards,
                    decode=cfg.batch.decode,
                )
            )
        return replace(first, rollout=rollout, rewards=scored)

    def _from_files(self, iteration: int, plan: Plan, ids: Tensor) -> Collected:
        cfg, parts = self.cfg, self.parts
        batch = prompts.select(parts.prompts, ids)
        items = scored_dataset.gather(
            parts.dataset, batch, cfg.batch.group, seed=cfg.seed, iteration=iteration
        )
        with parts.ledger.phase("rollout"), parts.autocast():
            rollout, rewards = from_files.rollout(
                parts.policy,
                batch,
                items,
                plan,
                weights=parts.dataset.weights,
                decode=cfg.batch.decode,
            )
        return Collected(batch=batch, rollout=rollout, rewards=rewards, shown=torch.empty(0))

    def _sample(
        self, iteration: int, plan: Plan, rewards: RewardSet, ids: Tensor, round_: int = 0
    ) -> Collected:
        """One group of each prompt; round_ r numbers its copies from r groups on.

        With batch.overlap, a few prompts at a time: their rewards are computed while the next ones
        are sampled.
        """
        cfg, parts = self.cfg, self.parts
        made, shown = [], torch.empty(0)
        with Scorer(rewards, parts.ledger, overlap=bool(cfg.batch.overlap)) as scorer:
            for some in ids.split(cfg.batch.overlap or len(ids)):
                batch = prompts.select(parts.prompts, some)
                with (
                    parts.ledger.phase("rollout"),
                    parts.autocast(),
                    parts.policy.view(parts.algorithm.rollout_view),
                ):
                    rollout = roll_out(
                        parts.policy,
                        batch,
                        plan,
                        group=cfg.batch.group,
                        guidance=parts.guidance,
                        seed=cfg.seed,
                        iteration=iteration,
                        micro=cfg.batch.micro,
                        ledger=parts.ledger,
                        round_=round_,
                    )
                first = decode_into(
                    scorer,
                    parts.policy,
                    rollout,
                    batch,
                    decode=cfg.batch.decode,
                    ledger=parts.ledger,
                )
                made.append((batch, rollout))
                shown = (
                    first
                    if not len(shown)
                    else torch.cat([shown, first])
                    if len(shown) < SHOWN
                    else shown
                )
            scored = scorer.scores()
        batch = prompts.select(parts.prompts, ids)
        return Collected(batch=batch, rollout=self._one(made, batch), rewards=scored, shown=shown)

    def _agreed(self, make: Callable[[], T]) -> T:
        """What `make` gives, called by all processes; where a reward is gone for one of them, all
        of them stop."""
        out, gone = None, None
        try:
            out = make()
        except RewardUnavailable as error:
            gone = str(error)
        if said := self.world.agree(gone):
            raise RewardUnavailable(said)
        return out  # type: ignore[return-value]

    def _one(self, made: list[tuple[PromptBatch, Rollout]], batch: PromptBatch) -> Rollout:
        """The rollouts of parts of a batch as that of the batch."""
        if len(made) == 1:
            return made[0][1]
        places = torch.arange(len(batch)).split([len(part) for part, _ in made])
        with self.parts.ledger.phase("rollout"), self.parts.autocast():
            return replace(
                join([rollout for _, rollout in made], list(places)),
                cond=self.parts.policy.encode(batch.text),
            )

    def _refilled(
        self, iteration: int, plan: Plan, rewards: RewardSet, whole: PromptBatch, first: Collected
    ) -> Collected:
        """Add a fresh prompt for each flat group of the round before, over all processes, up to
        draw.rounds more rounds."""
        cfg, world, out = self.cfg, self.world, [first]
        order = keys.permutation(keys.key(cfg.seed, "refill", iteration), len(self.parts.prompts))
        fresh = order[~torch.isin(order, whole.ids)]
        for _ in range(cfg.draw.rounds):
            flat = int(
                world.sum(
                    torch.tensor(
                        float((~spread_out(out[-1], cfg.draw.spread)).sum()),
                        device=self.parts.policy.device,
                    )
                )
            )
            flat = min(flat, len(fresh)) // world.size * world.size  # every process the same number
            if not flat:
                break
            drawn, fresh = fresh[:flat], fresh[flat:]
            part = drawn[world.share(flat)]
            out.append(self._agreed(partial(self._sample, iteration, plan, rewards, part)))
        return self._joined(out, [torch.arange(len(c.batch)) for c in out], merge=False)

    def _balanced(
        self, iteration: int, plan: Plan, rewards: RewardSet, first: Collected
    ) -> Collected:
        """Sample unbalanced prompts again, up to draw.rounds more rounds."""
        cfg, world = self.cfg, self.world
        threshold = cfg.draw.positive
        if threshold is None:
            threshold = middle(world.gather(first.rewards.total))
        out, rows, half = [first], [torch.arange(len(first.batch))], cfg.batch.group // 2
        good, bad = counts(first, threshold)
        for r in range(1, cfg.draw.rounds + 1):
            again = torch.nonzero((good < half) | (bad < cfg.batch.group - half)).flatten().cpu()
            if not float(
                world.sum(torch.tensor(float(len(again)), device=self.parts.policy.device))
            ):
                break
            ids = first.batch.ids[again]
            drawn = self._agreed(
                partial(self._sample, iteration, plan, rewards, ids, round_=r)
                if len(ids)
                else lambda: None
            )
            if drawn is not None:
                out.append(drawn)
                rows.append(again)
                for total, more in zip((good, bad), counts(drawn, threshold), strict=True):
                    total[again.to(total.device)] += more
        return replace(self._joined(out, rows, merge=True), threshold=threshold)

    def _joined(self, parts: list[Collected], rows: list[Tensor], *, merge: bool) -> Collected:
        """One Collected of several. merge: prompts of part i are rows[i] of the first one's batch,
        else its own."""
        if len(parts) == 1:
            return parts[0]
        batch, cond = parts[0].batch, parts[0].rollout.cond
        if not merge:
            batch = prompts.select(self.parts.prompts, torch.cat([p.batch.ids for p in parts]))
            with self.parts.ledger.phase("rollout"), self.parts.autocast():
                cond = self.parts.policy.encode(batch.text)
            starts = torch.tensor([0, *(len(p.batch) for p in parts)]).cumsum(0).tolist()
            rows = [row + start for row, start in zip(rows, starts, strict=False)]
        rollout = join([p.rollout for p in parts], rows)
        return Collected(
            batch=batch,
            rollout=replace(rollout, cond=cond),
            rewards=concat_rewards([p.rewards for p in parts]),
            shown=parts[0].shown,
        )


def spread_out(collected: Collected, least: float) -> Tensor:
    """(P,) bool: groups whose valid rewards have a standard deviation above `least`."""
    out = []
    for g in range(len(collected.batch)):
        r = collected.rewards.total[collected.rollout.group == g].double()
        r = r[~r.isnan()]
        out.append(len(r) > 1 and float(r.std(correction=0)) > least)
    return torch.tensor(out)


def middle(total: Tensor) -> float:
    """Median of the valid rewards (B,), or the highest reward below it where none is above: 0/1
    rewards, mostly 1, are split at 0."""
    r = total[~total.isnan()]
    if not len(r):
        return 0.0
    below = r[r < r.median()]
    return float(below.max() if len(below) and not bool((r > r.median()).any()) else r.median())


def counts(collected: Collected, threshold: float) -> tuple[Tensor, Tensor]:
    """Valid samples of each prompt above the threshold, and at or below it -> (P,), (P,)."""
    group, total = collected.rollout.group, collected.rewards.total
    zeros = torch.zeros(len(collected.batch), dtype=torch.int64, device=group.device)
    good, bad = total > threshold, total <= threshold  # neither is true of NaN
    return zeros.index_add(0, group, good.long()), zeros.index_add(0, group, bad.long())


def chosen(collected: Collected, group_size: int) -> Tensor:
    """Rows of the leaves that are trained, in order: all, or after balance of each prompt the first
    `group_size`, half of them good.

    Where one side has too few the other fills up, as in Reinforce-Ada's fallback.
    """
    everything = torch.arange(len(collected.rollout.leaf))
    if collected.threshold is None:
        return everything
    group, total, kept = collected.rollout.group.cpu(), collected.rewards.total.cpu(), []
    for g in range(len(collected.batch)):
        good = everything[(group == g) & (total > collected.threshold)].tolist()
        bad = everything[(group == g) & (total <= collected.threshold)].tolist()
        half = max(min(len(good), group_size // 2), group_size - len(bad))
        kept += sorted(good[:half] + bad[: max(group_size - half, 0)])[:group_size]
    return torch.tensor(kept, dtype=torch.int64)
