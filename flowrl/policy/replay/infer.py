"""From probing runs to a Replay: what each argument of a denoiser follows, how outputs combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.affine import patterns, solve
from flowrl.policy.replay.arguments import Affine, CallPlan, Rows, Slot, get
from flowrl.policy.replay.call import Regime, Replay
from flowrl.policy.replay.classify import Leaf, differs, fit_time, leaves, name
from flowrl.policy.replay.coords import Coords, radius
from flowrl.policy.replay.guidance import fit
from flowrl.policy.replay.probe import RECORD, Key, Prober
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
    runner = prober.runner
    _fix_text_length(prober, 8)
    zero, segments, steps = _first_runs(prober)
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
    regimes = []
    for seg in segments:
        plans = [_call(i, seg, seen) for i in range(len(zero[seg[0]].calls))]
        regimes.append(_regime(prober, plans, seg, steps, (rows, *shape)))
    boundaries = _boundaries(runner, segments, times)
    return Replay(regimes, boundaries, coords, shape, type(runner.pipe).__name__), steps


def _first_runs(prober: Prober) -> tuple[list[Iteration], list[list[int]], int]:
    """A run on zeros with every set of networks at two steps or more: (it, its segments, steps)."""
    steps = 8
    while steps <= 64:
        zero = _run(prober, RECORD, steps, "zero")
        segments = _segments(zero)
        if all(len(seg) >= 2 for seg in segments):
            return zero, segments, steps
        steps *= 2
    raise UnreplayableError(
        "regimes: a set of networks is used at fewer than two steps of 64; its time and constants"
        " cannot be told apart"
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
    """Arguments with the shapes of those that are tensors."""
    return [(k, tuple(v.shape) if isinstance(v, Tensor) else None) for k, v in args.items()]


def _call(i: int, seg: list[int], seen: Evidence) -> CallPlan:
    """Classify every argument of call i of a regime, whose iterations are seg."""
    zero, more = (run[seg[0]].calls[i] for run in (seen.runs["zero"], seen.more))
    slots, found, shared, times = [], [], {}, []
    for leaf in leaves(zero.args, more.args, seen.rows, seen.rows + 1):
        over_time = [get(seen.runs["zero"][j].calls[i].args, leaf.path) for j in seg]
        ones = get(seen.runs["one"][seg[0]].calls[i].args, leaf.path)
        varying = any(differs(over_time[0], value) for value in over_time[1:])
        holds_x = differs(over_time[0], ones)
        if varying and holds_x:
            raise UnreplayableError(f"argument {name(leaf.path)} mixes latents and time")
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
    identity = Affine(1, 1, seen.shape, None, torch.tensor(1.0, dtype=torch.float64), None)
    return CallPlan(zero.module, blocks, slots, times, rows, shared, identity)


def _layout(slots: list[Slot], module: str) -> tuple[int, int]:
    """(blocks, repeats) of the batch in a call, the same in all arguments that hold latents."""
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
    zeros, ones = (
        [get(seen.runs[key][j].calls[i].args, leaf.path).double() for j in seg]
        for key in ("zero", "one")
    )
    slope = torch.stack([(b - a).abs().max().cpu() for a, b in zip(zeros, ones, strict=True)])
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
    """How an argument with entries per row is laid out: like the latents, else with repeats of its
    own, else in one block."""
    axis = leaf.axis or 0
    count = (len(value) if leaf.is_list else value.shape[axis]) // rows
    if count != blocks * repeats:
        blocks, repeats = (blocks, count // blocks) if count % blocks == 0 else (1, count)
    return Rows(leaf.path, axis, blocks, repeats, leaf.is_list)


Stub = Callable[[Key, tuple[int, ...]], Tensor]  # answers a network, see Prober.run


@dataclass(eq=False)
class OutputProbe:
    """Stubbed runs through a regime, whose iterations are seg, in which we choose the outputs."""

    prober: Prober
    seg: list[int]
    steps: int
    x: Tensor  # latents after every step, (rows, *L)

    def run(self, outputs: Stub) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Outputs in the order of the calls, and predictions, of the regime's iterations."""
        log: list[Tensor] = []
        marks = [0]

        def answer(key: Key, size: tuple[int, ...]) -> Tensor:
            log.append(outputs(key, size))
            return log[-1]

        def stop(j: int, it: Iteration) -> bool:
            marks.append(len(log))
            return j == self.seg[-1]

        seen = self.prober.run(
            RECORD, self.steps, latents=lambda j: self.x, outputs=answer, stop=stop
        )
        outs = [log[marks[j] : marks[j + 1]] for j in self.seg]
        return outs, [seen[j].prediction.float().cpu() for j in self.seg]

    def equal(self, pattern: Callable[[tuple[int, ...]], Tensor]) -> list[Tensor]:
        """Predictions from outputs that are equal in all blocks: pattern(shape of an output) ->
        (rows, repeats, ...) of one block."""

        def repeated(key: Key, size: tuple[int, ...]) -> Tensor:
            block = pattern(size).flatten(0, 1)
            return block.repeat(size[0] // len(block), *[1] * (len(size) - 1))

        return self.run(repeated)[1]


def _regime(
    prober: Prober, plans: list[CallPlan], seg: list[int], steps: int, size: tuple[int, ...]
) -> Regime:
    """Output layout and guidance rule, from stubbed outputs: first equal in all branches, then
    independent."""
    generator = torch.Generator().manual_seed(1)
    probe = OutputProbe(prober, seg, steps, torch.randn(size, generator=generator))
    for plan in plans:
        plan.out = _out_map(probe, plan)
    raw, predictions = probe.run(lambda key, size: torch.randn(size, generator=generator))
    samples = []
    for outs, prediction in zip(raw, predictions, strict=True):
        pieces: list[Tensor] = []
        for plan, out in zip(plans, outs, strict=True):
            pieces += plan.pieces(out, plan.blocks, size)
        samples.append((pieces, prediction))
    return Regime(plans, fit(samples, prober.runner.hints.get("guidance")))


def _out_map(probe: OutputProbe, plan: CallPlan) -> Affine:
    """Which entries of an output row make the prediction; equal outputs in all branches pass any
    guidance up to a sign."""
    rows, repeats = len(probe.x), plan.slots[0].map.repeats
    noise: dict[tuple[int, ...], Tensor] = {}

    def draw(size: tuple[int, ...]) -> Tensor:
        if size[1:] not in noise:
            generator = torch.Generator().manual_seed(2)
            noise[size[1:]] = torch.randn(rows, repeats, *size[1:], generator=generator)
        return noise[size[1:]]

    prediction = probe.equal(draw)[0].reshape(rows, -1)
    one = next(iter(noise.values())).reshape(rows, -1)
    if _same_up_to_sign(prediction, one):
        return plan.out
    entry = (repeats, *next(iter(noise)))
    named = {key: probe.equal(_pattern(rows, entry, key))[0] for key in patterns(1, entry)}
    found = solve(named, rows, entry, f"output of {plan.module}")
    if not _selects(found):
        raise UnreplayableError(
            f"output of {plan.module}: it is not a selection of entries, so it cannot be mapped to"
            f" {probe.x[0].numel()} latents"
        )
    return found


def _pattern(rows: int, entry: tuple[int, ...], key: str) -> Callable[[tuple[int, ...]], Tensor]:
    """Outputs of one block that hold the named pattern."""
    return lambda size: patterns(rows, entry)[key]


def _same_up_to_sign(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool(min((a - b).abs().max(), (a + b).abs().max()) < 1e-3 * b.abs().max())


def _selects(part: Affine) -> bool:
    """Whether a map picks entries of a row, and no more, up to a sign."""
    if part.scale.ndim or part.const is not None or part.blocks * part.repeats != 1:
        return False
    return part.scale.abs().item() - 1 <= 1e-3 and len(part.shape) >= 1


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
