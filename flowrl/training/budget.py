"""What a run needs before it runs, without a GPU and without weights: memory, time, rows, FLOPs.

Two iterations are rehearsed by the run's own loop with a policy that computes nothing
(rehearsal.py), which tells every call of the network, the decoder and the text encoders. Each kind
of call is then run once on the meta device by the run's own policy code, with the real
architecture and its LoRA (call_costs.py). The rest is bookkeeping: peaks of the loop's own tensors
and of the calls on top of them, and a roofline of the device (flowrl/runtime/roofline.py).

The loop's own tensors are rehearsed with small latents of two sizes; their bytes are affine in the
size, so that a line gives those of the real ones. Gigabytes are 2**30 bytes, as in the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from flowrl.config import combine
from flowrl.config.build import (
    DTYPES,
    autocast,
    dearest,
    decodes_with_gradient,
    make_algorithm,
)
from flowrl.config.schema import Config
from flowrl.data import conditions
from flowrl.policy.architecture import read
from flowrl.policy.blocks import blocks
from flowrl.policy.call_shapes import CallShapes
from flowrl.policy.load import call_options
from flowrl.policy.modelled import ModelledPolicy
from flowrl.policy.replay.encoders import LARGEST
from flowrl.runtime.distributed import buckets
from flowrl.runtime.meter import Meter
from flowrl.runtime.roofline import GIB, Device
from flowrl.training.build import check_guidance, keeps_reference
from flowrl.training.call_costs import Cost, Costs, Part
from flowrl.training.checks import check_batch
from flowrl.training.rehearsal import WINNERS, Asked, Event, Rehearsal
from flowrl.training.weight_costs import (
    AWAY,
    WeightCosts,
    encoders_size,
    weight_costs,
)

PHASES = ("encode", "rollout", "decode", "reward", "advantages", "reference", "update", "optimizer")
EXACT = 1 << 21  # numbers of all latents of an iteration up to which they are rehearsed as they are
ENOUGH = 40  # samples from which on a rehearsal tells larger ones
SMALL = (4, 8)  # sides of latents that stand in for larger ones


# what is asked for (of any number of rows), whether it is the gradient of that, and whether it is
# the call itself or what lies between the call before and it
Moment = tuple[Asked | None, bool, bool]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Of one process. fixed: gigabytes that stay, by what they are; phases: of the second
    iteration; rows: what its metrics would say; first: rows of the first iteration."""

    model: str
    pipeline: str
    architecture: str
    device: Device
    gpus: int
    samples: int  # an iteration, over all processes
    fixed: dict[str, float]
    phases: dict[str, Phase]
    rows: dict[str, int]
    first: dict[str, int]
    reduced: dict[str, float]  # gradients summed over processes: gigabytes and seconds
    parameters: dict[str, int]
    notes: list[str] = field(default_factory=list)

    @property
    def resident(self) -> float:
        """Gigabytes that stay."""
        return sum(self.fixed.values())

    @property
    def peak(self) -> float:
        """Gigabytes of tensors at the highest moment."""
        return self.resident + max(phase.gb for phase in self.phases.values())

    @property
    def needed(self) -> float:
        """Gigabytes of a card: the peak, 4% that the allocator cannot use, and the driver's."""
        return self.peak * (1.04 if self.device.cuda else 1.0) + self.device.reserve

    @property
    def highest(self) -> str:
        """The phase with the peak."""
        return max(self.phases, key=lambda name: self.phases[name].gb)

    @property
    def seconds(self) -> float:
        """Of an iteration, without rewards and evaluations."""
        return sum(phase.seconds for phase in self.phases.values()) + self.reduced["seconds"]

    @property
    def flops(self) -> float:
        return sum(phase.flops for phase in self.phases.values())

    @property
    def utilisation(self) -> float:
        """FLOPs over what the device's large matmuls would do in that time."""
        return self.flops / (self.seconds * self.device.ceiling)


class Planner:
    """Budgets of a config and of changes to it: the architecture is built once."""

    def __init__(self, cfg: Config, device: Device, *, gpus: int = 1) -> None:
        check_known(cfg, gpus)
        self.cfg, self.device, self.gpus = cfg, device, gpus
        architecture = read(cfg.model.source)
        lora = cfg.train.lora.model_dump() if cfg.train.mode == "lora" else None
        self.policy = ModelledPolicy(
            architecture,
            conditions.loaded(call_options(cfg.model.pipeline)),
            lora=lora,
            dtype=DTYPES[cfg.model.dtype],
            decoder=torch.float32 if decodes_with_gradient(cfg, None) else DTYPES[cfg.model.dtype],
        )
        self.policy.trainable.named()  # in full mode its weights are fp32 from here on
        context = autocast(cfg, torch.device("cuda" if device.cuda else "cpu"))
        self.low = None if context is nullcontext else DTYPES[cfg.train.precision]
        self.costs: dict[tuple[bool | float, str], Costs] = {}
        self.rehearsals: dict[str, Rehearsed] = {}  # by what they depend on

    @property
    def parameters(self) -> int:
        """Of the network, without adapters."""
        return sum(p.numel() for p in _frozen(self.policy).values())

    @property
    def state(self) -> int:
        """Network rows of one state: a batch.micro below it changes nothing."""
        algorithm = make_algorithm(self.cfg)
        guidance = check_guidance(self.cfg, algorithm, self.policy)
        return self.policy.branches(dearest(guidance, algorithm, self.policy))

    def budget(self, cfg: Config | None = None) -> Budget:
        """The budget of the config, or of one that differs in its batch, checkpointing, compiling,
        and how weights are held."""
        cfg = cfg or self.cfg
        own = share(cfg, self.gpus)
        weights = weight_costs(cfg, self.policy, self.gpus)
        told = [
            self._of_prompts(combine.changed(own, {"batch.prompts": few}), weights)
            for few in enough(own)
        ]
        first, rows, phases, views = told[0] if len(told) == 1 else on_line(own, *told)
        phases["reference"].join(phases.pop(WINNERS))
        for counts in (first, rows):
            del counts["nfe/winners"]
        self._moved(cfg, phases, weights)
        step = self._step
        phases["optimizer"].gb = max(phases["optimizer"].gb, step.peak / GIB)
        for _ in range(cfg.batch.updates):
            phases["optimizer"].take(replace(step, flops=0.0), self.device)
        trained = self.policy.trainable.named()
        numbers = sum(p.numel() for p in trained.values())
        return Budget(
            model=cfg.model.source,
            pipeline=self.policy.architecture.pipeline,
            architecture=self.policy.architecture.where,
            device=self.device,
            gpus=self.gpus,
            samples=cfg.batch.prompts * cfg.batch.group,
            fixed=self._fixed(cfg, numbers, views, weights),
            phases=phases,
            rows=rows,
            first=first,
            reduced=self._reduced(cfg, [*trained.values()]),
            parameters={"network": self.parameters, "trained": numbers},
            notes=_notes(cfg, self.device),
        )

    @cached_property
    def _step(self) -> Part:
        return _optimizer(self.policy, self.device)

    def _of_prompts(self, own: Config, weights: WeightCosts) -> Told:
        """What a rehearsal of one process tells."""
        # it is the same wherever states are kept
        batch = f"{own.batch.model_copy(update={'states': 'device'})} {own.train.compile}"
        if batch not in self.rehearsals:
            self.rehearsals[batch] = rehearsed(own, self.policy.shapes)
        first, events, metrics, views, states = self.rehearsals[batch]
        if own.batch.states == "host":
            events = [event.without(states) for event in events]
        cond = _cond_bytes(self.policy, own)
        phases = simulated(events, self._costs(own), self.device, cond, weights)
        return _rows(first), _rows(metrics), phases, views

    def _costs(self, cfg: Config) -> Costs:
        """Costs of calls under the settings that change them."""
        key = (cfg.train.gradient_checkpointing, cfg.train.compile)
        if key not in self.costs:
            compiled = cfg.train.compile == "blocks"
            (network,) = self.policy.networks.values()
            self.costs[key] = Costs(
                self.policy,
                self.device,
                low=self.low,
                checkpointing=cfg.train.gradient_checkpointing,
                blocks=blocks(network) if compiled else [],
            )
        return self.costs[key]

    def _reduced(self, cfg: Config, trained: list[torch.nn.Parameter]) -> dict[str, float]:
        """What processes send each other in the updates of an iteration to sum their gradients.
        Those of split weights are summed in each backward (weight_costs.py)."""
        if self.gpus == 1 or (cfg.train.mode == "full" and cfg.train.shard):
            return {"gb": 0.0, "seconds": 0.0}
        size, updates = 4 * sum(p.numel() for p in trained), cfg.batch.updates
        seconds = self.device.all_reduce(size, self.gpus, len(buckets(trained)))
        return {"gb": updates * size / GIB, "seconds": updates * seconds}

    def _moved(self, cfg: Config, phases: dict[str, Phase], weights: WeightCosts) -> None:
        """Weights that leave the device are there in some phases alone, and come back once an
        iteration after each."""
        if cfg.model.encoders == "leave":
            size = encoders_size(self.policy)
            phases["encode"].gb += size / GIB
            phases["encode"].spend("upload", size / self.device.upload)
        if (part := cfg.model.offload) in AWAY:
            for name, phase in phases.items():
                if name not in AWAY[part]:
                    phase.gb += weights.stays / GIB
            phases["rollout"].spend("upload", weights.stays / self.device.upload)
            phases["update"].spend("upload", weights.stays / self.device.upload)

    def _fixed(
        self, cfg: Config, numbers: int, views: int, weights: WeightCosts
    ) -> dict[str, float]:
        """Gigabytes that stay: weights, and what belongs to those that are trained."""
        low_moments = cfg.optimizer.name == "adamw8bit"
        shared = cfg.train.mode == "full" and cfg.train.shard  # copies are split likewise
        numbers = numbers // self.gpus if shared else numbers
        copies = {
            "trained": 1 if cfg.train.mode == "lora" else 0,
            "views": views,
            "gradients": 1,
            "moments": 2 * (1 / 4 + 1 / 256) if low_moments else 2,  # a byte, a scale for 256
            "average": 1 if cfg.ema.decay else 0,
        }
        leaving = cfg.model.encoders == "leave"
        prompts = cfg.iterations * cfg.batch.prompts // self.gpus
        answers = (
            self._costs(cfg).of(Asked(what="encode", rows=cfg.batch.prompts // self.gpus)).saved
        )
        filled = min(LARGEST, answers * prompts / max(1, cfg.batch.prompts // self.gpus))
        found = {
            "network": 0.0 if cfg.model.offload in AWAY else weights.stays,
            "text encoders": 0.0 if leaving else encoders_size(self.policy),
            "vae": _size(dict(self.policy.vae.named_parameters())),
            **{name: 4.0 * count * numbers for name, count in copies.items()},
            "kept answers of encoders": filled,
        }
        return {name: size / GIB for name, size in found.items()}


def check_known(cfg: Config, gpus: int) -> None:
    """ValueError where a run would not start, or the budget does not know what it would do."""
    combine.check(cfg)
    if gpus < 1:
        raise ValueError(f"--gpus {gpus} should be a whole number from 1")
    if cfg.data.offline:
        raise ValueError(
            "flowrl budget knows runs that sample, and data.offline trains on a folder; leave it"
            " out"
        )
    if cfg.train.sequence_parallel > 1:
        raise ValueError(
            "flowrl budget does not know what a member of a team keeps of an activation; leave"
            " train.sequence_parallel out, which gives the memory of a process alone"
        )
    if "text_encoder" in cfg.train.parts:
        raise ValueError(
            "flowrl budget does not know what training the text encoder costs; leave text_encoder"
            " out of train.parts"
        )


def share(cfg: Config, gpus: int) -> Config:
    """The config of one of several processes: its part of the prompts."""
    if gpus == 1:
        return cfg
    check_batch(cfg, processes=gpus, leaves=1)
    return combine.changed(cfg, {"batch.prompts": cfg.batch.prompts // gpus})


def enough(cfg: Config) -> tuple[int, ...]:
    """Numbers of prompts whose rehearsals tell that of the config's: its own, or two smaller ones.

    Prompts are alike, so that rows, FLOPs, seconds and bytes lie on a line once an update fills its
    micro-batches and policy/winner_gain has its 16 rows of the better half; micro-batches of a few
    rows would make a rehearsal of all prompts long. Compiled blocks pad the last micro-batch of an
    update: numbers of prompts that differ by whole micro-batches are padded alike.
    """
    b = cfg.batch
    samples = max(ENOUGH, 2 * b.micro, 2 * b.decode)
    least = b.updates * math.ceil(samples / (b.group * b.updates))
    step = least
    if cfg.train.compile == "blocks":
        whole = b.updates * b.micro // math.gcd(b.micro, b.group)
        least += (b.prompts - least) % whole
        step = whole * math.ceil(least / whole)
    plain = cfg.draw.mode == "once" and not cfg.replay.size
    return (least, least + step) if plain and b.prompts > least + step else (b.prompts,)


# rows of the first and the second iteration, phases of the second, copies of the weights
Told = tuple[dict[str, int], dict[str, int], dict[str, Phase], int]


def on_line(cfg: Config, small: Told, large: Told) -> Told:
    """What is told of all prompts by the two rehearsals of fewer (see enough)."""
    few, more = enough(cfg)
    share = (cfg.batch.prompts - few) / (more - few)  # of the step between the two, from the first

    def line(a: float, b: float) -> float:
        return a + share * (b - a)

    def counts(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
        found = {name: round(line(a[name], b[name])) for name in b}
        found["nfe/reference"] += b["nfe/winners"] - found["nfe/winners"]
        return found

    def phase(a: Phase, b: Phase) -> Phase:
        # each kind of moment has a line of its own, and the highest is another with many prompts
        lines = [line(a.moments.get(moment, gb), gb) for moment, gb in b.moments.items()]
        return Phase(
            gb=max(b.gb, *lines, 0.0),
            seconds=line(a.seconds, b.seconds),
            flops=line(a.flops, b.flops),
            rows=round(line(a.rows, b.rows)),
            ledger={kind: line(a.ledger.get(kind, 0.0), t) for kind, t in b.ledger.items()},
        )

    phases = {name: phase(small[2][name], large[2][name]) for name in PHASES}
    phases[WINNERS] = large[2][WINNERS]
    return counts(small[0], large[0]), counts(small[1], large[1]), phases, large[3]


# metrics of the first iteration, events and metrics of the second one, copies of the weights, bytes
# of the states
Rehearsed = tuple[dict[str, float], list[Event], dict[str, float], int, float]


def rehearsed(cfg: Config, shapes: CallShapes) -> Rehearsed:
    """(metrics of the first iteration, events and metrics of the second one, copies of the trained
    weights, bytes of the rollout's states), with the bytes of latents and media as they are."""
    numbers, media = torch.Size(shapes.latent).numel(), torch.Size(shapes.media).numel()
    samples = cfg.batch.prompts * cfg.batch.group
    runs, sizes = [], []
    exact = samples * max(numbers, media) <= EXACT
    for side in SMALL[:1] if exact else SMALL:
        latent = shapes.latent if exact else smaller(shapes.latent, side)
        sizes.append(torch.Size(latent).numel())
        drawn = shapes.media if exact else _media(shapes, sizes[-1] / numbers)
        run = Rehearsal(cfg, shapes, latent, drawn)
        runs.append((*run.rehearse(), len(run.algorithm.views)))
    first, events, metrics, states, views = runs[-1]
    if len(runs) == 2:
        slope = (numbers - sizes[0]) / (sizes[1] - sizes[0])
        pairs = zip(runs[0][1], runs[1][1], strict=True)
        events = [_extrapolated(small, large, slope) for small, large in pairs]
        states *= numbers / sizes[1]
    if keeps_reference(cfg, make_algorithm(cfg)):
        views += 1
    return first, events, metrics, views, states


def smaller(shape: Sequence[int], side: int) -> tuple[int, ...]:
    """Latents of the same number of axes: channels as they are, other axes `side` long."""
    channels, *rest = shape
    return (channels, *(side if size > side else size for size in rest))


def _media(shapes: CallShapes, factor: float) -> tuple[int, ...]:
    """Media with `factor` times the numbers of the real ones, in one long row."""
    *lead, height, width = shapes.media
    return (*lead, 1, max(1, round(height * width * factor)))


def _extrapolated(small: Event, large: Event, slope: float) -> Event:
    """The event at a size that lies `slope` times the step between two others above the first."""
    assert (small.phase, small.asked, small.backward) == (large.phase, large.asked, large.backward)
    names = ("live", "since", "moved")
    line = {
        name: getattr(small, name) + slope * (getattr(large, name) - getattr(small, name))
        for name in names
    }
    return replace(large, **line)


def simulated(
    events: list[Event], costs: Costs, device: Device, cond: float, weights: WeightCosts
) -> dict[str, Phase]:
    """Peaks, seconds, FLOPs and network rows of each phase of an iteration. cond: bytes of its
    prompts, bound to the calls.

    A forward with a gradient leaves what its backward reads, `held` until that is over.
    """
    phases = {name: Phase() for name in (*PHASES, WINNERS)}
    held = 0.0
    for event in events:
        phase = phases[event.phase] if event.phase in phases else Phase()
        kind = replace(event.asked, rows=0) if event.asked else None
        phase.reach((kind, event.backward, False), (event.since + held) / GIB)
        loop = device.call(device.seconds("", 0, event.moved), event.operators)
        phase.spend("loop", loop if event.operators else 0.0)
        if event.asked is None:
            continue
        asked, cost = event.asked, costs.of(event.asked)
        part: Part = cost.backward if event.backward else cost.forward
        if asked.what == "velocity":
            passes = 1 + (float(costs.checkpointing) if event.backward else 0.0)
            part = part.paying(weights, device, passes, backward=event.backward)
        own = phases["encode"] if asked.what == "encode" else phase
        own.reach((kind, event.backward, True), (event.live + held + part.peak) / GIB)
        own.take(part, device)
        held += _kept(asked, cost, event.backward, cond)
        if asked.what == "velocity" and not event.backward:
            own.rows += asked.rows * asked.branches
    return phases


def _kept(asked: Asked, cost: Cost, backward: bool, cond: float) -> float:
    """Bytes that live on after a call, above what the loop holds."""
    if asked.what == "encode":
        return cost.saved + cond
    return -cost.saved if backward else cost.saved


def _cond_bytes(policy: ModelledPolicy, cfg: Config) -> float:
    """Of the prompts of an iteration, bound to the calls of the network."""
    cond = policy.encode(["prompt"] * cfg.batch.prompts)
    kept = [v for calls in cond.groups[0].kept for call in calls for v in call.values()]
    return float(sum(v.numel() * v.element_size() for v in kept if isinstance(v, torch.Tensor)))


def _frozen(policy: ModelledPolicy) -> dict[str, Any]:
    """Weights of the network as loaded, without adapters."""
    (network,) = policy.networks.values()
    return {name: p for name, p in network.named_parameters() if "lora_" not in name}


def _size(weights: dict[str, Any]) -> float:
    return float(sum(p.numel() * p.element_size() for p in weights.values()))


def _optimizer(policy: ModelledPolicy, device: Device) -> Part:
    """Clipping and a step of AdamW, whose moments are there already."""
    weights = list(policy.trainable.named().values())
    adamw = torch.optim.AdamW(weights, lr=1e-3, foreach=device.cuda)
    for weight in weights:
        weight.grad = torch.empty_like(weight)
        moments = {name: torch.empty_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        adamw.state[weight] = {"step": torch.tensor(1.0), **moments}
    meter = Meter(device)
    with meter:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adamw.step()
    flops, seconds, operators = meter.books()
    return Part(flops=flops, seconds=seconds, operators=operators, peak=meter.peak)


def _rows(metrics: dict[str, float]) -> dict[str, int]:
    """The counts of a line of metrics."""
    names = ("nfe/rollout", "nfe/reference", "nfe/update", "nfe/winners", "policy/rows")
    return {name: round(metrics.get(name, 0.0)) for name in names}


def _notes(cfg: Config, device: Device) -> list[str]:
    """What the numbers do not hold."""
    notes = ["rewards and evaluations are not counted: neither their networks nor their seconds"]
    if cfg.train.precision != "no" or cfg.model.dtype != "fp32":
        notes.append(
            "where the ratio's self-test finds that low precision is not exact enough, old"
            " log-probs are computed again: a forward more for every trained row"
        )
    if not device.measured:
        notes.append(f"seconds are {device.source}: not measured on a GPU")
    return notes
