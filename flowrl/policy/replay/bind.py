"""Bind prompts to a Replay: one stubbed run encodes them, and what belongs to a prompt is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.arguments import Path
from flowrl.policy.replay.call import Cond, Replay
from flowrl.policy.replay.classify import get
from flowrl.policy.replay.probe import Prober
from flowrl.policy.replay.record import Iteration


def bind(prober: Prober, replay: Replay, steps: int, prompts: list[str], chunk: int = 64) -> Cond:
    """Encode prompts by a stubbed run with zero latents, `chunk` prompts at a time, keeping what
    belongs to a prompt."""
    parts = [
        _bind(prober, replay, steps, prompts[k : k + chunk]) for k in range(0, len(prompts), chunk)
    ]
    if len(parts) == 1:
        return Cond(tuple(prompts), parts[0])
    return Cond(
        tuple(prompts),
        [
            [
                {p: _cat([part[r][c][p] for part in parts]) for p in call}
                for c, call in enumerate(reg)
            ]
            for r, reg in enumerate(parts[0])
        ],
    )


def _cat(values: list[Any]) -> Any:
    if values[0] is None:
        return None
    return (
        torch.cat(values, 1)
        if isinstance(values[0], Tensor)
        else [v for part in values for v in part]
    )


def _bind(
    prober: Prober, replay: Replay, steps: int, prompts: list[str]
) -> list[list[dict[Path, Any]]]:
    rows, drop = len(prompts) + len(prober.runner.pad), len(prober.runner.pad)
    lows = [*replay.boundaries, -1.0]
    seen: dict[int, Iteration] = {}

    def keep(j: int, it: Iteration) -> bool:
        which = next(k for k, low in enumerate(lows) if it.time >= low)
        if j > 0:
            seen.setdefault(which, it)
        return len(seen) == len(lows)

    prober.run(prompts, steps, latents=lambda j: torch.zeros(rows, *replay.shape), stop=keep)
    out = []
    for which, regime in enumerate(replay.regimes):
        kept: list[dict[Path, Any]] = []
        for plan, call in zip(regime.calls, seen[which].calls, strict=True):
            values = {r.path: r.keep(get(call.args, r.path), rows, drop) for r in plan.rows}
            for slot in plan.slots:
                if slot.map.const is not None:
                    values[slot.path] = (
                        get(call.args, slot.path)
                        .detach()
                        .float()
                        .reshape(plan.blocks, rows, -1)[:, : rows - drop]
                    )
            kept.append(values)
        out.append(kept)
    return out
