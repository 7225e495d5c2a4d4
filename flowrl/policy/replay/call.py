"""What happens when a pipeline is asked for a velocity: its inferred call is replayed.

A `Replay` holds, for each regime (a set of networks used at some noise levels), the denoiser calls
of one iteration of the pipeline's loop and how guidance combines their outputs. It is a plain
differentiable function of (x, sigma, rows): nothing is patched and no Python loop runs over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flowrl.policy.replay.arguments import CallPlan
from flowrl.policy.replay.coords import Coords
from flowrl.policy.replay.guidance import Guidance
from flowrl.policy.replay.joined import Pass, outputs
from flowrl.policy.replay.request import Request, together


@dataclass(eq=False)
class Replay:
    """The inferred loop body. boundaries[i]: regime i runs at times >= boundaries[i], the last
    regime below all of them."""

    regimes: list[Regime]
    boundaries: list[float]
    coords: Coords
    shape: tuple[int, ...]  # of one row of latents
    pipeline: str  # name of its class
    alone: bool = False  # networks get one row at a time: the pipeline takes no more
    apart: bool = False  # calls of one network are never joined to one
    # (regime, raw outputs, request) -> prediction, where guidance has no closed form
    combine: Callable[[int, list[Tensor], Request], Tensor] | None = None

    def velocity(self, modules: Mapping[str, nn.Module], request: Request) -> tuple[Tensor, int]:
        """v = eps_hat - x0_hat (n, *L) fp32, and the network rows that it took."""
        prediction, network_rows = self.predict(modules, request)
        return self.coords.velocity(prediction, request.x, request.sigma), network_rows

    def predict(self, modules: Mapping[str, nn.Module], request: Request) -> tuple[Tensor, int]:
        """The pipeline's own combined prediction (n, *L) fp32, and the network rows it took."""
        if self.alone and len(request.x) > 1:
            single = torch.arange(len(request.x), device=request.rows.device).split(1)
            return together((at, self.predict(modules, request.take(at))) for at in single)
        parts = request.cond.split(request.rows)
        if len(parts) == 1:
            return self._predict_alike(modules, request.within(*parts[0]))
        return together(
            (at, self._predict_alike(modules, request.within(group, at, local)))
            for group, at, local in parts
        )

    def _predict_alike(
        self, modules: Mapping[str, nn.Module], request: Request
    ) -> tuple[Tensor, int]:
        """`predict` where all rows belong to one group of prompts."""
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
        """`predict` where all rows belong to regime `which`; time (n,) or () fp64."""
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
        if request.guidance == "none":  # equal outputs pass any guidance unchanged
            ordered *= sum(plan.blocks for plan in regime.calls)
        return self.combine(which, ordered, request), network_rows

    def _passes(self, which: int, request: Request, time: Tensor) -> Iterator[Pass]:
        """What is run of regime `which`, with its arguments."""
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

    calls: list[CallPlan]
    guidance: Guidance

    def passes(self, request: Request) -> Iterator[tuple[int, list[int], list[int], bool]]:
        """What runs in one forward: (call, its blocks, their branches, whether with gradient)."""
        grad, cond, first = torch.is_grad_enabled(), self.guidance.cond, 0
        for call, plan in enumerate(self.calls):
            branches = list(range(first, first + plan.blocks))
            groups = [branches]
            if request.guidance == "none":
                groups = [[cond]] if cond in branches else []
            elif request.detach_uncond and grad:  # the conditional branch alone has a gradient
                groups = [[b for b in branches if b != cond], [b for b in branches if b == cond]]
            for group in filter(None, groups):
                detached = request.detach_uncond and cond not in group
                yield call, [b - first for b in group], group, grad and not detached
            first += plan.blocks
