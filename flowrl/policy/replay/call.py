"""Replay a pipeline's inferred call to compute its velocity.

A `Replay` holds, for each regime (a set of networks used at some noise levels), the denoiser calls
of one iteration of the pipeline's loop and how guidance combines their outputs. It is a plain
differentiable function of (x, sigma, rows): nothing is patched and no Python loop runs over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.policy.replay.arguments import CallPlan, Cond, Group, Path, nest, tensors_in
from flowrl.policy.replay.coords import Coords
from flowrl.policy.replay.guidance import Guidance
from flowrl.policy.replay.record import prediction_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The states whose velocities are wanted, and the guidance (see Policy.velocity)."""

    x: Tensor  # (n, *L) fp32, flow coordinates
    sigma: Tensor  # (n,) fp64, or () on the CPU: the same for all rows
    cond: Cond  # the encoded prompts
    rows: Tensor  # (n,) int64, rows of cond, on x's device
    group: Group | None = None  # group of cond to which all rows belong; None: not known yet
    local: Tensor | None = None  # (n,) int64, places of the rows in the group; None: not known yet
    guidance: float | str = "pipeline"  # "pipeline" (the recorded one), "none", or a number
    detach_uncond: bool = False  # no gradient passes through the unconditional branch

    def take(self, at: Tensor) -> Request:
        """This request for the rows `at` only."""
        sigma = self.sigma[at] if self.sigma.ndim else self.sigma
        local = None if self.local is None else self.local[at]
        return replace(self, x=self.x[at], sigma=sigma, rows=self.rows[at], local=local)

    def within(self, group: Group, at: Tensor | None, local: Tensor) -> Request:
        """This request for the rows `at` only (None: all); `local` are their places in `group`."""
        own = self if at is None else self.take(at)
        return replace(own, group=group, local=local)


class LastRows:
    """Rows of prompts that were put on a device last: equal CPU rows get the same tensor again, so
    that arguments for them are gathered once."""

    def __init__(self) -> None:
        # (rows on the CPU, the same rows on the device)
        self.known: tuple[Tensor, Tensor] | None = None

    def on(self, device: torch.device, rows: Tensor) -> Tensor:
        """Put rows (n,) on this device."""
        if rows.device.type != "cpu":
            return rows
        known = self.known
        if known is None or known[1].device != device or not torch.equal(known[0], rows):
            known = self.known = (rows.clone(), rows.to(device, non_blocking=True, copy=True))
        return known[1]


@dataclass(eq=False)
class Replay:
    """The inferred body of a pipeline's loop."""

    regimes: list[Regime]  # sets of networks, from high noise to low
    # model times: regime i runs from boundaries[i] up, the last regime below all boundaries
    boundaries: list[float]
    coords: Coords  # flow coordinates of the pipeline's scheduler
    shape: tuple[int, ...]  # shape of one row of latents
    pipeline: str  # class name of the pipeline
    alone: bool = False  # networks get one row at a time, because the pipeline takes no more
    apart: bool = False  # calls of one network are never joined to one
    # (regime, raw outputs, request) -> prediction, for guidance without a closed form
    combine: Callable[[int, list[Tensor], Request], Tensor] | None = None

    def predict(self, modules: Mapping[str, nn.Module], request: Request) -> tuple[Tensor, int]:
        """Return the pipeline's own combined prediction (n, *L) fp32, and the network rows it
        took."""
        if self.alone and len(request.x) > 1:
            single = torch.arange(len(request.x), device=request.rows.device).split(1)
            return together((at, self.predict(modules, request.take(at))) for at in single)
        # rows whose prompts have arguments of other shapes need a call of their own
        if request.group is None:
            parts = request.cond.split(request.rows)
            if len(parts) > 1:
                return together(
                    (part[1], self.predict(modules, request.within(*part))) for part in parts
                )
            request = request.within(*parts[0])
        time = self.coords.time(request.sigma)
        if not self.boundaries:
            return self._predict_in(0, modules, request, time)
        # rows of different regimes go to different networks
        regime = torch.stack([time < boundary for boundary in self.boundaries]).sum(0)
        used = regime.unique().tolist()
        if len(used) == 1:
            return self._predict_in(used[0], modules, request, time)
        places = [(regime == which).nonzero().flatten() for which in used]
        return together(
            (at, self._predict_in(which, modules, request.take(at), time[at]))
            for which, at in zip(used, places, strict=True)
        )

    def _predict_in(
        self, which: int, modules: Mapping[str, nn.Module], request: Request, time: Tensor
    ) -> tuple[Tensor, int]:
        """Do the same as `predict` if all rows belong to regime `which`; time (n,) or () fp64."""
        regime, x = self.regimes[which], request.x
        combined = regime.guidance.rule == "pipeline" and (
            request.guidance == "pipeline" or any(plan.out is None for plan in regime.calls)
        )
        outs: dict[int, Tensor] = {}
        apart = self.apart or self.alone
        for one, out in outputs(modules, self._passes(which, request, time), apart=apart):
            if combined:
                parts = one.plan.raw(out, len(one.blocks), len(x))
            else:
                parts = one.plan.pieces(out, len(one.blocks), x.shape)
            outs.update(zip(one.branches, parts, strict=True))
        ordered = [outs[branch] for branch in sorted(outs)]
        network_rows = len(x) * len(ordered)
        if not combined:
            return regime.guidance(ordered, request.guidance).float(), network_rows
        assert self.combine is not None
        if request.guidance == "none":  # guidance of equal outputs is the output itself
            ordered *= sum(plan.blocks for plan in regime.calls)
        return self.combine(which, ordered, request), network_rows

    def _passes(self, which: int, request: Request, time: Tensor) -> Iterator[Pass]:
        """Yield the calls of regime `which` that this request needs, with their arguments."""
        assert request.group is not None and request.local is not None
        regime = self.regimes[which]
        for call, blocks, branches, grad in regime.passes(request):
            plan = regime.calls[call]
            fixed = request.group.gather((which, call), plan, request.local, blocks)
            flat = plan.arguments(fixed, request.x, request.sigma, time, len(blocks))
            yield Pass(plan=plan, blocks=blocks, branches=branches, grad=grad, flat=flat)


@dataclass
class Regime:
    """The calls of one loop iteration, and the rule that combines the outputs of their branches: a
    branch is a block of a call, numbered through all calls."""

    calls: list[CallPlan]  # network calls, in the order of the loop
    guidance: Guidance  # rule that makes one prediction from the outputs of all branches

    def passes(self, request: Request) -> Iterator[tuple[int, list[int], list[int], bool]]:
        """Yield the passes, each of which runs in one forward: (call, its blocks, their branches,
        whether with gradient)."""
        grad, cond, first = torch.is_grad_enabled(), self.guidance.cond, 0
        for call, plan in enumerate(self.calls):
            branches = list(range(first, first + plan.blocks))
            groups = [branches]
            if request.guidance == "none":
                groups = [[cond]] if cond in branches else []
            # the unconditional branches run apart, without a gradient
            elif request.detach_uncond and grad:
                groups = [[b for b in branches if b != cond], [b for b in branches if b == cond]]
            for group in filter(None, groups):
                detached = request.detach_uncond and cond not in group
                yield call, [b - first for b in group], group, grad and not detached
            first += plan.blocks


def together(parts: Iterable[tuple[Tensor, tuple[Tensor, int]]]) -> tuple[Tensor, int]:
    """Join parts that hold each row once, each (rows (m,), (their predictions (m, *L), network
    rows)) -> the predictions in the order of rows (n, *L), and the sum of network rows."""
    at, made = zip(*parts, strict=True)
    order = torch.cat(at).argsort()
    return torch.cat([part for part, _ in made])[order], sum(count for _, count in made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Blocks of a call that run together in one forward."""

    plan: CallPlan  # the call
    blocks: list[int]  # numbers of its blocks, each a copy of the batch
    branches: list[int]  # branch of guidance that each block computes
    grad: bool  # whether the forward keeps its graph
    flat: dict[Path, Any]  # path -> argument


def outputs(
    modules: Mapping[str, nn.Module], passes: Iterable[Pass], *, apart: bool
) -> Iterator[tuple[Pass, Tensor]]:
    """Run the networks: yield every pass with the predictions of its rows.

    Some pipelines (Wan) call the network once for each branch of guidance. The rows of a call do
    not depend on each other, or prompts could not share one; so two calls with the same arguments,
    whose tensors have the same shapes but for the batch, become one call of twice the rows. apart:
    no two passes share a call.
    """
    for alike in joined(passes, apart=apart):
        first = alike[0]
        with torch.set_grad_enabled(first.grad):
            made = modules[first.plan.module](**nest(arguments(alike)))
            output = prediction_of(made, first.plan.streams)
        yield from zip(alike, output.chunk(len(alike)), strict=True)


def joined(passes: Iterable[Pass], *, apart: bool) -> list[list[Pass]]:
    """Group passes in order: those of a group are one call. apart: each is a group."""
    out: list[list[Pass]] = []
    for one in passes:
        if out and not apart and _fits(out[-1][0], one):
            out[-1].append(one)
        else:
            out.append([one])
    return out


def arguments(passes: list[Pass]) -> dict[Path, Any]:
    """Join the arguments, by path, into one call for all of these passes."""
    first = passes[0]
    if len(passes) == 1:
        return first.flat
    axes = _axes(first.plan)
    return first.flat | {
        path: _cat([one.flat[path] for one in passes], axis) for path, axis in axes.items()
    }


def _axes(plan: CallPlan) -> dict[Path, int]:
    """Find the batch axis of every argument that has one entry for each row."""
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
    """Return the shape that arguments in one call share; lists hold an entry for each row."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return [_shape(entry) for entry in value] if isinstance(value, list) else type(value)


def _equal(a: Any, b: Any) -> bool:
    """Whether the values that all rows share are the same; tensors must be one object, because
    comparing their numbers would read them."""
    found = list(tensors_in(a)), list(tensors_in(b))
    if found[0] or found[1]:
        return a is b
    return bool(a == b)
