"""Gradients of an algorithm's loss over any number of rows, in micro-batches of a fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms._base import Algorithm
from flowrl.types import Columns, LossOutput, Rollout


def split(algorithm: Algorithm, batch: Columns, micro: int) -> list[Tensor]:
    """Row numbers of micro-batches with at most `micro` distinct network rows each; rows that share one stay together."""
    if micro < 1:
        raise ValueError(f"micro={micro} network rows must be at least 1")
    _, number = torch.unique(algorithm.network_rows(batch), return_inverse=True)
    order = number.argsort(stable=True)
    sizes = torch.bincount(number[order] // micro).tolist() if len(batch) else []
    return list(order.split(sizes)) if sizes else []


def pad(parts: list[Tensor], count: int) -> list[tuple[Tensor, float]]:
    """(rows, weight factor) of exactly `count` micro-batches: missing ones repeat row 0 with weight 0, so that processes step together."""
    assert len(parts) <= count and (parts or not count), f"{len(parts)} micro-batches cannot become {count}; give a row of weight 0"
    return [(rows, 1.0) for rows in parts] + [(rows[:1], 0.0) for rows in parts[:1] * (count - len(parts))]


def accumulate(
    algorithm: Algorithm,
    policy: Any,
    rollout: Rollout,
    batch: Columns,
    *,
    micro: int,
    total_weight: float,
    backward: Callable[[Tensor], None],
    scale: float = 1.0,
    count: int | None = None,
) -> dict[str, Tensor]:
    """Add the gradient of scale * loss(batch) / total_weight to the policy's parameters -> metrics, summed over rows.

    Algorithms that couple rows get the exact two-pass form: scores of the whole batch without gradient, c = d loss / d scores, then
    micro-batches of sum(c * score). `count`: number of backward calls, the same on all processes (None: as many as needed).
    """
    parts = split(algorithm, batch, micro)
    plan = pad(parts, len(parts) if count is None else count)
    factor = scale / total_weight
    if algorithm.couples != "row":
        return _two_pass(algorithm, policy, rollout, batch, plan, factor, backward)
    metrics: dict[str, Tensor] = {}
    for rows, weight in plan:
        part = _weighted(batch[rows], weight)
        out = algorithm.loss(algorithm.score(policy, rollout, part), part)
        backward(out.loss * factor)
        for name, value in out.metrics.items():
            metrics[name] = metrics.get(name, 0) + value
    return metrics


def _weighted(batch: Columns, weight: float) -> Columns:
    return batch if weight == 1 else Columns({**batch.data, "weight": batch.weight * weight})


def coefficients(algorithm: Algorithm, scores: dict[str, Tensor], batch: Columns) -> tuple[LossOutput, dict[str, Tensor]]:
    """Loss of given scores and its derivative by each of them (those it does not depend on are left out)."""
    leaves = {name: value.detach().requires_grad_() for name, value in scores.items()}
    with torch.enable_grad():
        out = algorithm.loss(leaves, batch)
        grads = torch.autograd.grad(out.loss, list(leaves.values()), allow_unused=True)
    return out, {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}


def _two_pass(algorithm, policy, rollout, batch, plan, factor, backward) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    with torch.no_grad():
        for rows, weight in plan:
            if weight:
                for name, value in algorithm.score(policy, rollout, batch[rows]).items():
                    whole.setdefault(name, value.new_empty(len(batch)))[rows] = value
    out, c = coefficients(algorithm, whole, batch)
    for rows, weight in plan:
        scores = algorithm.score(policy, rollout, batch[rows])
        backward(factor * weight * sum((c[name][rows] * value).sum() for name, value in scores.items() if name in c))
    return out.metrics
