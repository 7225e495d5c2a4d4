"""The optimizer's step and the policy as objectives see it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flowrl.config.schema import Config
from flowrl.training.build import Parts


def learning_rate(cfg: Config, step: int) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then constant, or cosine or linear to
    0 at the end of the run."""
    o, total = cfg.optimizer, cfg.iterations * cfg.batch.updates
    if step < o.warmup:
        return o.lr * (step + 1) / (o.warmup + 1)
    done = min(1.0, (step - o.warmup) / max(1, total - o.warmup))
    return (
        o.lr
        * {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[
            o.schedule
        ]
    )


class Booked:
    """The policy as objectives see it: autocast, and every network call booked; other views are the
    phase "reference"."""

    def __init__(self, parts: Parts) -> None:
        self.policy, self.ledger, self.accelerator, self.autocast = (
            parts.policy,
            parts.ledger,
            parts.accelerator,
            parts.autocast,
        )
        self.rows = 0

    def velocity(self, x: Tensor, sigma: Tensor, cond: Any, rows: Tensor, **options: Any) -> Tensor:
        before = self.policy.calls
        with self.ledger.work("network", rows=len(x)), self.autocast():
            v = self.policy.velocity(x, sigma, cond, rows, **options)
        self.ledger.add_nfe(
            "update" if torch.is_grad_enabled() else "reference", self.policy.calls - before
        )
        self.rows = len(x)
        return v

    @contextmanager
    def view(self, name: str) -> Iterator[None]:
        with self.ledger.phase("reference"), self.policy.view(name):
            yield

    def same(self, a: str, b: str) -> bool:
        return self.policy.same(a, b)

    def backward(self, loss: Tensor) -> None:
        with self.ledger.work("network", rows=self.rows, call="backward"):
            self.accelerator.backward(loss)
