"""Infer a Replay from probing runs: what each denoiser argument follows, how outputs combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.affine import patterns, solve
from flowrl.policy.replay.arguments import Affine, CallPlan, Rows, Slot, get
from flowrl.policy.replay.bind import stacked
from flowrl.policy.replay.call import Replay
from flowrl.policy.replay.classify import Leaf, differs, fit_time, leaves, name
from flowrl.policy.replay.coords import Coords, FirstStep, TimeMap, place_of
from flowrl.policy.replay.errors import UnreplayableError
from flowrl.policy.replay.outputs import infer_regime
from flowrl.policy.replay.probe import MANY, Prober, always
from flowrl.policy.replay.record import RecordedStep, Runner

CURVE = 100  # number of steps of the run from which a curve of model times is read


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The observations of the probing runs."""

    runs: dict[str, list[RecordedStep]]  # pattern -> iterations of a run with these latents
    # the same for the record's second item, if prompts are bound one at a time
    other: dict[str, list[RecordedStep]]
    more: list[RecordedStep]  # iterations on zeros, with one row more
    times: Tensor  # (J,) model times of the iterations
    sigmas: Tensor  # (J,) fp64 noise levels of the iterations
    coords: Coords  # flow coordinates of the pipeline's scheduler
    rows: int  # number of rows of each run, with those that fix the text length
    alone: bool  # runs have one row, so that no batch axis shows
    streams: int  # number of latents that an iteration moves
    shape: tuple[int, ...]  # shape of one row of latents


def infer(prober: Prober, coords: Coords) -> tuple[Replay, int]:
    """Infer the Replay of prober's pipeline -> it, and the number of steps of the recording (enough
    to see every regime twice)."""
    runner = prober.runner
    zero, segments, steps = _first_runs(prober)
    times = torch.stack([i.time for i in zero])
    prober.begin = place_of(runner.pipe.scheduler, times[0])
    alone = runner.form == "alone"
    shape, rows = prober.shape, prober.count + len(runner.pad)
    seen = Evidence(
        runs={key: _run(prober, prober.count, steps, key) for key in patterns(1, shape)},
        other=_other(prober, steps),
        more=_run(prober, prober.count if alone else 3, steps, "zero"),
        alone=alone,
        times=times,
        sigmas=coords.sigmas_of(runner.pipe.scheduler, times)[:-1],
        coords=coords,
        rows=rows,
        streams=runner.streams,
        shape=shape,
    )
    regimes = []
    for seg in segments:
        plans = [_call(i, seg, seen) for i in range(len(zero[seg[0]].calls))]
        regime = infer_regime(prober, plans, seg, steps, (rows, *shape))
        # a guider asks twice even where there is no negative prompt
        regime.guidance.alike = _alike(zero[seg[0]])
        regimes.append(regime)
    boundaries = _boundaries(runner, segments, times)
    name = type(runner.pipe).__name__
    return Replay(regimes, boundaries, coords, shape, name, alone=alone), steps


def _other(prober: Prober, steps: int) -> dict[str, list[RecordedStep]]:
    if not prober.runner.single:
        return {}
    latents = {key: patterns(1, prober.shape)[key] for key in ("zero", "one")}
    return {
        key: prober.run([prober.record[1]], steps, latents=always(x)) for key, x in latents.items()
    }


def find_coords(prober: Prober) -> Coords:
    """Find the coordinates of the pipeline's scheduler from its step and its times in a run."""
    runner, first = prober.runner, FirstStep()
    coords = Coords(runner.pipe.scheduler)
    iterations = prober.run(prober.rows(prober.count), prober.steps, on_raw=first, unseen=True)
    coords.settle(first.scheduler, first.extra)
    times = torch.stack([it.time for it in iterations])
    sigmas = coords.sigmas_of(first.scheduler, times)[:-1]
    if not coords.time.holds(sigmas, times):
        iterations = prober.run(prober.rows(prober.count), CURVE, unseen=True)
        times = torch.stack([it.time for it in iterations])
        sigmas = coords.sigmas_of(runner.pipe.scheduler, times)[:-1]
        coords.time = TimeMap(sigmas.flip(0), times.flip(0))
    return coords


def _first_runs(prober: Prober) -> tuple[list[RecordedStep], list[list[int]], int]:
    """Run on zeros until every set of networks is used at two or more steps -> (the run, its
    segments, steps)."""
    steps = prober.steps
    while steps <= MANY:
        zero = _run(prober, prober.count, steps, "zero")
        segments = _segments(zero)
        if all(len(seg) >= 2 for seg in segments):
            return zero, segments, steps
        steps *= 2
    raise UnreplayableError(
        f"regimes: a set of networks is used at fewer than two steps of {MANY}; its time and"
        " constants cannot be told apart"
    )


def _run(prober: Prober, count: int, steps: int, key: str) -> list[RecordedStep]:
    """Run `count` items, with the named pattern as latents after every step."""
    rows = count + len(prober.runner.pad)
    x = patterns(rows, prober.shape)[key]
    return prober.run(prober.rows(count), steps, latents=always(x))


def _segments(run: list[RecordedStep]) -> list[list[int]]:
    """Group consecutive iterations that make the same calls. The first iteration is left out: its
    latents are the pipeline's own."""
    out: list[list[int]] = []
    last = None
    for j, it in enumerate(run[1:], 1):
        kind = [(call.module, _shapes(call.args)) for call in it.calls]
        if kind != last:
            out.append([])
        out[-1].append(j)
        last = kind
    if not out:
        raise UnreplayableError(
            "the loop makes a single iteration; at least three are needed to infer it"
        )
    return out


def _shapes(args: dict[str, Any]) -> list[tuple[str, tuple[int, ...] | None]]:
    """List the arguments, with the shapes of those that are tensors."""
    return [(k, tuple(v.shape) if isinstance(v, Tensor) else None) for k, v in args.items()]


def _call(i: int, seg: list[int], seen: Evidence) -> CallPlan:
    """Classify every argument of call i of a regime, whose iterations are seg."""
    zero, more = (run[seg[0]].calls[i] for run in (seen.runs["zero"], seen.more))
    slots, found, shared, times = [], [], {}, []
    for leaf in leaves(zero.args, more.args, seen.rows, seen.rows + (not seen.alone)):
        over_time = [get(seen.runs["zero"][j].calls[i].args, leaf.path) for j in seg]
        ones = get(seen.runs["one"][seg[0]].calls[i].args, leaf.path)
        varying = any(differs(over_time[0], value) for value in over_time[1:])
        holds_x = differs(over_time[0], ones)
        if holds_x:
            slots.append(_slot(leaf, i, seg, seen))
        elif varying:
            at, batched = (seen.times[seg], seen.sigmas[seg]), leaf.axis is not None
            times.append(fit_time(leaf.path, over_time, *at, batched))
        elif leaf.axis is not None:
            found.append(leaf)
        else:
            shared[leaf.path] = over_time[0]
    blocks, repeats = _layout(slots, zero.module)
    rows = [_rows(leaf, get(zero.args, leaf.path), seen.rows, blocks, repeats) for leaf in found]
    if seen.alone and blocks > 1:  # shared tensors with one entry for each branch
        lead = {path: v for path, v in shared.items() if isinstance(v, Tensor) and v.ndim}
        rows += [Rows(path, 0, blocks, 1) for path, v in lead.items() if len(v) == blocks]
        shared = {path: v for path, v in shared.items() if path not in {r.path for r in rows}}
    identity = Affine(1, 1, seen.shape, None, torch.tensor(1.0, dtype=torch.float64), None)
    return CallPlan(zero.module, blocks, slots, times, rows, shared, identity, seen.streams)


def _layout(slots: list[Slot], module: str) -> tuple[int, int]:
    """Find (blocks, repeats) of the batch in a call: all arguments with latents agree on them."""
    if not slots:
        raise UnreplayableError(
            f"no argument of {module} holds the latents that scheduler.step returned"
        )
    layouts = {(slot.map.blocks, slot.map.repeats) for slot in slots}
    if len(layouts) > 1:
        raise UnreplayableError(
            f"arguments {[name(slot.path) for slot in slots]} order the rows of the batch"
            f" differently: {sorted(layouts)}"
        )
    return layouts.pop()


def _alike(step: RecordedStep) -> bool:
    """Whether an iteration calls one network several times, always with the same arguments."""
    first, *others = step.calls
    return bool(others) and all(
        call.module == first.module
        and call.args.keys() == first.args.keys()
        and not differs(call.args, first.args)
        for call in others
    )


def _slot(leaf: Leaf, i: int, seg: list[int], seen: Evidence) -> Slot:
    """Infer where the latents lie in an argument, and how their scale follows sigma (in flow
    coordinates the scale is constant, or 1/r)."""
    what, sigmas = f"argument {name(leaf.path)}", seen.sigmas[seg]
    if leaf.axis != 0 and not seen.alone:
        raise UnreplayableError(
            f"{what} holds the latents, but not with the batch on its first axis"
        )

    def value(key: str, j: int) -> Tensor:
        return stacked(get(seen.runs[key][j].calls[i].args, leaf.path))

    # the place of the latents: one affine map, the same at all times
    values = {key: value(key, seg[0]) for key in seen.runs}
    found = solve(values, seen.rows, seen.shape, what)
    # the scale of the latents at each time; the right rule leaves a constant
    zeros, ones = ([value(key, j).double() for j in seg] for key in ("zero", "one"))
    slope = torch.stack([(b - a).abs().max().cpu() for a, b in zip(zeros, ones, strict=True)])
    level = slope * seen.coords.scale(sigmas)
    close = 1e-4 if values["zero"].dtype == torch.float32 else 2e-2
    for rule, data in (("1", 1.0), ("1/r", 1.0), ("1/r", _data_std(level, sigmas))):
        dtype = values["zero"].dtype
        slot = Slot(leaf.path, found, rule, dtype, is_list=leaf.is_list, data=data)
        ratio = level / slot.factor(sigmas)
        if (ratio / ratio[0] - 1).abs().max() < close:
            scale = found.scale * (ratio[0] / slope[0])
            one = scale.ndim == 0 and abs(scale.item() - 1) < close
            found.scale = torch.tensor(1.0, dtype=torch.float64) if one else scale
            slot.moving = _moves(slot, zeros, sigmas, close)
            slot.own = found.scale.ndim > 0 and _is_own(slot, slope[0], i, seg[0], seen)
            return slot
    raise UnreplayableError(
        f"{what}: the scale of the latents follows sigma in an unknown way,"
        f" {[round(v, 5) for v in level.tolist()]}"
    )


def _data_std(level: Tensor, sigmas: Tensor) -> float:
    """Fit d in level ~ 1 / sqrt(d^2 (1 - s)^2 + s^2), as EDM scales its networks' inputs."""
    matrix = torch.stack([(1 - sigmas) ** 2, sigmas**2], 1)
    both = torch.linalg.lstsq(matrix, (1 / level**2)[:, None]).solution[:, 0]
    ratio = (both[0] / both[1]).item()
    return round(ratio**0.5, 6) if 0 < ratio < 1e6 else 1.0


def _is_own(slot: Slot, slope: Tensor, i: int, j: int, seen: Evidence) -> bool:
    """Whether another item's argument reads other latents (because its mask differs)."""
    if not seen.other:
        return False
    zero, one = (
        stacked(get(seen.other[key][j].calls[i].args, slot.path)).double()
        for key in ("zero", "one")
    )
    read = (one - zero).reshape(slot.map.blocks, -1, slot.map.scale.numel())[0, 0]
    if torch.equal(read != 0, slot.map.scale.to(read.device) != 0):
        return False
    # where a mask hides latents of one prompt, their places are known if all lie in a row
    numel, places, on = torch.Size(seen.shape).numel(), torch.arange(len(read)), slot.map.scale != 0
    index = places if slot.map.index is None else slot.map.index
    offsets = (index - places)[on]
    if not (offsets == offsets[0]).all():
        raise UnreplayableError(
            f"argument {name(slot.path)} reads other latents for other prompts, and it is not known"
            " where from"
        )
    slot.map.index = (places + offsets[0]).clamp(0, numel - 1)
    return True


def _moves(slot: Slot, zeros: list[Tensor], sigmas: Tensor, close: float) -> bool:
    """Whether the constant added to the latents follows sigma; it must be c0 + c1 sigma then.
    zeros: the argument at these sigmas if the latents are zero."""
    if all(torch.equal(zeros[0], other) for other in zeros[1:]):
        return False
    over = [z / slot.factor(s).item() for z, s in zip(zeros, sigmas, strict=True)]
    slope = (over[-1] - over[0]) / (sigmas[-1] - sigmas[0]).item()
    line = [over[0] + slope * (s - sigmas[0]).item() for s in sigmas]
    pairs = zip(line, over, strict=True)
    straight = all((on - value).abs().max() <= close * value.abs().max() for on, value in pairs)
    if slot.map.const is None or not straight:
        raise UnreplayableError(f"argument {name(slot.path)} mixes latents and time")
    return True


def _rows(leaf: Leaf, value: Any, rows: int, blocks: int, repeats: int) -> Rows:
    """Infer how the entries of an argument lie: in blocks and repeats like the latents, else with
    another number of repeats, or else in one block."""
    axis = leaf.axis or 0
    count = (len(value) if leaf.is_list else value.shape[axis]) // rows
    if count != blocks * repeats:
        blocks, repeats = (blocks, count // blocks) if count % blocks == 0 else (1, count)
    return Rows(leaf.path, axis, blocks, repeats, leaf.is_list)


def _boundaries(runner: Runner, segments: list[list[int]], times: Tensor) -> list[float]:
    """Find the model times at which regimes change. The recording only shows between which times;
    the pipeline's config or a hint gives the number."""
    out: list[float] = []
    config = getattr(runner.pipe.config, "boundary_ratio", None)
    for before, after in zip(segments, segments[1:], strict=False):
        high, low = times[before[-1]].item(), times[after[0]].item()
        value = runner.hints.get("boundary")
        if value is None and config is not None:
            value = config * runner.pipe.scheduler.config.num_train_timesteps
        if value is None or not low < value <= high:
            raise UnreplayableError(
                f"regimes: the networks change between times {high:g} and {low:g}, and the boundary"
                f" is {value}; name it with hints boundary=<time>"
            )
        out.append(float(value))
    return out
