"""The update: rows of an iteration -> optimizer steps, each on whole prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from flowrl.config.schema import Config
from flowrl.rollouts.trained import TrainingBatch
from flowrl.runtime.ledger import CountedPolicy
from flowrl.training.records import RunParts
from flowrl.training.terms import Means, Term
from flowrl.training.watch.nonfinite import given_up, write_out
from flowrl.types import Columns, Rollout


class Learner:
    """Trains a policy on rows. step: optimizer steps taken; nonfinite: updates skipped in a row."""

    def __init__(self, parts: RunParts) -> None:
        self.cfg, self.algorithm, self.path = parts.cfg, parts.algorithm, parts.path
        self.world, self.weights, self.watch = parts.source.world, parts.weights, parts.watch
        self.policy = CountedPolicy(
            parts.source.policy,
            parts.source.ledger,
            autocast=parts.source.autocast,
            backward=self.world.backward,
        )
        self.micro = parts.micro
        self.step = self.nonfinite = 0
        self.touched = False  # whether weights moved since the last recorded iteration

    def update(
        self, trained: TrainingBatch, columns: Columns, more: Sequence[Term] = ()
    ) -> dict[str, float]:
        """`batch.updates` optimizer steps -> metrics, averaged over the rows of their term."""
        terms = [Term(objective=self.algorithm, rows=columns), *more]
        means = Means()
        out = {"policy/grad_norm": 0.0, "policy/skipped": 0.0, "policy/rows": 0.0}
        for u in range(updates := self.cfg.batch.updates):
            parts = [term.part(u, trained.turns, self.world) for term in terms]
            if not any(part.weight for part in parts):  # no group has a signal
                out["policy/skipped"] += 1
                continue
            metrics, norm = self.gradient(trained.rollout, parts)
            if not math.isfinite(norm):
                out["policy/skipped"] += 1
                self.skip(trained.rollout, parts[0].rows)
                continue
            self.apply()
            out["policy/rows"] += parts[0].count
            out["policy/grad_norm"] += norm / updates
            for part, summed in zip(parts, metrics, strict=True):
                means.add(self.world.sum_metrics(summed), part.weight)
        return out | means()

    def gradient(
        self, rollout: Rollout, parts: list[Term]
    ) -> tuple[list[dict[str, Tensor]], float]:
        """Gradient of the sum of the terms' mean losses, clipped -> (summed metrics of each term,
        norm before clipping)."""
        self.weights.optimizer.zero_grad(set_to_none=True)
        metrics = [part.accumulate(self.policy, rollout, self.micro) for part in parts]
        parameters = list(self.weights.parameters.values())
        self.world.sum_gradients(parameters)
        return metrics, self.world.clip_gradients(parameters, self.cfg.optimizer.max_grad_norm)

    def apply(self) -> None:
        """One optimizer step, and the averaged weights after it."""
        self.nonfinite = 0
        for group in self.weights.optimizer.param_groups:
            group["lr"] = self.watch.rate * learning_rate(self.cfg, self.step)
        self.touched = True
        self.weights.optimizer.step()
        self.weights.optimizer.zero_grad(set_to_none=True)  # its memory is free until the next
        self.step += 1
        self.weights.ema.step()

    def skip(self, rollout: Rollout, part: Columns) -> None:
        """Skip an update, write its batch out, and give up after guard.nonfinite in a row."""
        self.nonfinite += 1
        if self.weights.accelerator.scaler is not None:
            self.weights.optimizer.step()  # the fp16 scaler skips it and lowers its scale
        self.weights.optimizer.zero_grad(set_to_none=True)
        name = f"step-{self.step:06d}-rank-{self.world.process}"
        write_out(self.path, name, rollout, part)
        if self.nonfinite >= self.cfg.guard.nonfinite:
            raise given_up(self.path, self.nonfinite)


def learning_rate(cfg: Config, step: int) -> float:
    """Rate of optimizer step `step`, from 0: linear warm-up, then optimizer.schedule to the end."""
    o, total = cfg.optimizer, cfg.iterations * cfg.batch.updates
    if step < o.warmup:
        return o.lr * (step + 1) / (o.warmup + 1)
    done = min(1.0, (step - o.warmup) / max(1, total - o.warmup))
    left = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return o.lr * left[o.schedule]
