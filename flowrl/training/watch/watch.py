"""Detect that the trained reward is hacked: by a held-out reward and cheap detectors, over a run.

The held-out reward has weight 0: it scores the training samples, but nothing trains on it. While
the trained reward still rises and this one falls, a proxy is being exploited. The watch looks for
its peak (peak.py), reports when it has passed, and knows which checkpoint lies nearest. All inputs
are gathered values, so results are the same on every process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from flowrl.config.training import WatchConfig
from flowrl.runtime.processes.world import World
from flowrl.training.observe import Observation
from flowrl.training.watch.drift import base_of, drift
from flowrl.training.watch.peak import Peak, find_peak

LOWER = 0.1  # what an alarm multiplies the learning rate by


class Watch:
    """An observer, which turns every iteration into the metrics watch/*.

    lower: whether an alarm lowers the learning rate; state["rate"] is its remaining share.
    """

    def __init__(self, settings: WatchConfig, world: World, *, lower: bool = False) -> None:
        self.settings, self.world, self.lower = settings, world, lower
        # a resumed run goes on from this state
        self.state: dict[str, Any] = {"curve": [], "below": 0, "since": 0, "rate": 1.0, "base": {}}

    @property
    def peak(self) -> Peak | None:
        """The peak of the held-out reward in the run so far."""
        return find_peak(self.state["curve"], smooth=self.settings.smooth)

    def __call__(self, seen: Observation) -> dict[str, float]:
        """Return metrics of an iteration's held-out reward, and of the detectors on its samples."""
        out = self.follow(seen.number, seen.metrics)
        if self.settings.detectors:
            read = {name: self.world.gather(v) for name, v in seen.drawn.rewards.seen.items()}
            out |= self.read(read, seen.group)
        return out

    def follow(self, number: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics of the held-out reward: running mean, peak, how long it has been below.

        watch/past_peak is 1 once that has lasted for watch.patience iterations. Then the rate is
        lowered, if `lower` is set, and the search for a peak starts again.
        """
        settings, state = self.settings, self.state
        value = metrics.get(f"reward/{settings.held_out}/mean")
        if value is None:  # nothing is watched, or no sample could be scored
            return {}
        state["curve"].append([number, value])
        if (peak := self.peak) is None:
            return {}
        recent = peak
        if state["since"]:  # the rate was lowered then, so only later iterations count
            recent = find_peak(state["curve"], smooth=settings.smooth, since=state["since"])
        below = recent is not None and recent.below(settings.errors)
        state["below"] = state["below"] + 1 if below else 0
        past = state["below"] >= settings.patience
        out = {
            "watch/held_out": peak.now,
            "watch/best": peak.best,
            "watch/peak": peak.iteration,
            "watch/below": float(state["below"]),
            "watch/past_peak": float(past),
        }
        if past and self.lower:
            state.update(rate=state["rate"] * LOWER, since=number, below=0)
        return out if not self.lower else out | {"watch/rate": state["rate"]}

    def read(self, seen: Mapping[str, Tensor], group: Tensor) -> dict[str, float]:
        """Return metrics of detectors: means over the samples (B,) of all processes, and how far
        they have drifted since the first iteration."""
        out = {}
        for name, value in seen.items():
            if name == "drift":
                self.state["base"] = self.state["base"] or base_of(value, group)
                out["watch/drift"] = drift(value, group, self.state["base"])
            elif bool(value.isfinite().any()):
                out[f"watch/{name}"] = value.double().nanmean().item()
        return out

    def spared(self, saved: Sequence[int]) -> set[int]:
        """Choose the saved checkpoints, by iteration, that are kept beyond checkpoint.keep.

        They are the one nearest the peak, and those among which a later peak may find its nearest
        one: the middle of a window lies smooth / 2 iterations before its end.
        """
        if self.settings.held_out is None or not saved:
            return set()
        numbers = [number for number, _ in self.state["curve"]] + [max(saved) + 1]
        first = numbers[-self.settings.smooth :][0]  # first iteration of the window that ends next
        earliest = (first + numbers[-1]) / 2 - 1
        before = max((step for step in saved if step <= earliest), default=min(saved))
        kept = {step for step in saved if step >= before}
        return kept if self.peak is None else kept | {nearest(saved, self.peak)}


def nearest(saved: Sequence[int], peak: Peak) -> int:
    """Find the checkpoint, by iteration, nearest the weights of the peak; the earlier of two."""
    return min(sorted(saved), key=lambda step: abs(step - peak.weights))
