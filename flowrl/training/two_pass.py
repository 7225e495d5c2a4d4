"""Losses whose terms join rows (a sample, a group) that need not fit into one micro-batch.

If each unit fits, micro-batches hold whole units. If one does not, the gradient comes in two passes
and is exact: c = d loss / d scores of the whole batch, then sum(c * score) of its parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.algorithms.common.base import Algorithm, VelocityField, checked_loss
from flowrl.types import Columns, LossOutput, Rollout


def split_units(algorithm: Algorithm, batch: Columns, micro: int) -> list[Tensor] | None:
    """Split rows into micro-batches of whole units (rows that one term of the loss joins) -> row
    numbers, on the CPU; None when a unit exceeds `micro` network rows."""
    network, units = algorithm.network_rows(batch), batch.host("unit")
    parts: list[Tensor] = []
    for unit in torch.unique(units).tolist():
        rows = torch.nonzero(units == unit).flatten()
        if torch.unique(network[rows]).numel() > micro:
            return None
        joined = torch.cat([parts[-1], rows]) if parts else rows
        if parts and torch.unique(network[joined]).numel() <= micro:
            parts[-1] = joined
        else:
            parts.append(rows)
    return parts


def accumulate(
    algorithm: Algorithm,
    policy: VelocityField,
    rollout: Rollout,
    batch: Columns,
    parts: list[Tensor],
    total_weight: float,
    backward: Callable[[Tensor], None],
) -> dict[str, Tensor]:
    """Add the gradient of loss / total_weight in two passes -> metrics, summed over rows.

    parts: the rows of each micro-batch, on the CPU.
    """
    # first pass: scores of the whole batch without gradient, and c = d loss / d scores
    whole: dict[str, Tensor] = {}
    with torch.no_grad():
        for rows in parts:
            for name, value in algorithm.score(policy, rollout, batch[rows]).items():
                at = rows.to(value.device, non_blocking=True)
                empty = value.new_empty(len(batch), *value.shape[1:])
                whole.setdefault(name, empty)[at] = value
    out, c = coefficients(algorithm, whole, batch)
    # second pass: sum(c * score) of a part has the gradient of the loss in this part's scores
    for rows in parts:
        scores = algorithm.score(policy, rollout, batch[rows])
        trained = {name: v for name, v in scores.items() if name in c and v.requires_grad}
        parts_of = {k: c[k][rows.to(v.device, non_blocking=True)] for k, v in trained.items()}
        backward(sum((parts_of[k] * v).sum() for k, v in trained.items()) / total_weight)
    return out.metrics


def coefficients(
    algorithm: Algorithm, scores: dict[str, Tensor], batch: Columns
) -> tuple[LossOutput, dict[str, Tensor]]:
    """Return the loss of given scores, and its derivative by each score that it depends on."""
    leaves = {name: value.detach().requires_grad_() for name, value in scores.items()}
    with torch.enable_grad():
        out = checked_loss(algorithm, leaves, batch)
        grads = torch.autograd.grad(out.loss, list(leaves.values()), allow_unused=True)
    return out, {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
