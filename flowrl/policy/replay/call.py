"""The inferred call of a pipeline's denoisers, as a plain differentiable function of (x, sigma,
rows).

A `Replay` holds, for each regime (set of networks used at some noise levels), the denoiser calls of
one loop iteration: where the latents go in, how time enters, which arguments belong to a prompt,
and how guidance combines the outputs. Nothing is patched and no Python loop runs over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.policy.replay.affine import Affine
from flowrl.policy.replay.arguments import Path, Rows, Slot, Time, assign, nest
from flowrl.policy.replay.coords import Coords
from flowrl.policy.replay.guidance import Guidance
from flowrl.policy.replay.record import first_tensor


@dataclass
class CallPlan:
    """One denoiser call: component name, latents, times, per-prompt and shared arguments; `out`
    maps one output row to one row of latents."""

    module: str
    blocks: int
    slots: list[Slot]
    times: list[Time]
    rows: list[Rows]
    shared: dict[Path, Any]
    out: Affine

    def constants(self, kept: dict[Path, Any], rows: Tensor, blocks: list[int]) -> dict[str, Any]:
        """Arguments that depend on neither x nor time, nested as the network takes them."""
        flat = {**self.shared, **{r.path: r.gather(kept[r.path], rows, blocks) for r in self.rows}}
        return nest(
            {**flat, **dict.fromkeys([s.path for s in self.slots] + [t.path for t in self.times])}
        )

    def arguments(
        self,
        constants: dict[str, Any],
        kept: dict[Path, Any],
        x: Tensor,
        s: Tensor,
        t: Tensor,
        rows: Tensor,
        blocks: list[int],
    ) -> dict[str, Any]:
        args = dict(constants)
        for slot in self.slots:
            const = kept.get(slot.path)
            parts = [
                slot(x, s, None if const is None else const[b].index_select(0, rows))
                for b in (blocks if const is not None else blocks[:1])
            ]
            assign(
                args,
                slot.path,
                torch.cat(parts * (len(blocks) // len(parts))) if len(blocks) > 1 else parts[0],
            )
        for time in self.times:
            value = time(t, s, x)
            repeats = self.slots[0].map.repeats
            value = value.repeat_interleave(repeats, 0) if repeats > 1 else value
            assign(
                args,
                time.path,
                value.repeat(len(blocks), *[1] * (value.ndim - 1)) if len(blocks) > 1 else value,
            )
        return args

    def pieces(self, output: Tensor, count: int, n: int, shape: tuple[int, ...]) -> list[Tensor]:
        """Split one output into `count` blocks of predictions (n, *L) fp32."""
        blocks = output.float().reshape(count, n, -1)
        if self.out.index is not None:
            blocks = blocks.index_select(2, self.out.index.to(output.device))
        return list(blocks.reshape(count, n, *shape))


@dataclass
class Regime:
    """The calls of one loop iteration and the rule that combines their outputs; branches are (call,
    block) in order."""

    calls: list[CallPlan]
    guidance: Guidance

    @property
    def branches(self) -> list[tuple[int, int]]:
        return [(i, b) for i, call in enumerate(self.calls) for b in range(call.blocks)]


@dataclass(eq=False)
class Cond:
    """P prompts, encoded once. kept[regime][call] holds the per-prompt arguments; rows of any
    number are gathered from it."""

    prompts: tuple[str, ...]
    kept: list[list[dict[Path, Any]]]
    cache: dict[Any, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)

    def constants(
        self, regime: int, call: int, plan: CallPlan, rows: Tensor, blocks: list[int]
    ) -> dict[str, Any]:
        """plan.constants, remembered while the same rows tensor is asked for (a sampling loop
        gathers once)."""
        if rows.is_inference():
            return plan.constants(self.kept[regime][call], rows, blocks)
        if self.cache.get("rows") is not rows or self.cache.get("version") != rows._version:
            self.cache.clear()
            self.cache.update(rows=rows, version=rows._version)
        key = (regime, call, *blocks)
        if key not in self.cache:
            self.cache[key] = plan.constants(self.kept[regime][call], rows, blocks)
        return self.cache[key]


@dataclass(eq=False)
class Replay:
    """The inferred loop body. boundaries[i]: regime i runs at times >= boundaries[i], the last
    regime below all of them."""

    regimes: list[Regime]
    boundaries: list[float]
    coords: Coords
    shape: tuple[int, ...]
    pipeline: str

    @property
    def dtype(self) -> torch.dtype:
        """In which the latents were handed to the network when they were recorded."""
        return self.regimes[0].calls[0].slots[0].dtype

    def predict(
        self,
        modules: Mapping[str, nn.Module],
        which: int,
        x: Tensor,
        s: Tensor,
        t: Tensor,
        cond: Cond,
        rows: Tensor,
        *,
        guidance: float | str,
        detach_uncond: bool,
        combine: Callable[..., Tensor],
    ) -> tuple[Tensor, int]:
        """Prediction (n, *L) fp32 of regime `which` at x (n, *L), s and t (n,) fp64, and the number
        of network rows it took."""
        regime, n = self.regimes[which], x.shape[0]
        wanted = [regime.guidance.cond] if guidance == "none" else list(range(len(regime.branches)))
        outs: dict[int, Tensor] = {}
        for i, plan in enumerate(regime.calls):
            members = [k for k in wanted if regime.branches[k][0] == i]
            split = detach_uncond and torch.is_grad_enabled()
            for group in (
                [
                    [k for k in members if k != regime.guidance.cond],
                    [k for k in members if k == regime.guidance.cond],
                ]
                if split
                else [members]
            ):
                if not group:
                    continue
                blocks = [regime.branches[k][1] for k in group]
                args = plan.arguments(
                    cond.constants(which, i, plan, rows, blocks),
                    cond.kept[which][i],
                    x,
                    s,
                    t,
                    rows,
                    blocks,
                )
                with torch.set_grad_enabled(
                    torch.is_grad_enabled() and not (split and regime.guidance.cond not in group)
                ):
                    output = first_tensor(modules[plan.module](**args))
                outs.update(
                    zip(group, plan.pieces(output, len(blocks), n, self.shape), strict=True)
                )
        return regime.guidance(
            [outs[k] for k in sorted(outs)], guidance, lambda o: combine(which, o, x, s, cond, rows)
        ), n * len(wanted)
