"""Costs of the phases of an iteration, from its rehearsal's events and the costs of its calls.

They are peaks of the loop's own tensors and of the calls beside them, and roofline seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flowrl.config.schema import Config
from flowrl.training.budget.call_costs import Cost, Costs
from flowrl.training.budget.rehearsal import WINNERS, Event, PolicyCall
from flowrl.training.budget.roofline import GIB, Device
from flowrl.training.budget.weight_costs import WeightCosts

PHASES = ("encode", "rollout", "decode", "reward", "advantages", "reference", "update", "optimizer")

# kind of moment: (the call with rows=0, whether it is its backward, whether the moment is during
# the call, not between the previous call and it)
Moment = tuple[PolicyCall | None, bool, bool]


@dataclass(slots=True)
class Phase:
    """The cost of one phase of an iteration, on one process."""

    gb: float = 0.0  # GiB at its highest moment, above weights and all else that stays
    seconds: float = 0.0  # seconds of an iteration, host and device together
    flops: float = 0.0  # FLOPs of an iteration
    rows: int = 0  # number of network rows in forwards
    # kind of operator -> seconds; "host": the device waits; "loop": the loop's own operators
    ledger: dict[str, float] = field(default_factory=dict)
    moments: dict[Moment, float] = field(default_factory=dict)  # kind of moment -> highest GiB

    def reach(self, moment: Moment, size: float) -> None:
        """Note that so many bytes lived at a moment of this kind."""
        gb = size / GIB
        self.moments[moment] = max(self.moments.get(moment, 0.0), gb)
        self.gb = max(self.gb, gb)

    def join(self, other: Phase) -> None:
        """Add another phase."""
        self.gb = max(self.gb, other.gb)
        self.flops += other.flops
        self.rows += other.rows
        for kind, seconds in other.ledger.items():
            self.spend(kind, seconds)

    def take(self, cost: Cost, device: Device) -> None:
        """Add the time and FLOPs of a call."""
        took = device.call(cost.seconds, cost.operators)
        for kind, seconds in (cost.kinds | {"host": took - cost.seconds}).items():
            self.spend(kind, seconds)
        self.flops += cost.flops

    def spend(self, kind: str, seconds: float) -> None:
        """Add seconds of a kind of operator."""
        if seconds:
            self.seconds += seconds
            self.ledger[kind] = self.ledger.get(kind, 0.0) + seconds


def simulated(
    events: list[Event],
    costs: Costs,
    cfg: Config,
    *,
    cond: float,
    gradients: float,
    weights: WeightCosts,
) -> dict[str, Phase]:
    """Simulate peaks, seconds, FLOPs and network rows of each phase of an iteration. cond: bytes of
    its prompts, bound to the calls; gradients: bytes of the gradients of all trained weights.

    A forward with a gradient leaves what its backward reads, which lives until that is over.
    """
    phases, device = {name: Phase() for name in (*PHASES, WINNERS)}, costs.device
    left, summed = 0.0, 0.0  # bytes of live tensors that calls have left, and of gradients
    for event in events:
        # the loop's own operators since the previous event
        phase = phases[event.phase] if event.phase in phases else Phase()
        kind = replace(event.call, rows=0) if event.call else None
        phase.reach((kind, event.backward, False), event.since + left + summed)
        loop = device.call(device.seconds("", 0, event.moved), event.operators)
        phase.spend("loop", loop if event.operators else 0.0)
        if event.call is None:
            # gradients live from an update's first backward to the optimizer's step
            summed = 0.0 if event.phase == "optimizer" else summed
            continue

        # the call's memory and time beside the loop's
        call, cost = event.call, costs.of(event.call, cfg)[event.backward]
        if call.what == "velocity":
            passes = 1 + float(cfg.train.gradient_checkpointing) * event.backward
            cost = weights.paid(cost, device, passes, backward=event.backward)
            phase.rows += 0 if event.backward else call.rows * call.branches
        moment = (kind, event.backward, True)
        where = phases["encode"] if call.what == "encode" else phase
        where.reach(moment, event.live + left + cost.peak + summed)
        where.take(cost, device)
        left += cost.left + (cond if call.what == "encode" else 0.0)
        if event.backward:
            summed = gradients
            where.reach(moment, event.live + left + summed)
    return phases
