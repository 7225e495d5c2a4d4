"""Encode prompts for a Replay: stubbed runs show what each prompt gives to the networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowrl.policy.replay.arguments import SCALE, CallPlan, Cond, Group, Path, Slot, get
from flowrl.policy.replay.blame import short
from flowrl.policy.replay.call import Replay
from flowrl.policy.replay.classify import differs
from flowrl.policy.replay.errors import CallError, UnreplayableError
from flowrl.policy.replay.items import PromptItem
from flowrl.policy.replay.probe import Prober
from flowrl.policy.replay.record import DenoiserCall, RecordedStep

Values = list[list[dict[Path, Any]]]  # values by [regime][call][path], see Group
Recorded = list[tuple[RecordedStep, Tensor]]  # iterations of a regime, each with its sigma
ENCODING = "while prompts and conditions are encoded"
CHUNK = 64  # number of prompts that are encoded in one run


@dataclass(frozen=True, eq=False)
class Bound:
    """The arguments that one run recorded for its prompts, by regime and call."""

    kept: Values  # arguments that belong to each prompt
    shared: Values  # arguments that all of them share
    count: int  # number of prompts

    def fits(self, other: Bound) -> bool:
        """Whether the prompts of both can be rows of one call."""
        if differs(self.shared, other.shared):
            return False
        return _shapes(self.kept) == _shapes(other.kept)


def bind(
    prober: Prober, replay: Replay, steps: int, items: Sequence[PromptItem], *, grad: bool = False
) -> Cond:
    """Encode items by stubbed runs with zero latents: CHUNK prompts at a time, or one by one if the
    pipeline takes one. grad: tensors that the pipeline computes from prompts keep their graph."""
    size = 1 if prober.runner.single else CHUNK
    chunks = [items[k : k + size] for k in range(0, len(items), size)]
    parts = [_bind(prober, replay, steps, some, grad=grad) for some in chunks]
    apart = prober.runner.hints.get("apart")
    groups: list[list[Bound]] = []
    places: list[tuple[int, int]] = []
    for part in parts:
        fitting = (g for g, own in enumerate(groups) if own[0].fits(part) and not apart)
        which = next(fitting, len(groups))
        if which == len(groups):
            groups.append([])
        first = sum(own.count for own in groups[which])
        groups[which].append(part)
        places += [(which, first + k) for k in range(part.count)]
    made = [Group(_joined([own.kept for own in g]), g[0].shared) for g in groups]
    return Cond(tuple(items), made, places)


def _joined(parts: list[Values]) -> Values:
    """Join the values of several runs, as if one run had encoded all prompts."""
    if len(parts) == 1:
        return parts[0]
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
    return [[row for part in blocks for row in part] for blocks in zip(*values, strict=True)]


def _shapes(kept: Values) -> list[Any]:
    """List the shapes of one prompt's entries in all kept values."""
    return [
        [(path, *_shape(value)) for path, value in call.items()]
        for regime in kept
        for call in regime
    ]


def _shape(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return (value.shape[0], *value.shape[2:])
    return (type(value),)


def _bind(
    prober: Prober, replay: Replay, steps: int, items: Sequence[PromptItem], *, grad: bool
) -> Bound:
    rows = len(items) + len(prober.runner.pad)
    zeros = torch.zeros(rows, *replay.shape)
    slots = [slot for plans in replay.regimes for c in plans.calls for slot in c.slots]
    moving = any(slot.moving for slot in slots)
    last = [float("inf"), *replay.boundaries][-1]  # times of the last regime lie below this one
    try:
        iterations = prober.run(
            items,
            steps,
            latents=lambda j: zeros,
            stop=lambda j, it: not moving and j > 0 and bool(it.time < last),
            grad=grad,
            doing=ENCODING,
        )
    except CallError as error:
        if other := _other_size(prober.example, items):
            raise CallError(other) from error
        raise
    if tuple(iterations[0].sample.shape[1:]) != replay.shape:
        raise UnreplayableError(
            f"latents of {tuple(iterations[0].sample.shape[1:])} for these conditions, and of"
            f" {replay.shape} for those that the loop was recorded with; give the pipeline height"
            " and width, and conditions of one size"
        )
    if not replay.regimes:  # nothing was inferred: the pipeline's own body is run
        return Bound([], [], len(items))
    times = torch.stack([it.time for it in iterations])
    sigmas = replay.coords.sigmas_of(prober.runner.pipe.scheduler, times)
    # the first iteration starts from the pipeline's own latents
    later = list(zip(iterations, sigmas[:-1], strict=True))[1:]
    ones: list[RecordedStep] = []
    if any(slot.own for slot in slots):
        ones = prober.run(items, steps, latents=lambda j: zeros + 1, doing=ENCODING)
    lows = [*replay.boundaries, float("-inf")]
    kept: Values = []
    shared: Values = []
    for regime, low in zip(replay.regimes, lows, strict=True):
        own = [(it, sigma) for it, sigma in later if it.time >= low]
        later = [(it, sigma) for it, sigma in later if it.time < low]
        sizes = (len(items), len(prober.runner.pad))
        calls = [_call(replay, plan, k, own, sizes) for k, plan in enumerate(regime.calls)]
        for k, plan in enumerate(regime.calls):
            for slot in plan.slots:
                if slot.own:
                    one = next(it for it in ones[1:] if it.time == own[0][0].time)
                    calls[k][0][(SCALE, *slot.path)] = _scale(replay, slot, k, own[0], one)
        kept.append([c[0] for c in calls])
        shared.append([c[1] for c in calls])
    return Bound(kept, shared, len(items))


def _other_size(example: Mapping[str, Any], items: Sequence[PromptItem]) -> str:
    """Name the first picture whose size is not the example's; "": there is none."""
    for item in items:
        for name, value in item.conditions.items():
            pair = (value, example.get(name))
            sizes = [short(picture) for picture in pair if isinstance(picture, Image.Image)]
            if len(set(sizes)) == 2:
                return (
                    f"{name} has {sizes[0]}, and that of the first prompt {sizes[1]}; give this"
                    " pipeline pictures of one size"
                )
    return ""


def _call(
    replay: Replay, plan: CallPlan, k: int, own: Recorded, sizes: tuple[int, int]
) -> tuple[dict[Path, Any], dict[Path, Any]]:
    """Return (arguments of each prompt, shared ones) of call k in a regime's iterations."""
    prompts, pad = sizes
    call: DenoiserCall = own[0][0].calls[k]
    values = {r.path: r.keep(get(call.args, r.path), prompts + pad, pad) for r in plan.rows}
    for slot in plan.slots:
        if slot.map.const is not None:
            values[slot.path] = _constant(replay, slot, k, own)[:, :prompts]
            _check_size(slot, values[slot.path].shape[-1])
    return values, {path: get(call.args, path) for path in plan.shared}


def _check_size(slot: Slot, size: int) -> None:
    """ValueError if conditions give the network more, or less, than the recorded ones."""
    assert slot.map.const is not None
    recorded = slot.map.const.shape[-1]
    if size != recorded:
        raise ValueError(
            f"conditions that give the network {size} numbers beside the latents, where those that"
            f" the loop was recorded with give {recorded}; make the pictures of all prompts one"
            " size"
        )


def _scale(
    replay: Replay, slot: Slot, k: int, zero: tuple[RecordedStep, Tensor], one: RecordedStep
) -> Tensor:
    """Find the scale with which each prompt's argument reads latents: (blocks, rows, D)."""
    blocks, repeats = slot.map.blocks, slot.map.repeats
    at, sigma = zero
    with_zero, with_one = (stacked(get(it.calls[k].args, slot.path)).float() for it in (at, one))
    slope = (with_one - with_zero) * (replay.coords.scale(sigma) / slot.factor(sigma)).item()
    return slope.reshape(blocks, len(slope) // (blocks * repeats), -1)


def _constant(replay: Replay, slot: Slot, k: int, own: Recorded) -> Tensor:
    """Find the constant added to latents: (blocks, rows, D); (blocks, rows, 2, D) if it moves."""
    blocks, repeats = slot.map.blocks, slot.map.repeats

    def added(it: RecordedStep) -> Tensor:
        value = stacked(get(it.calls[k].args, slot.path)).float()
        return value.reshape(blocks, len(value) // (blocks * repeats), -1)

    if not slot.moving:
        return added(own[0][0])
    (first, s0), (last, s1) = (
        (added(it).double() / slot.factor(sigma).item(), sigma.item())
        for it, sigma in (own[0], own[-1])
    )
    slope = (last - first) / (s1 - s0)
    return torch.stack([first - slope * s0, slope], 2).float()


def stacked(value: Any) -> Tensor:
    """Return a tensor unchanged, and a list of tensors, one for each row, as one tensor."""
    return torch.stack(list(value)) if isinstance(value, list | tuple) else value
