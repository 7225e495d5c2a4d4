"""What the phases of an iteration take: its rehearsal's events, with the costs of its calls.

Peaks of the loop's own tensors and of the calls on top of them, and the seconds of a roofline.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flowrl.training.budget.call_costs import Cost, Costs, Part
from flowrl.training.budget.rehearsal import WINNERS, Event, PolicyCall
from flowrl.training.budget.roofline import GIB, Device
from flowrl.training.budget.weight_costs import WeightCosts

PHASES = ("encode", "rollout", "decode", "reward", "advantages", "reference", "update", "optimizer")

# what is asked for (of any number of rows), whether it is the gradient of that, and whether it is
# the call itself or what lies between the call before and it
Moment = tuple[PolicyCall | None, bool, bool]


@dataclass(slots=True)
class Phase:
    """gb: highest memory while it lasts, above weights and what stays; seconds, flops, rows: of an
    iteration, of one process. moments: the highest memory at each kind of its moments."""

    gb: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    rows: int = 0
    # of the device by kind of operator; "host": what it waits for; "loop": its own operators
    ledger: dict[str, float] = field(default_factory=dict)
    moments: dict[Moment, float] = field(default_factory=dict)

    def reach(self, moment: Moment, gb: float) -> None:
        """Memory was this high at a moment of this kind."""
        self.moments[moment] = max(self.moments.get(moment, 0.0), gb)
        self.gb = max(self.gb, gb)

    def join(self, other: Phase) -> None:
        """Add another phase."""
        self.gb = max(self.gb, other.gb)
        self.flops += other.flops
        self.rows += other.rows
        for kind, seconds in other.ledger.items():
            self.spend(kind, seconds)

    def take(self, part: Part, device: Device) -> None:
        """Add the time of a call."""
        took = device.call(part.seconds, part.operators)
        for kind, seconds in (part.kinds | {"host": took - part.seconds}).items():
            self.spend(kind, seconds)
        self.flops += part.flops

    def spend(self, kind: str, seconds: float) -> None:
        if seconds:
            self.seconds += seconds
            self.ledger[kind] = self.ledger.get(kind, 0.0) + seconds


def simulated(
    events: list[Event],
    costs: Costs,
    device: Device,
    *,
    cond: float,
    gradients: float,
    weights: WeightCosts,
) -> dict[str, Phase]:
    """Peaks, seconds, FLOPs and network rows of each phase of an iteration. cond: bytes of its
    prompts, bound to the calls; gradients: of those of all trained weights.

    A forward with a gradient leaves what its backward reads, `held` until that is over. Gradients
    are there from the end of an update's first backward to the end of the optimizer's step.
    """
    phases = {name: Phase() for name in (*PHASES, WINNERS)}
    held, summed = 0.0, 0.0
    for event in events:
        phase = phases[event.phase] if event.phase in phases else Phase()
        kind = replace(event.asked, rows=0) if event.asked else None
        phase.reach((kind, event.backward, False), (event.since + held + summed) / GIB)
        loop = device.call(device.seconds("", 0, event.moved), event.operators)
        phase.spend("loop", loop if event.operators else 0.0)
        if event.asked is None:
            summed = 0.0 if event.phase == "optimizer" else summed
            continue
        asked, cost = event.asked, costs.of(event.asked)
        part: Part = cost.backward if event.backward else cost.forward
        if asked.what == "velocity":
            passes = 1 + (float(costs.checkpointing) if event.backward else 0.0)
            part = part.paying(weights, device, passes, backward=event.backward)
        own = phases["encode"] if asked.what == "encode" else phase
        own.reach((kind, event.backward, True), (event.live + held + part.peak + summed) / GIB)
        own.take(part, device)
        held += _kept(asked, cost, event.backward, cond)
        if event.backward:
            summed = gradients
            own.reach((kind, event.backward, True), (event.live + held + summed) / GIB)
        if asked.what == "velocity" and not event.backward:
            own.rows += asked.rows * asked.branches
    return phases


def _kept(asked: PolicyCall, cost: Cost, backward: bool, cond: float) -> float:
    """Bytes that live on after a call, above what the loop holds."""
    if asked.what == "encode":
        return cost.saved + cond
    return -cost.saved if backward else cost.saved
