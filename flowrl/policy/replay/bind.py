"""Bind prompts to a Replay: one stubbed run encodes them, and what belongs to a prompt is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.arguments import CallPlan, Cond, Path, get
from flowrl.policy.replay.call import Replay
from flowrl.policy.replay.probe import Prober
from flowrl.policy.replay.record import Call

Kept = list[list[dict[Path, Any]]]  # [regime][call][path], see Cond


def bind(prober: Prober, replay: Replay, steps: int, prompts: list[str], chunk: int = 64) -> Cond:
    """Encode prompts by a stubbed run with zero latents, `chunk` prompts at a time, keeping what
    belongs to a prompt."""
    parts = [
        _bind(prober, replay, steps, prompts[k : k + chunk]) for k in range(0, len(prompts), chunk)
    ]
    return Cond(tuple(prompts), parts[0] if len(parts) == 1 else _joined(parts))


def _joined(parts: list[Kept]) -> Kept:
    """Chunks of prompts as one."""
    return [
        [
            {path: _cat([call[path] for call in same_calls]) for path in same_calls[0]}
            for same_calls in zip(*same_regimes, strict=True)
        ]
        for same_regimes in zip(*parts, strict=True)
    ]


def _cat(values: list[Any]) -> Any:
    if values[0] is None:
        return None
    if isinstance(values[0], Tensor):
        return torch.cat(values, 1)
    return [entry for part in values for entry in part]


def _bind(prober: Prober, replay: Replay, steps: int, prompts: list[str]) -> Kept:
    pad = prober.runner.pad
    zeros = torch.zeros(len(prompts) + len(pad), *replay.shape)
    last = [float("inf"), *replay.boundaries][-1]  # times of the last regime lie below
    iterations = prober.run(
        prompts, steps, latents=lambda j: zeros, stop=lambda j, it: j > 0 and bool(it.time < last)
    )
    later = iterations[1:]  # the latents of the first one are the pipeline's own
    lows = [*replay.boundaries, float("-inf")]
    out: Kept = []
    for regime, low in zip(replay.regimes, lows, strict=True):
        calls = next(it.calls for it in later if it.time >= low)
        later = [it for it in later if it.time < low]
        pairs = zip(regime.calls, calls, strict=True)
        out.append([_kept(plan, call, len(prompts), len(pad)) for plan, call in pairs])
    return out


def _kept(plan: CallPlan, call: Call, prompts: int, pad: int) -> dict[Path, Any]:
    """What belongs to a prompt in a recorded call, and constants that are added to the latents."""
    rows = prompts + pad
    values = {r.path: r.keep(get(call.args, r.path), rows, pad) for r in plan.rows}
    for slot in plan.slots:
        if slot.map.const is not None:
            constant = get(call.args, slot.path).detach().float()
            values[slot.path] = constant.reshape(plan.blocks, rows, -1)[:, :prompts]
    return values
