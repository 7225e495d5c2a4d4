"""From probing runs to a Replay: regimes, where latents and time go in, what belongs to a prompt,
how outputs combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.affine import Affine, patterns, solve
from flowrl.policy.replay.arguments import Rows, Slot
from flowrl.policy.replay.call import CallPlan, Regime, Replay
from flowrl.policy.replay.classify import Leaf, differs, fit_time, get, leaves, name
from flowrl.policy.replay.coords import Coords, radius
from flowrl.policy.replay.guidance import fit
from flowrl.policy.replay.probe import RECORD, Prober
from flowrl.policy.replay.record import Iteration, Runner, UnreplayableError

MORE = [*RECORD, RECORD[0]]  # one row more, no longer text


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the probing runs showed. runs[pattern]: iterations with these latents; more: zeros with
    one row more; times, sigmas (J,)."""

    runs: dict[str, list[Iteration]]
    more: list[Iteration]
    times: Tensor
    sigmas: Tensor
    coords: Coords
    rows: int
    shape: tuple[int, ...]


def infer(prober: Prober, coords: Coords) -> tuple[Replay, int]:
    """The Replay of prober's pipeline, and the number of steps at which it was recorded (enough for
    every regime to be seen twice)."""
    runner, steps = prober.runner, 8
    _fix_text_length(prober, steps)
    while True:
        zero = _run(prober, RECORD, steps, "zero")
        segments = _segments(zero)
        if all(len(j) >= 2 for j in segments):
            break
        steps *= 2
        if steps > 64:
            raise UnreplayableError(
                "regimes: a set of networks is used at fewer than two steps of 64; its time and"
                " constants cannot be told apart"
            )
    times = torch.stack([i.time for i in zero])
    shape, rows = tuple(zero[0].sample.shape[1:]), len(RECORD) + len(runner.pad)
    if zero[0].sample.shape[0] != rows:
        raise UnreplayableError(
            f"the loop holds {zero[0].sample.shape[0]} latents for {rows} prompts; leave"
            " num_images_per_prompt at 1"
        )
    seen = Evidence(
        runs={key: _run(prober, RECORD, steps, key) for key in patterns(1, shape)},
        more=_run(prober, MORE, steps, "zero"),
        times=times,
        sigmas=coords.sigmas_of(runner.pipe.scheduler, times)[:-1],
        coords=coords,
        rows=rows,
        shape=shape,
    )
    calls = [[_call(i, seg, seen) for i in range(len(zero[seg[0]].calls))] for seg in segments]
    regimes = [
        _regime(prober, plans, seg, steps, shape, rows)
        for plans, seg in zip(calls, segments, strict=True)
    ]
    return (
        Replay(
            regimes, _boundaries(runner, segments, times), coords, shape, type(runner.pipe).__name__
        ),
        steps,
    )


def _run(prober: Prober, prompts: list[str], steps: int, key: str) -> list[Iteration]:
    """A run whose latents are the named pattern after every step."""
    rows = len(prompts) + len(prober.runner.pad)
    made: dict[str, Tensor] = {}

    def latents(j: int) -> Tensor:
        return made["x"]

    def first(j: int, it: Iteration) -> bool:
        if not made:
            made["x"] = patterns(rows, tuple(it.sample.shape[1:]))[key]
        return False

    return prober.run(prompts, steps, latents=latents, stop=first)


def _fix_text_length(prober: Prober, steps: int) -> None:
    """Where the text length follows the longest prompt of the batch, add one overlong and one empty
    prompt to every run: one length, always masked."""
    runner = prober.runner
    default = runner.parameters.get("max_sequence_length")
    tokens = runner.kwargs.get("max_sequence_length") or (default.default if default else 512)
    filler = " ".join(["word"] * (int(tokens) + 8))
    short, long = (
        prober.run(p, steps, stop=lambda j, it: True)[0] for p in (RECORD, [RECORD[0], filler])
    )
    for a, b in zip(short.calls, long.calls, strict=True):
        shapes = [
            [tuple(v.shape) for v in c.args.values() if isinstance(v, Tensor)] for c in (a, b)
        ]
        if shapes[0] != shapes[1]:
            runner.pad = (filler, "")
    prober.templates.clear()


def _segments(run: list[Iteration]) -> list[list[int]]:
    """Consecutive iterations (from 1 on: the first one's latents are not ours) that make the same
    calls."""
    out: list[list[int]] = []
    last = None
    for j, it in enumerate(run[1:], 1):
        kind = [
            (
                c.module,
                [(k, tuple(v.shape) if isinstance(v, Tensor) else None) for k, v in c.args.items()],
            )
            for c in it.calls
        ]
        if kind != last:
            out.append([])
        out[-1].append(j)
        last = kind
    if not out:
        raise UnreplayableError(
            "the loop makes a single iteration; at least three are needed to infer it"
        )
    return out


def _call(i: int, seg: list[int], seen: Evidence) -> CallPlan:
    """Classify every argument of call i of a regime, whose iterations are seg."""
    j0, zero = seg[0], seen.runs["zero"]
    args = {key: run[j0].calls[i].args for key, run in seen.runs.items()}
    slots, found, shared, time = [], [], {}, []
    for leaf in leaves(args["zero"], seen.more[j0].calls[i].args, seen.rows, seen.rows + 1):
        over_time = [get(zero[j].calls[i].args, leaf.path) for j in seg]
        varying = any(differs(over_time[0], v) for v in over_time[1:])
        holds_x = differs(over_time[0], get(args["one"], leaf.path))
        if varying and holds_x:
            raise UnreplayableError(f"argument {name(leaf.path)} mixes latents and time")
        if holds_x:
            slots.append(_slot(leaf, i, seg, seen))
        elif varying:
            time.append(
                fit_time(
                    leaf.path, over_time, seen.times[seg], seen.sigmas[seg], leaf.axis is not None
                )
            )
        elif leaf.axis is not None:
            found.append(leaf)
        else:
            shared[leaf.path] = over_time[0]
    if not slots:
        raise UnreplayableError(
            f"no argument of {zero[j0].calls[i].module} holds the latents that scheduler.step"
            " returned"
        )
    layouts = {(s.map.blocks, s.map.repeats) for s in slots}
    if len(layouts) > 1:
        raise UnreplayableError(
            f"arguments {[name(s.path) for s in slots]} order the rows of the batch differently:"
            f" {sorted(layouts)}"
        )
    blocks, repeats = layouts.pop()
    per_row = [
        _rows(leaf, get(args["zero"], leaf.path), seen.rows, blocks, repeats) for leaf in found
    ]
    identity = Affine(1, 1, seen.shape, None, torch.tensor(1.0, dtype=torch.float64), None)
    return CallPlan(zero[j0].calls[i].module, blocks, slots, time, per_row, shared, identity)


def _slot(leaf: Leaf, i: int, seg: list[int], seen: Evidence) -> Slot:
    """Layout of the latents in an argument, and how their scale follows sigma (in flow coordinates
    it is constant, or 1/r)."""
    what, sigmas = f"argument {name(leaf.path)}", seen.sigmas[seg]
    if leaf.axis != 0 or leaf.is_list:
        raise UnreplayableError(
            f"{what} holds the latents, but not with the batch on its first axis"
        )
    values = {key: get(run[seg[0]].calls[i].args, leaf.path) for key, run in seen.runs.items()}
    found = solve(values, seen.rows, seen.shape, what)
    ends = [
        [get(seen.runs[key][j].calls[i].args, leaf.path).double() for j in seg]
        for key in ("zero", "one")
    ]
    slope = torch.stack([(b - a).abs().max().cpu() for a, b in zip(*ends, strict=True)])
    level = slope * seen.coords.scale(sigmas)
    close = 1e-4 if values["zero"].dtype == torch.float32 else 2e-2
    for rule, factor in (("1", torch.ones_like(sigmas)), ("1/r", 1 / radius(sigmas))):
        ratio = level / factor
        if (ratio / ratio[0] - 1).abs().max() < close:
            scale = found.scale * (ratio[0] / slope[0])
            one = scale.ndim == 0 and abs(scale.item() - 1) < close
            found.scale = torch.tensor(1.0, dtype=torch.float64) if one else scale
            return Slot(leaf.path, found, rule, values["zero"].dtype)
    raise UnreplayableError(
        f"{what}: the scale of the latents follows sigma in an unknown way,"
        f" {[round(v, 5) for v in level.tolist()]}"
    )


def _rows(leaf: Leaf, value: Any, rows: int, blocks: int, repeats: int) -> Rows:
    count = (len(value) if leaf.is_list else value.shape[leaf.axis or 0]) // rows
    axis = leaf.axis or 0
    if count == blocks * repeats:
        return Rows(leaf.path, axis, blocks, repeats, leaf.is_list)
    return Rows(
        leaf.path,
        axis,
        *((blocks, count // blocks) if count % blocks == 0 else (1, count)),
        leaf.is_list,
    )


def _regime(
    prober: Prober,
    plans: list[CallPlan],
    seg: list[int],
    steps: int,
    shape: tuple[int, ...],
    rows: int,
) -> Regime:
    """Output layout and guidance rule, from stubbed outputs: first equal in all branches, then
    independent."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, *shape, generator=generator)

    def run(outputs) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Outputs in the order of the calls, and predictions, of the regime's iterations."""
        log: list[Tensor] = []
        marks = [0]

        def answer(key, size):
            log.append(outputs(key, size))
            return log[-1]

        def stop(j, it):
            marks.append(len(log))
            return j == seg[-1]

        its = prober.run(RECORD, steps, latents=lambda j: x, outputs=answer, stop=stop)
        return [log[marks[j] : marks[j + 1]] for j in seg], [
            its[j].prediction.float().cpu() for j in seg
        ]

    for plan in plans:
        plan.out = _out_map(run, plan, shape, rows)
    raw, predictions = run(lambda key, size: torch.randn(size, generator=generator))
    samples = []
    for outs, prediction in zip(raw, predictions, strict=True):
        pieces = [
            p
            for plan, out in zip(plans, outs, strict=True)
            for p in plan.pieces(out, plan.blocks, rows, shape)
        ]
        samples.append((pieces, prediction))
    return Regime(plans, fit(samples, prober.runner.hints.get("guidance")))


def _out_map(run, plan: CallPlan, shape: tuple[int, ...], rows: int) -> Affine:
    """Which entries of an output row make the prediction; equal outputs in all branches pass any
    guidance up to a sign."""
    repeats, numel = plan.slots[0].map.repeats, torch.Size(shape).numel()

    def equal(pattern):  # (rows, repeats, *rest) -> (blocks * rows * repeats, *rest)
        return lambda key, size: (
            pattern(size).flatten(0, 1).repeat(size[0] // (rows * repeats), *[1] * (len(size) - 1))
        )

    noise: dict[tuple, Tensor] = {}

    def draw(size):
        size = tuple(size[1:])
        if size not in noise:
            noise[size] = torch.randn(
                rows, repeats, *size, generator=torch.Generator().manual_seed(2)
            )
        return noise[size]

    _, predictions = run(equal(draw))
    one = next(iter(noise.values())).reshape(rows, -1)
    flat = predictions[0].reshape(rows, -1)
    if (
        one.shape == flat.shape
        and min((flat - one).abs().max(), (flat + one).abs().max()) < 1e-3 * one.abs().max()
    ):
        return plan.out
    size = tuple(next(iter(noise)))
    named = {
        k: run(equal(lambda _, k=k: patterns(rows, (repeats, *size))[k]))[1][0]
        for k in patterns(1, (repeats, *size))
    }
    found = solve(named, rows, (repeats, *size), f"output of {plan.module}")
    if (
        found.scale.ndim
        or found.const is not None
        or found.blocks * found.repeats != 1
        or found.scale.abs().item() - 1 > 1e-3
        or len(found.shape) < 1
    ):
        raise UnreplayableError(
            f"output of {plan.module}: it is not a selection of entries, so it cannot be mapped to"
            f" {numel} latents"
        )
    return found


def _boundaries(runner: Runner, segments: list[list[int]], times: Tensor) -> list[float]:
    """Model times at which regimes change. Recording only brackets them; the pipeline's config or a
    hint names them."""
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
