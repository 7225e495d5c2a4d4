"""Print a Replay as Python that a person could have written."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowrl.policy.replay.arguments import CallPlan, Path, Slot, nest
from flowrl.policy.replay.call import Regime, Replay
from flowrl.policy.replay.classify import name


def describe(replay: Replay, why: str | None = None) -> str:
    """Write the inferred call as source: one branch for each regime, one call for each network
    call, then how outputs combine and become a velocity. why: a sentence about what could not be
    inferred, if the loop's own body is run."""
    coords = replay.coords
    lines = [
        (
            f"# {replay.pipeline}: latents {replay.shape}, {coords.kind} scheduler that predicts"
            f" {coords.prediction}; sigma (n, 1, ...), rows (n,)"
        ),
        "def velocity(x, sigma, cond, rows):",
        (
            "    t = model_time(sigma)  # (n,): exact at the steps of a schedule, on the"
            " scheduler's own curve elsewhere"
        ),
    ]
    if why is not None:
        lines[1:1] = [f"# the loop's own body, one noise level at a time: {why}"]
        body = "prediction = pipeline_loop_body(x, t, prompts[rows])  # guidance included"
        return "\n".join([*lines, f"    {body}", f"    return {_velocity(coords.prediction)}"])
    calls = [call for regime in replay.regimes for call in regime.calls]
    if any(slot.rule == "1/r" for call in calls for slot in call.slots):
        lines.append("    r = sqrt((1 - sigma)**2 + sigma**2)")
    conditions = _conditions(replay.boundaries)
    for condition, regime in zip(conditions, replay.regimes, strict=True):
        lines += [f"    {condition}:"] if condition else []
        indent = "        " if condition else "    "
        lines += [indent + line for line in _regime(regime)]
    return "\n".join([*lines, f"    return {_velocity(coords.prediction)}"])


def _conditions(boundaries: list[float]) -> list[str]:
    """Write the condition before each regime; "" if there is only one."""
    if not boundaries:
        return [""]
    tests = [f"t >= {boundary:g}" for boundary in boundaries]
    return [f"if {tests[0]}", *(f"elif {test}" for test in tests[1:]), "else"]


def _regime(regime: Regime) -> list[str]:
    rule = regime.guidance
    lines = ["out = []"]
    for k, call in enumerate(regime.calls):
        lines += _call(call, k)
    conditional = f"out[{rule.cond}] is the conditional one"
    return [*lines, f"prediction = {rule.describe()}  # {conditional}"]


def _call(call: CallPlan, k: int) -> list[str]:
    """Write call k of an iteration; cond[k][...] holds its arguments of each prompt,
    constants[k][...] those that all rows share."""
    lines = [f"y = {call.module}("]
    for key, value in nest(_arguments(call, k)).items():
        lines += [f"    {line}" for line in f"{key}={_literal(value)},".split("\n")]
    picked = "" if call.out is None or call.out.index is None else ".flatten(1)[:, picked]"
    added = f"out += y.chunk({call.blocks})" if call.blocks > 1 else "out += [y]"
    return [*lines, f")[0]{picked}", added]


def _arguments(call: CallPlan, k: int) -> dict[Path, str]:
    flat: dict[Path, str] = {}
    for slot in call.slots:
        flat[slot.path] = _repeated(_latents(slot), call.blocks)
        if slot.map.const is not None:
            flat[slot.path] += f" + cond[{k}][{name(slot.path)!r}][rows]"
    for time in call.times:
        flat[time.path] = _repeated(time.rule, call.blocks)
    for leaf in call.rows:
        kept = f"cond[{k}][{name(leaf.path)!r}]"
        one = f"{kept}[rows]"
        flat[leaf.path] = f"cat([block[rows] for block in {kept}])" if leaf.blocks > 1 else one
    for path, value in call.shared.items():
        flat[path] = f"constants[{k}][{name(path)!r}]" if isinstance(value, Tensor) else repr(value)
    return flat


def _repeated(text: str, blocks: int) -> str:
    return f"cat([{text}] * {blocks})" if blocks > 1 else text


def _latents(slot: Slot) -> str:
    """Write the latents in the form in which an argument takes them."""
    text, scale = "x / r" if slot.rule == "1/r" else "x", slot.map.scale
    if scale.ndim:
        text = f"scale * {text}"
    elif scale.item() != 1:
        text = f"{scale.item():g} * {text}"
    if slot.map.index is not None:
        shape = ", ".join(map(str, slot.map.shape))
        text = f"({text}).flatten(1)[:, index].reshape(-1, {shape})"
    return text


def _literal(value: Any) -> str:
    """Write nested text as a dict or list literal."""
    if isinstance(value, dict):
        return "{\n" + "".join(f"    {k!r}: {_literal(v)},\n" for k, v in value.items()) + "}"
    return "[" + ", ".join(map(_literal, value)) + "]" if isinstance(value, list) else value


def _velocity(prediction: str) -> str:
    return {
        "flow": "prediction",
        "backward": "-prediction  # it is x0 - eps",
        "epsilon": "(prediction - x) / (1 - sigma)  # eps - x0",
        "sample": "(x - prediction) / sigma  # eps - x0",
        "v_prediction": "prediction / r + (2 * sigma - 1) * x / r**2  # eps - x0",
    }[prediction]
