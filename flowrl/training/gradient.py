"""The gradient of a loss over any number of rows, in micro-batches of a fixed size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.algorithms.common.base import Algorithm, VelocityField, checked_loss
from flowrl.training import two_pass
from flowrl.types import LARGEST, Columns, Rollout


def accumulate(
    algorithm: Algorithm,
    policy: VelocityField,
    rollout: Rollout,
    batch: Columns,
    *,
    micro: int,
    total_weight: float,
    backward: Callable[[Tensor], None],
) -> dict[str, Tensor]:
    """Add the gradient of loss(batch) / total_weight -> metrics, summed over rows.

    If a term of the loss joins rows (algorithm.couples), micro-batches hold whole units, which
    never spread over processes. If one does not fit, two passes are made.
    """
    batch = batch.brought_near()  # once for all rows, so that no micro-batch waits for the device
    if algorithm.couples == "row":
        parts: list[Tensor] | None = split(algorithm, batch, micro)
    else:
        parts = two_pass.split_units(algorithm, batch, micro)
    if parts is None:
        parts = split(algorithm, batch, micro)
        return two_pass.accumulate(algorithm, policy, rollout, batch, parts, total_weight, backward)
    metrics: dict[str, Tensor] = {}
    for rows in parts:
        part = batch[rows]
        out = checked_loss(algorithm, algorithm.score(policy, rollout, part), part)
        backward(out.loss / total_weight)
        for name, value in out.metrics.items():
            join = torch.maximum if name.endswith(LARGEST) else torch.add
            metrics[name] = join(metrics[name], value) if name in metrics else value
    return metrics


def split(algorithm: Algorithm, batch: Columns, micro: int) -> list[Tensor]:
    """Split rows into micro-batches of at most `micro` distinct network rows -> row numbers (CPU).

    Rows that share a network row stay together.
    """
    if micro < 1:
        raise ValueError(f"micro={micro} network rows must be at least 1")
    _, number = torch.unique(algorithm.network_rows(batch), return_inverse=True)
    order = number.argsort(stable=True)
    sizes = torch.bincount(number[order] // micro).tolist() if len(batch) else []
    return list(order.split(sizes)) if sizes else []
