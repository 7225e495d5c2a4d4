"""The update: rows of an iteration -> optimizer steps, each on whole prompts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowrl.config.schema import Config
from flowrl.runtime.ledger import CountedPolicy
from flowrl.training import gradient
from flowrl.training.nonfinite import given_up, write_out
from flowrl.training.records import Parts
from flowrl.types import Columns, Rollout


class Learner:
    """Trains a policy on rows. step: optimizer steps taken; nonfinite: updates skipped in a row."""

    def __init__(self, parts: Parts) -> None:
        self.cfg, self.algorithm, self.path = parts.cfg, parts.algorithm, parts.path
        self.world, self.weights, self.watch = parts.source.world, parts.weights, parts.watch
        self.policy = CountedPolicy(
            parts.source.policy,
            parts.source.ledger,
            autocast=parts.source.autocast,
            backward=parts.weights.accelerator.backward,
        )
        self.micro = parts.micro
        self.step = self.nonfinite = 0
        self.touched = False  # whether weights moved since the last recorded iteration

    def update(self, rollout: Rollout, columns: Columns, turns: Tensor) -> dict[str, float]:
        """`batch.updates` optimizer steps -> policy/*, averaged over the rows trained; turns (P,):
        in which of them each prompt is."""
        updates = self.cfg.batch.updates
        sums: dict[str, float] = {}
        trained = 0.0
        out = {"policy/grad_norm": 0.0, "policy/skipped": 0.0, "policy/rows": 0.0}
        for u in range(updates):
            part = columns[torch.nonzero(turns[columns.prompt] == u).flatten()]
            count = torch.stack([part.weight.sum(), part.weight.new_tensor(float(len(part)))])
            weight, rows = self.world.sum(count).tolist()
            if weight == 0:  # no group has a signal
                out["policy/skipped"] += 1
                continue
            metrics, norm = self.gradient(rollout, part, weight)
            if not math.isfinite(norm):
                out["policy/skipped"] += 1
                self.skip(rollout, part)
                continue
            self.apply()
            trained += weight
            out["policy/rows"] += rows
            out["policy/grad_norm"] += norm / updates
            for name, value in self.world.sum_metrics(metrics).items():
                sums[name] = sums.get(name, 0.0) + value
        return out | {name: value / trained for name, value in sums.items()}

    def gradient(
        self, rollout: Rollout, part: Columns, weight: float
    ) -> tuple[dict[str, Tensor], float]:
        """Gradient of the mean loss, clipped -> (summed metrics, norm before clipping)."""
        self.weights.optimizer.zero_grad(set_to_none=True)
        metrics: dict[str, Tensor] = {}
        if len(part):
            metrics = gradient.accumulate(
                self.algorithm,
                self.policy,
                rollout,
                part,
                micro=self.micro,
                total_weight=weight,
                backward=self.policy.backward,
            )
        parameters = list(self.weights.parameters.values())
        self.world.sum_gradients(parameters)
        most = self.cfg.optimizer.max_grad_norm
        return metrics, float(self.weights.accelerator.clip_grad_norm_(parameters, most))

    def apply(self) -> None:
        """One optimizer step, and the averaged weights after it."""
        self.nonfinite = 0
        for group in self.weights.optimizer.param_groups:
            group["lr"] = self.watch.rate * learning_rate(self.cfg, self.step)
        self.touched = True
        self.weights.optimizer.step()
        self.step += 1
        self.weights.ema.step()

    def skip(self, rollout: Rollout, part: Columns) -> None:
        """Skip an update, write its batch out, and give up after guard.nonfinite in a row."""
        self.nonfinite += 1
        if self.weights.accelerator.scaler is not None:
            self.weights.optimizer.step()  # the fp16 scaler skips it and lowers its scale
        self.weights.optimizer.zero_grad(set_to_none=True)
        name = f"step-{self.step:06d}-rank-{self.world.rank}"
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
