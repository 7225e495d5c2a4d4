"""Make one embedding of each prompt from the arguments that it gives to a network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.arguments import Cond
from flowrl.policy.replay.call import Regime, Replay


def embedded(replay: Replay, cond: Cond) -> Tensor | None:
    """Return (P, d) fp32: the widest vector that the conditional branch gets from each prompt, or
    else the mean over tokens of the widest sequence. None if it gets neither, or if the loop's own
    body is run."""
    if not replay.regimes:
        return None
    call, block = conditional(replay.regimes[0])
    each = [_of_group(group.kept[0][call], block) for group in cond.groups]
    known = [value for value in each if value is not None]
    if len(known) < len(each) or len({value.shape[1] for value in known}) != 1:
        return None
    return torch.stack([known[group][row] for group, row in cond.places])


def conditional(regime: Regime) -> tuple[int, int]:
    """Find (call, its block) of the branch that has the prompt."""
    first = 0
    for call, plan in enumerate(regime.calls):
        if regime.guidance.cond < first + plan.blocks:
            return call, regime.guidance.cond - first
        first += plan.blocks
    raise AssertionError("the conditional branch belongs to a call")


def _of_group(kept: dict[Any, Any], block: int) -> Tensor | None:
    """Return (P, d) of the prompts of a group."""
    # (is it a vector, its width) -> value of all prompts
    found: dict[tuple[bool, int], Tensor] = {}
    for path in sorted(kept, key=str):
        value = _rows(kept[path], block)
        if value is not None and value.ndim in (2, 3):
            vector = value.ndim == 2
            found.setdefault((vector, value.shape[-1]), value if vector else value.mean(1))
    return found[max(found)] if found else None


def _rows(value: Any, block: int) -> Tensor | None:
    """Return (P, ...) fp32, the first repeat of a kept argument; None if it is not a tensor of
    this kind."""
    if isinstance(value, list):
        firsts = [row[0] for row in value[block if len(value) > 1 else 0]]
        if not all(isinstance(one, Tensor) and one.ndim == 2 for one in firsts):
            return None
        return torch.stack([one.float().mean(0) for one in firsts])
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    return value[block if len(value) > 1 else 0][:, 0].float()
