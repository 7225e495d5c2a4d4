"""Loops whose steps differ by their number, not by their noise level alone.

Guidance may act in an interval of steps, and a control may end early. A Replay follows noise
levels, so each number of steps that is asked for is compared with it on stubs, step by step. A loop
that does otherwise runs by its own body, where each noise level has the place of its schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flowrl.policy.replay.arguments import CallPlan, Time, get
from flowrl.policy.replay.call import Regime, Replay
from flowrl.policy.replay.classify import differs
from flowrl.policy.replay.coords import Coords, place_of
from flowrl.policy.replay.errors import UnreplayableError
from flowrl.policy.replay.probe import Prober, always
from flowrl.policy.replay.record import DenoiserCall, RecordedStep
from flowrl.policy.replay.reentry import LoopPlace, timed

SAME = 2e-7  # largest difference of two sigmas that are one
CLOSE = 1e-2  # largest relative difference of two values that are one, rounded to bf16


@dataclass(eq=False)
class Places:
    """The runs that a pipeline was asked for, and where each noise level lies in them."""

    prober: Prober  # runs the pipeline
    coords: Coords  # flow coordinates of its scheduler
    # number of steps -> (place in the timesteps where the loop starts, sigmas (J,) fp64 of its
    # iterations): the recorded run, then others; the one that was asked for last comes last
    runs: dict[int, tuple[int, Tensor]] = field(default_factory=dict)

    def of(self, sigma: float) -> LoopPlace:
        """Find the place of a noise level: in the last run that has it, else between two steps of
        the last run."""
        known = [(n, *run) for n, run in reversed(self.runs.items()) if len(run[1]) > 1]
        for steps, begin, sigmas in known:
            gap = (sigmas - sigma).abs()
            if gap.min() < SAME:
                return LoopPlace(steps=steps, begin=begin, at=max(1, int(gap.argmin())))
        steps, begin, sigmas = known[0]
        return LoopPlace(steps=steps, begin=begin, at=max(1, int((sigmas > sigma).sum()) - 1))

    def add(self, steps: int, run: list[RecordedStep]) -> tuple[int, Tensor]:
        """Remember a stubbed run, which must be the pipeline's newest -> its entry of `runs`."""
        scheduler, times = self.prober.runner.pipe.scheduler, torch.stack([it.time for it in run])
        sigmas = self.coords.sigmas_of(scheduler, times)[:-1]
        self.runs[steps] = place_of(scheduler, times[0]), sigmas
        return self.runs[steps]

    def check(self, steps: int, run: list[RecordedStep], begin: int, sigmas: Tensor) -> None:
        """UnreplayableError if the loop's own body cannot stand for a run: its first step, which
        starts from latents of the loop's own, does otherwise than a later step at its noise
        level."""
        name = type(self.prober.runner.pipe).__name__
        if len(run) < 2:
            return
        entered = self._entered(LoopPlace(steps=steps, begin=begin, at=1), sigmas[0], run[0].sample)
        if not _alike(run[0], entered):
            raise UnreplayableError(
                f"{name}: at {steps} steps, the loop's first step does otherwise than a later one"
                " would at its noise level (guidance or a control that starts after it or remembers"
                " earlier steps, or a first prediction of zero); a velocity follows the noise level"
                " alone, so let it begin at the first step and remember none, or leave it out"
            )

    def _entered(self, place: LoopPlace, level: Tensor, x: Tensor) -> RecordedStep:
        """Run the loop on stubs, with latents x (rows, *L) in the pipeline's units at a place."""
        run = self.prober.run(
            self.prober.rows(self.prober.count),
            place.steps,
            latents=always(x),
            stop=lambda j, it: j == place.at,
            on_times=timed(self.coords, place, level),
            skip_step=self.coords.kind == "vp",
        )
        return run[place.at]


def unlike(replay: Replay, run: list[RecordedStep], sigmas: Tensor) -> int | None:
    """Find the first iteration of a stubbed run that does otherwise than the replay, which must
    have been inferred; None if all do the same. sigmas: (J,) fp64 of the iterations."""
    lows = torch.tensor([*replay.boundaries, float("-inf")], dtype=torch.float64)
    found: list[int] = []
    known: dict[int, RecordedStep] = {}
    # the first iteration is no example, because its latents are the loop's own
    for j in [*range(1, len(run)), 0]:
        which = int((run[j].time >= lows).int().argmax())
        other = known.setdefault(which, run[j])
        if not _fits(replay.regimes[which], run[j], sigmas[j], other):
            found.append(j)
    return min(found, default=None)


def _fits(regime: Regime, it: RecordedStep, sigma: Tensor, other: RecordedStep) -> bool:
    """Whether an iteration makes the calls of a regime, with the values of another iteration."""
    if [call.module for call in it.calls] != [plan.module for plan in regime.calls]:
        return False
    if len(other.calls) != len(it.calls):
        return False
    calls = zip(regime.calls, it.calls, other.calls, strict=True)
    if not all(_follows(plan, a, b, it.time, sigma) for plan, a, b in calls):
        return False
    return regime.guidance.rule == "pipeline" or _close(it.prediction, other.prediction)


def _follows(
    plan: CallPlan, call: DenoiserCall, other: DenoiserCall, time: Tensor, sigma: Tensor
) -> bool:
    """Whether what should not follow the time does not, and the rest follows it as planned."""
    if call.args.keys() != other.args.keys():
        return False
    fixed = [*plan.shared, *(rows.path for rows in plan.rows)]
    if any(differs(get(call.args, path), get(other.args, path)) for path in fixed):
        return False
    return all(_on_time(rule, get(call.args, rule.path), time, sigma) for rule in plan.times)


def _on_time(rule: Time, value: Any, time: Tensor, sigma: Tensor) -> bool:
    """Whether the value of an argument is that of its rule."""
    wanted = rule(time.reshape(1), sigma.cpu().reshape(1), torch.zeros(1))[0]
    recorded = torch.as_tensor(value).detach().cpu().reshape(-1, *wanted.shape)
    return _close(recorded[0], wanted)


def _alike(a: RecordedStep, b: RecordedStep) -> bool:
    """Whether two iterations make the same calls, and combine their outputs in the same way."""
    if [call.module for call in a.calls] != [call.module for call in b.calls]:
        return False
    both = [tree_leaves([call.args for call in it.calls]) for it in (a, b)]
    if len(both[0]) != len(both[1]) or not _close(a.prediction, b.prediction):
        return False
    return all(_close(u, v) for u, v in zip(*both, strict=True))


def _close(a: Any, b: Any) -> bool:
    """Whether two values are one but for rounding."""
    if not isinstance(a, Tensor | int | float) or not isinstance(b, Tensor | int | float):
        return type(a) is type(b) and not differs(a, b)
    u, v = (torch.as_tensor(x).detach() for x in (a, b))
    if u.shape != v.shape:
        return False
    u, v = u.double(), v.double().to(u.device)
    return not u.numel() or bool((u - v).abs().max() <= CLOSE * v.abs().max())
