"""Gradients of an algorithm's loss over any number of rows, in micro-batches of a fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.common.base import Algorithm
from flowrl.samplers import keys
from flowrl.types import Columns, LossOutput, Rollout

Across = Callable[[Tensor], Tensor]


def _alone(value: Tensor) -> Tensor:
    return value


def split(algorithm: Algorithm, batch: Columns, micro: int) -> list[Tensor]:
    """Row numbers of micro-batches with at most `micro` distinct network rows each; rows that share
    one stay together."""
    if micro < 1:
        raise ValueError(f"micro={micro} network rows must be at least 1")
    _, number = torch.unique(algorithm.network_rows(batch), return_inverse=True)
    order = number.argsort(stable=True)
    sizes = torch.bincount(number[order] // micro).tolist() if len(batch) else []
    return list(order.split(sizes)) if sizes else []


def split_units(algorithm: Algorithm, batch: Columns, micro: int) -> list[Tensor] | None:
    """Row numbers of micro-batches of whole units (rows that one term of the loss joins); None when
    a unit exceeds `micro` network rows."""
    network = algorithm.network_rows(batch)
    parts: list[Tensor] = []
    for unit in torch.unique(batch.unit).tolist():
        rows = torch.nonzero(batch.unit == unit).flatten()
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
    policy: Any,
    rollout: Rollout,
    batch: Columns,
    *,
    micro: int,
    total_weight: float,
    backward: Callable[[Tensor], None],
) -> dict[str, Tensor]:
    """Add the gradient of loss(batch) / total_weight to the policy's parameters -> metrics, summed
    over rows.

    Where a term of the loss joins rows (algorithm.couples), micro-batches hold whole units. If one
    does not fit, the exact two-pass form: scores of the whole batch without gradient, c = d loss /
    d scores, then micro-batches of sum(c * score). Groups never spread over processes, so neither
    form needs other processes' rows.
    """
    parts = (
        split(algorithm, batch, micro)
        if algorithm.couples == "row"
        else split_units(algorithm, batch, micro)
    )
    if parts is None:
        return _two_pass(
            algorithm,
            policy,
            rollout,
            batch,
            split(algorithm, batch, micro),
            total_weight,
            backward,
        )
    metrics: dict[str, Tensor] = {}
    for rows in parts:
        part = batch[rows]
        out = algorithm.loss(algorithm.score(policy, rollout, part), part)
        backward(out.loss / total_weight)
        for name, value in out.metrics.items():
            metrics[name] = metrics.get(name, 0) + value
    return metrics


def coefficients(
    algorithm: Algorithm, scores: dict[str, Tensor], batch: Columns
) -> tuple[LossOutput, dict[str, Tensor]]:
    """Loss of given scores and its derivative by each of them (those it does not depend on are left
    out)."""
    leaves = {name: value.detach().requires_grad_() for name, value in scores.items()}
    with torch.enable_grad():
        out = algorithm.loss(leaves, batch)
        grads = torch.autograd.grad(out.loss, list(leaves.values()), allow_unused=True)
    return out, {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}


def _two_pass(
    algorithm, policy, rollout, batch, parts, total_weight, backward
) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    with torch.no_grad():
        for rows in parts:
            for name, value in algorithm.score(policy, rollout, batch[rows]).items():
                whole.setdefault(name, value.new_empty(len(batch)))[rows] = value
    out, c = coefficients(algorithm, whole, batch)
    for rows in parts:
        scores = algorithm.score(policy, rollout, batch[rows])
        backward(
            sum(
                (c[name][rows] * value).sum()
                for name, value in scores.items()
                if name in c and value.requires_grad
            )
            / total_weight
        )
    return out.metrics


@torch.no_grad()
def winner_gain(
    algorithm: Algorithm,
    policy: Any,
    rollout: Rollout,
    batch: Columns,
    *,
    micro: int = 64,
    most: int = 16,
    gather: Across = _alone,
    total: Across = _alone,
) -> float | None:
    """Mean of fit(policy) - fit(reference) over about `most` rows of positive advantage, drawn by
    their noise keys; None without any.

    Below 0 the update makes good samples less likely, as preference losses do when they push bad
    ones away further. gather, total: concatenate and sum over processes, so that the same rows are
    looked at on any number of them.
    """
    rows = torch.nonzero(batch.adv > 0).flatten()
    draw = keys.uniform(keys.key("winners", batch.noise_key[rows]))
    highest = gather(draw).sort().values[:most][-1:]
    rows = rows[draw <= highest] if len(highest) else rows
    gain = torch.zeros(2, dtype=torch.float64, device=batch.adv.device)  # sum and count
    for part in split(algorithm, batch[rows], micro):
        chosen = batch[rows[part]]
        now = algorithm.fit(policy, rollout, chosen)
        with policy.view("reference"):
            gain[0] += (now - algorithm.fit(policy, rollout, chosen)).double().sum()
        gain[1] += len(part)
    value, count = total(gain).tolist()
    return value / count if count else None
