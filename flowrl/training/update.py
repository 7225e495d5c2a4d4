"""The update: rows of an iteration -> optimizer steps, each on whole prompts.

Its gradient is that of a sum of terms: the method's own loss and, beside it, that of rewards with
mode=grad and that of media of the user's own (anchor.data). Each is a mean over its own rows,
whatever the number of the others' rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.algorithms.common.base import Algorithm
from flowrl.algorithms.common.climb import Climb
from flowrl.algorithms.common.data_anchor import DataAnchor, paired
from flowrl.config.schema import Config
from flowrl.rollouts.records import Source
from flowrl.rollouts.trained import TrainingBatch
from flowrl.runtime.ledger import CountedPolicy
from flowrl.runtime.processes.world import World
from flowrl.training import gradient
from flowrl.training.records import RunParts
from flowrl.training.watch.nonfinite import given_up, write_out
from flowrl.types import LARGEST, Columns, Plan, Rollout


class Learner:
    """Trains a policy on rows."""

    def __init__(self, parts: RunParts) -> None:
        setup = parts.setup
        self.cfg, self.algorithm, self.path = setup.cfg, setup.algorithm, parts.path
        self.world, self.weights, self.watch = parts.source.world, parts.weights, parts.watch
        self.policy = CountedPolicy(
            parts.source.policy,
            parts.source.ledger,
            autocast=parts.source.autocast,
            backward=self.world.backward,
        )
        self.micro = setup.states  # most states in one forward
        self.step = 0  # number of optimizer steps taken
        # number of updates in a row that were skipped because their gradient is not finite
        self.nonfinite = 0
        self.touched = False  # whether weights moved since the last recorded iteration

    def update(
        self, batch: TrainingBatch, columns: Columns, more: Sequence[Term] = ()
    ) -> dict[str, float]:
        """`batch.updates` optimizer steps -> metrics, averaged over the rows of their term."""
        own = Term.of(self.algorithm, columns, batch)
        terms = [own, *more]
        out = {"policy/grad_norm": 0.0, "policy/skipped": 0.0, "policy/rows": 0.0}
        summed: list[tuple[dict[str, float], float]] = []
        for u in range(updates := self.cfg.batch.updates):
            # the sum over processes of the rows' weights is needed before the first micro-batch
            parts = [term.part(u, self.world) for term in terms]
            if not any(part.weight for part in parts):  # no group has a signal
                out["policy/skipped"] += 1
                continue
            metrics, norm = self.gradient(parts)
            if not math.isfinite(norm):
                out["policy/skipped"] += 1
                self.skip(batch.rollout, parts[0].rows)
                continue
            self.apply()
            out["policy/rows"] += parts[0].count
            out["policy/grad_norm"] += norm / updates
            for part, found in zip(parts, metrics, strict=True):
                summed.append((self.world.sum_metrics(found), part.weight))
        out |= weighted_means(summed)
        rate = learning_rate(self.cfg, max(0, self.step - 1))
        return out | {
            "optimizer/lr": self.watch.state["rate"] * rate,
            "optimizer/step": self.step,
        }

    def gradient(self, parts: list[Term]) -> tuple[list[dict[str, Tensor]], float]:
        """Compute the gradient of the sum of the terms' mean losses, clipped -> (summed metrics of
        each term, norm before clipping)."""
        self.weights.optimizer.zero_grad(set_to_none=True)
        metrics = [
            gradient.accumulate(
                part.objective,
                self.policy,
                part.rollout,
                part.rows,
                micro=self.micro,
                total_weight=part.weight,
                backward=self.policy.backward,
            )
            if len(part.rows) and part.weight
            else {}
            for part in parts
        ]
        parameters = list(self.weights.parameters.values())
        self.world.sum_gradients(parameters)
        return metrics, self.world.clip_gradients(parameters, self.cfg.optimizer.max_grad_norm)

    def apply(self) -> None:
        """Take one optimizer step, and update the averaged weights after it."""
        self.nonfinite = 0
        for group in self.weights.optimizer.param_groups:
            group["lr"] = self.watch.state["rate"] * learning_rate(self.cfg, self.step)
        self.touched = True
        self.weights.optimizer.step()
        # None frees the gradients' memory until the next update
        self.weights.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.weights.ema.step()

    def skip(self, rollout: Rollout, rows: Columns) -> None:
        """Skip an update, write its batch out, and give up after guard.nonfinite in a row."""
        self.nonfinite += 1
        if self.weights.accelerator.scaler is not None:
            self.weights.optimizer.step()  # the fp16 scaler skips this step and lowers its scale
        self.weights.optimizer.zero_grad(set_to_none=True)
        name = f"step-{self.step:06d}-rank-{self.world.process}"
        write_out(self.path, name, rollout, rows)
        if self.nonfinite >= self.cfg.guard.nonfinite:
            raise given_up(self.path, self.nonfinite)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """An objective and its rows on this process."""

    objective: Algorithm  # the method, the climbed rewards (Climb), or media (DataAnchor)
    rows: Columns  # (n,) rows of the loss
    rollout: Rollout  # the samples, or the media, that the rows are about
    turns: Tensor  # (P,) int64, number of the update that trains each prompt of the rollout
    # weight of the rows of all processes, by which their summed loss is divided
    weight: float = 0.0
    count: float = 0.0  # number of the rows of all processes

    @classmethod
    def of(cls, objective: Algorithm, rows: Columns, batch: TrainingBatch) -> Term:
        """Make the term of rows about the samples of the batch."""
        return cls(objective=objective, rows=rows, rollout=batch.rollout, turns=batch.turns)

    def part(self, u: int, world: World) -> Term:
        """Take the rows of update u."""
        rows = self.rows[torch.nonzero(self.turns[self.rows.prompt] == u).flatten()]
        count = torch.stack([rows.weight.sum(), rows.weight.new_tensor(float(len(rows)))])
        weight, number = world.sum(count).tolist()
        return replace(self, rows=rows, weight=weight, count=number)


def climbed_terms(source: Source, batch: TrainingBatch, iteration: int) -> list[Term]:
    """Make the term of rewards with mode=grad that count in this iteration, if there are any, on
    its new samples."""
    climbed, cfg = source.climbed, source.cfg
    if climbed is None or not any(climbed.weights.values()):
        return []
    objective = Climb(cfg.gradient)
    rows = objective.rows(batch.rollout, batch.fresh, seed=cfg.seed, iteration=iteration)
    return [Term.of(objective, rows, batch)]


def data_terms(
    source: Source, algorithm: Algorithm, plan: Plan, columns: Columns, iteration: int
) -> list[Term]:
    """Make the term of media of the user's own (anchor.data), if it counts in this iteration: as
    many media as there are samples, each at as many noise levels, or fewer by per_row.

    columns: the method's rows, whose noise levels and noise are taken with levels=rl.
    """
    cfg = source.cfg
    if source.draw_media is None or iteration < cfg.anchor.data.start:
        return []
    # rows of data for each prompt, from the most that the method may have: filters change nothing
    number = cfg.anchor.data.per_row * algorithm.most_rows(plan, cfg.batch.group)
    levels = max(1, math.ceil(number / cfg.batch.group))
    each = max(1, round(number / levels))
    objective = DataAnchor(cfg.anchor.data.weight, levels)
    rollout = source.draw_media(source, iteration, each, plan)
    rows = objective.rows(rollout, seed=cfg.seed, iteration=iteration)
    if cfg.anchor.data.levels == "rl":
        rows = paired(rows, columns, rows.prompt // each)
    # an update trains the media of the prompts that it trains
    place = torch.arange(len(rollout.leaf), device=rollout.leaf.device)
    turns = place // each * cfg.batch.updates // (len(rollout.leaf) // each)
    return [Term(objective=objective, rows=rows, rollout=rollout, turns=turns)]


def weighted_means(summed: Iterable[tuple[dict[str, float], float]]) -> dict[str, float]:
    """Average metrics of several updates, each over the rows of its term. summed: for each term of
    each update its metrics, summed over rows, and the weight of these rows. Of largest values the
    largest is kept."""
    sums: dict[str, tuple[float, float]] = {}  # name -> (sum, weight)
    for metrics, weight in summed:
        for name, value in metrics.items():
            total, before = sums.get(name, (0.0, 0.0))
            sums[name] = total + value, before + weight
            if name.endswith(LARGEST):
                sums[name] = max(total, value) if before else value, 1.0
    return {name: total / weight for name, (total, weight) in sums.items()}


def learning_rate(cfg: Config, step: int) -> float:
    """Return the rate of step `step`, from 0: linear warm-up, optimizer.schedule to the end."""
    o, total = cfg.optimizer, cfg.iterations * cfg.batch.updates
    if step < o.warmup:
        return o.lr * (step + 1) / (o.warmup + 1)
    done = min(1.0, (step - o.warmup) / max(1, total - o.warmup))
    left = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return o.lr * left[o.schedule]
