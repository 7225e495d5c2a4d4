"""Calls of one network that a loop makes one after the other, made as one where they are alike.

Some pipelines (Wan) run guidance's branches in a call each. Rows of a call do not know of one
another, or prompts could not share one; so two calls with the same arguments, whose tensors have
the same shapes but for the batch, are one call of twice the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.policy.replay.arguments import CallPlan, Path, nest, tensors_in
from flowrl.policy.replay.record import prediction_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Blocks of a call that run together: their branches, whether with gradient, and the
    arguments by path."""

    plan: CallPlan
    blocks: list[int]
    branches: list[int]
    grad: bool
    flat: dict[Path, Any]


def outputs(
    modules: Mapping[str, nn.Module], passes: Iterable[Pass], *, apart: bool
) -> Iterator[tuple[Pass, Tensor]]:
    """Every pass with the prediction of its rows; apart: each is a call of its own."""
    for alike in joined(passes, apart=apart):
        first = alike[0]
        with torch.set_grad_enabled(first.grad):
            made = modules[first.plan.module](**nest(arguments(alike)))
            output = prediction_of(made, first.plan.streams)
        yield from zip(alike, output.chunk(len(alike)), strict=True)


def joined(passes: Iterable[Pass], *, apart: bool) -> list[list[Pass]]:
    """Passes in order, those that one call can make together; apart: each has its own."""
    out: list[list[Pass]] = []
    for one in passes:
        if out and not apart and _fits(out[-1][0], one):
            out[-1].append(one)
        else:
            out.append([one])
    return out


def arguments(passes: list[Pass]) -> dict[Path, Any]:
    """Arguments by path of one call for all of these passes."""
    first = passes[0]
    if len(passes) == 1:
        return first.flat
    axes = _axes(first.plan)
    return first.flat | {
        path: _cat([one.flat[path] for one in passes], axis) for path, axis in axes.items()
    }


def _axes(plan: CallPlan) -> dict[Path, int]:
    """The batch axis of every argument that has one entry a row."""
    slots, times = ({part.path: 0 for part in parts} for parts in (plan.slots, plan.times))
    return slots | times | {rows.path: rows.axis for rows in plan.rows}


def _cat(values: list[Any], axis: int) -> Any:
    if values[0] is None:
        return None
    if isinstance(values[0], Tensor):
        return torch.cat(values, axis)
    return [entry for value in values for entry in value]


def _fits(a: Pass, b: Pass) -> bool:
    """Whether two passes are one function of their rows."""
    same = (a.plan.module, a.plan.streams, a.grad) == (b.plan.module, b.plan.streams, b.grad)
    if not same or a.plan.blocks != 1 or b.plan.blocks != 1:
        return False
    axes = _axes(a.plan)
    if axes != _axes(b.plan) or a.flat.keys() != b.flat.keys():
        return False
    return all(
        _shape(value) == _shape(b.flat[path]) if path in axes else _equal(value, b.flat[path])
        for path, value in a.flat.items()
    )


def _shape(value: Any) -> Any:
    """What two arguments of one kind have in common; lists hold an entry a row."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return [_shape(entry) for entry in value] if isinstance(value, list) else type(value)


def _equal(a: Any, b: Any) -> bool:
    """Whether what all rows share is the same; of tensors only where it is told without reading
    them."""
    found = list(tensors_in(a)), list(tensors_in(b))
    if found[0] or found[1]:
        return a is b
    return bool(a == b)
