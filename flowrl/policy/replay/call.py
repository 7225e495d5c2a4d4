"""What happens when a pipeline is asked for a velocity: its inferred call is replayed.

A `Replay` holds, for each regime (a set of networks used at some noise levels), the denoiser calls
of one iteration of the pipeline's loop and how guidance combines their outputs. It is a plain
differentiable function of (x, sigma, rows): nothing is patched and no Python loop runs over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flowrl.policy.replay.arguments import CallPlan, Cond
from flowrl.policy.replay.coords import Coords
from flowrl.policy.replay.guidance import Guidance
from flowrl.policy.replay.record import first_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Where a velocity is asked for, and with which guidance (see Policy.velocity)."""

    x: Tensor  # (n, *L) fp32, flow coordinates
    sigma: Tensor  # (n,) fp64, or () on the CPU: the same for all rows
    cond: Cond
    rows: Tensor  # (n,) int64, rows of cond, on x's device
    guidance: float | str = "pipeline"
    detach_uncond: bool = False

    def take(self, at: Tensor) -> Request:
        """The rows `at` of a request whose rows have their own sigmas."""
        return replace(self, x=self.x[at], sigma=self.sigma[at], rows=self.rows[at])


@dataclass(eq=False)
class Replay:
    """The inferred loop body. boundaries[i]: regime i runs at times >= boundaries[i], the last
    regime below all of them."""

    regimes: list[Regime]
    boundaries: list[float]
    coords: Coords
    shape: tuple[int, ...]  # of one row of latents
    pipeline: str  # name of its class
    # (regime, outputs, request) -> prediction, where guidance has no closed form
    combine: Callable[[int, list[Tensor], Request], Tensor] | None = None

    def velocity(self, modules: Mapping[str, nn.Module], request: Request) -> tuple[Tensor, int]:
        """v = eps_hat - x0_hat (n, *L) fp32, and the network rows that it took."""
        prediction, network_rows = self.predict(modules, request)
        return self.coords.velocity(prediction, request.x, request.sigma), network_rows

    def predict(self, modules: Mapping[str, nn.Module], request: Request) -> tuple[Tensor, int]:
        """The pipeline's own combined prediction (n, *L) fp32, and the network rows it took."""
        sigma = request.sigma
        if sigma.ndim == 0:  # one time for all rows, found without work on the device
            time = torch.tensor(self.coords.time.at(sigma.item()), dtype=torch.float64)
        else:
            time = self.coords.time(sigma)
        if not self.boundaries:
            return self._predict_in(0, modules, request, time)
        # rows of different regimes go to different networks
        regime = torch.stack([time < boundary for boundary in self.boundaries]).sum(0)
        used = regime.unique().tolist()
        if len(used) == 1:
            return self._predict_in(used[0], modules, request, time)
        out, network_rows = torch.zeros_like(request.x), 0
        for which in used:
            at = (regime == which).nonzero().flatten()
            part, count = self._predict_in(which, modules, request.take(at), time[at])
            out, network_rows = out.index_copy(0, at, part), network_rows + count
        return out, network_rows

    def _predict_in(
        self, which: int, modules: Mapping[str, nn.Module], request: Request, time: Tensor
    ) -> tuple[Tensor, int]:
        """`predict` where all rows belong to regime `which`; time (n,) or () fp64."""
        regime, x = self.regimes[which], request.x
        outs: dict[int, Tensor] = {}
        for call, blocks, branches, grad in regime.passes(request):
            plan = regime.calls[call]
            fixed = request.cond.gather((which, call), plan, request.rows, blocks)
            args = plan.arguments(fixed, x, request.sigma, time, len(blocks))
            with torch.set_grad_enabled(grad):
                output = first_tensor(modules[plan.module](**args))
            outs.update(zip(branches, plan.pieces(output, len(blocks), x.shape), strict=True))
        ordered = [outs[branch] for branch in sorted(outs)]
        network_rows = len(x) * len(ordered)
        if request.guidance == "pipeline" and regime.guidance.rule == "pipeline":
            assert self.combine is not None
            return self.combine(which, ordered, request), network_rows
        return regime.guidance(ordered, request.guidance), network_rows


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
