"""Print a Replay as the Python a person would have written."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowrl.policy.replay.arguments import Path, nest
from flowrl.policy.replay.call import CallPlan, Regime, Replay
from flowrl.policy.replay.classify import name


def describe(replay: Replay) -> str:
    """Source of the inferred call: one branch a regime, one call a network call, then how outputs
    combine and become a velocity."""
    c = replay.coords
    lines = [
        (
            f"# {replay.pipeline}: latents {replay.shape}, {c.kind} scheduler that predicts"
            f" {c.prediction}; sigma (n, 1, ...), rows (n,)"
        ),
        "def velocity(x, sigma, cond, rows):",
    ]
    lines.append(
        "    t = model_time(sigma)  # (n,): exact at the steps of a schedule, on the scheduler's"
        " own curve elsewhere"
    )
    if any(s.rule == "1/r" for reg in replay.regimes for call in reg.calls for s in call.slots):
        lines.append("    r = sqrt((1 - sigma)**2 + sigma**2)")
    for k, regime in enumerate(replay.regimes):
        pad = "    "
        if replay.boundaries:
            word = "if" if k == 0 else "elif" if k < len(replay.boundaries) else "else"
            lines.append(
                f"    {word}{f' t >= {replay.boundaries[k]:g}' if k < len(replay.boundaries) else ''}:"
            )
            pad = "        "
        lines += [pad + line for line in _regime(regime)]
    lines.append(f"    return {_velocity(c.prediction)}")
    return "\n".join(lines)


def _regime(regime: Regime) -> list[str]:
    lines = ["out = []"]
    for k, call in enumerate(regime.calls):
        lines += _call(call, k)
    return [
        *lines,
        (
            f"prediction = {regime.guidance.describe()}  # out[{regime.guidance.cond}] is the"
            " conditional one"
        ),
    ]


def _call(call: CallPlan, k: int) -> list[str]:
    """call k of an iteration; cond[k][...] holds what it takes per prompt, constants[k][...] what
    all rows share."""
    flat: dict[Path, str] = {}
    for slot in call.slots:
        text = "x / r" if slot.rule == "1/r" else "x"
        if slot.map.scale.ndim or slot.map.scale.item() != 1:
            text = (
                f"scale * {text}" if slot.map.scale.ndim else f"{slot.map.scale.item():g} * {text}"
            )
        if slot.map.index is not None:
            text = (
                f"({text}).flatten(1)[:, index].reshape(-1, {', '.join(map(str, slot.map.shape))})"
            )
        flat[slot.path] = f"cat([{text}] * {call.blocks})" if call.blocks > 1 else text
        if slot.map.const is not None:
            flat[slot.path] += f" + cond[{k}][{name(slot.path)!r}][rows]"
    for time in call.times:
        flat[time.path] = f"cat([{time.rule}] * {call.blocks})" if call.blocks > 1 else time.rule
    for leaf in call.rows:
        text = f"cond[{k}][{name(leaf.path)!r}]"
        flat[leaf.path] = (
            f"cat([block[rows] for block in {text}])" if leaf.blocks > 1 else f"{text}[rows]"
        )
    for path, value in call.shared.items():
        flat[path] = f"constants[{k}][{name(path)!r}]" if isinstance(value, Tensor) else repr(value)
    lines = [f"y = {call.module}("]
    for key, value in nest(flat).items():
        lines += [f"    {line}" for line in f"{key}={_literal(value)},".split("\n")]
    picked = "" if call.out.index is None else ".flatten(1)[:, picked]"
    return [
        *lines,
        f")[0]{picked}",
        f"out += y.chunk({call.blocks})" if call.blocks > 1 else "out += [y]",
    ]


def _literal(value: Any) -> str:
    """Nested text as a dict or list literal."""
    if isinstance(value, dict):
        return "{\n" + "".join(f"    {k!r}: {_literal(v)},\n" for k, v in value.items()) + "}"
    return "[" + ", ".join(map(_literal, value)) + "]" if isinstance(value, list) else value


def _velocity(prediction: str) -> str:
    return {
        "flow": "prediction",
        "epsilon": "(prediction - x) / (1 - sigma)  # eps - x0",
        "sample": "(x - prediction) / sigma  # eps - x0",
        "v_prediction": "prediction / r + (2 * sigma - 1) * x / r**2  # eps - x0",
    }[prediction]
