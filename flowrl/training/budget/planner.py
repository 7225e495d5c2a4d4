"""Plan memory, time, rows and FLOPs of a run before it runs, without a GPU and weights.

Two iterations are rehearsed by the run's own loop with a policy that computes nothing
(rehearsal.py), which shows every call of the network, the decoder and the text encoders. Each kind
of call is then run once on the meta device by the run's own policy code, with the real architecture
and its LoRA (call_costs.py). The rest is bookkeeping: peaks of the loop's own tensors and of the
calls beside them, and a roofline of the device (flowrl/training/budget/roofline.py).

Rehearsals use small latents (from_small.py). Gigabytes are 2**30 bytes, as in the ledger.
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from flowrl.config.build import (
    DTYPES,
    autocast,
    make_algorithm,
)
from flowrl.config.facts import of_config
from flowrl.config.lighter import SCORING, away, changed
from flowrl.config.rules import climbs
from flowrl.config.schema import Config
from flowrl.config.training import OPTIMIZERS
from flowrl.data import conditions
from flowrl.policy.load import call_options
from flowrl.policy.replay.encoders import LARGEST
from flowrl.rewards.core.features import features_bytes
from flowrl.rewards.core.reward_set import sizes
from flowrl.runtime.processes.world import buckets
from flowrl.training.budget.architecture import read
from flowrl.training.budget.call_costs import Cost, Costs, booked
from flowrl.training.budget.from_small import Extrapolated, enough, for_all_prompts, rehearsed
from flowrl.training.budget.meter import Meter
from flowrl.training.budget.modelled_tokens import Modelled, modelled
from flowrl.training.budget.phases import Phase, simulated
from flowrl.training.budget.rehearsal import WINNERS, PolicyCall, Rehearsed
from flowrl.training.budget.roofline import GIB, Device
from flowrl.training.budget.start import Start, Work
from flowrl.training.budget.weight_costs import (
    WeightCosts,
    encoders_size,
    size_of,
    weight_costs,
)
from flowrl.training.budget.whole_run import evaluations, loading
from flowrl.training.build import keeps_reference
from flowrl.training.setup import Setup, set_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The needs of one process, in GiB, seconds and FLOPs of a usual iteration."""

    model: str  # setting model.source of the config
    pipeline: str  # name of the pipeline's class
    architecture: str  # place from which the networks' sizes were read
    device: Device  # device that has these seconds and this memory
    gpus: int  # number of processes, one on each device
    samples: int  # number of samples in an iteration, over all processes
    fixed: dict[str, float]  # kind of memory that stays -> GiB
    phases: dict[str, Phase]  # phases in their order
    rows: dict[str, int]  # metric -> network rows that it will count
    first: dict[str, int]  # metric -> network rows of the first iteration
    reduced: dict[str, float]  # cost of gradients summed over processes: "gb" and "seconds"
    iterations: int  # number of iterations of the whole run
    beside: dict[str, float]  # seconds of all "evaluations" of the run, and of "loading" weights
    parameters: dict[str, int]  # number of weights in the "network" and of "trained" ones
    notes: list[str] = field(default_factory=list)  # sentences about what the budget does not count

    @property
    def resident(self) -> float:
        """GiB that stay over an iteration."""
        return sum(self.fixed.values())

    @property
    def peak(self) -> float:
        """GiB of tensors at the highest moment."""
        return self.resident + max(phase.gb for phase in self.phases.values())

    @property
    def needed(self) -> float:
        """GiB that a card must have: the peak, 4% that the allocator cannot use, the driver's."""
        return self.peak * (1.04 if self.device.cuda else 1.0) + self.device.reserve

    @property
    def highest(self) -> str:
        """The phase with the peak."""
        return max(self.phases, key=lambda name: self.phases[name].gb)

    @property
    def seconds(self) -> float:
        """Seconds of an iteration, without rewards and evaluations."""
        return sum(phase.seconds for phase in self.phases.values()) + self.reduced["seconds"]

    @property
    def flops(self) -> float:
        """FLOPs of an iteration."""
        return sum(phase.flops for phase in self.phases.values())

    @property
    def run(self) -> dict[str, float]:
        """Seconds of a whole run, by what takes them; without rewards."""
        parts = {"iterations": self.iterations * self.seconds, **self.beside}
        return parts | {"total": sum(parts.values())}

    @property
    def utilisation(self) -> float:
        """FLOPs over what the device's large matmuls would do in that time."""
        return self.flops / (self.seconds * self.device.ceiling)


FEATURES = "diversity.features"
UNKNOWN = "the size of its networks is not known, and not counted"


class Planner:
    """Budgets of a config and of changes to it: the architecture is built once."""

    def __init__(self, cfg: Config, device: Device, *, gpus: int = 1) -> None:
        check_known(cfg, gpus)
        self.cfg, self.device, self.gpus = cfg, device, gpus
        self.scorers = scorers(cfg)
        # bytes of the network that gives features
        self.features = self.scorers.get(FEATURES) or 0.0
        self.rewards = sum(size or 0.0 for size in self.scorers.values()) - self.features
        architecture = read(cfg.model.source)
        lora = cfg.train.lora.model_dump() if cfg.train.mode == "lora" else None
        climbed = climbs(cfg.reward, make_algorithm(cfg).needs)
        self.policy = modelled(
            architecture,
            conditions.loaded(call_options(cfg.model.pipeline)),
            lora=lora,
            dtype=DTYPES[cfg.model.dtype],
            decoder=torch.float32 if climbed else DTYPES[cfg.model.dtype],
        )
        self.policy.trainable.named()  # in full mode this makes the weights fp32
        context = autocast(cfg, torch.device("cuda" if device.cuda else "cpu"))
        low = None if context is nullcontext else DTYPES[cfg.train.precision]
        self.costs = Costs(self.policy, device, low=low)
        self.rehearsals: dict[str, Rehearsed] = {}  # settings that change a rehearsal -> its result

    def on(self, device: Device) -> Planner:
        """Return a planner for another device of its kind; rehearsals do not depend on it."""
        other = copy(self)
        other.device, other.costs = device, Costs(self.policy, device, low=self.costs.low)
        other.__dict__.pop("_step", None)  # the optimizer's seconds are the old device's
        return other

    @property
    def parameters(self) -> int:
        """Weights of the network, without adapters."""
        (network,) = self.policy.networks.values()
        return sum(p.numel() for name, p in network.named_parameters() if "lora_" not in name)

    @property
    def state(self) -> int:
        """Network rows of one state: a batch.micro below it changes nothing."""
        return self._setup(self.cfg).state_rows

    def _setup(self, cfg: Config) -> Setup:
        """Make the Setup of a config with this policy, as the loop does."""
        return set_up(cfg, make_algorithm(cfg), self.policy)

    def budget(self, cfg: Config | None = None) -> Budget:
        """Make the budget of the config, or of one that differs from it in its batch,
        checkpointing, compiling, and how weights are kept."""
        # an iteration of one process, with its part of the prompts; two rehearsals of fewer prompts
        # tell the result for all
        cfg = cfg or self.cfg
        process = changed(cfg, {"batch.prompts": cfg.batch.prompts // self.gpus})
        weights = weight_costs(cfg, self.policy, self.gpus)
        sizes = [
            self._of_prompts(changed(process, {"batch.prompts": few}), weights)
            for few in enough(process)
        ]
        whole = sizes[0] if len(sizes) == 1 else for_all_prompts(process, *sizes)

        # policy/winner_gain is a phase of its own until here, because its number of rows does not
        # depend on the number of prompts
        phases = whole.phases
        phases["reference"].join(phases.pop(WINNERS))
        for counts in (whole.first, whole.rows):
            del counts["nfe/winners"]

        # costs that no rehearsal sees: weights that come and go, and the optimizer's step
        self._moved(cfg, phases, weights)
        step = self._step
        phases["optimizer"].gb = max(
            phases["optimizer"].gb, (self._gradients(cfg) + step.peak) / GIB
        )
        for _ in range(cfg.batch.updates):
            phases["optimizer"].take(replace(step, flops=0.0), self.device)
        return Budget(
            model=cfg.model.source,
            pipeline=self.policy.architecture.pipeline,
            architecture=self.policy.architecture.where,
            device=self.device,
            gpus=self.gpus,
            samples=cfg.batch.prompts * cfg.batch.group,
            fixed=self._fixed(cfg, weights),
            phases=phases,
            rows=whole.rows,
            first=whole.first,
            reduced=self._reduced(cfg),
            iterations=cfg.iterations,
            beside={
                "evaluations": evaluations(cfg, self.costs, weights, self.gpus),
                "loading": loading(self.policy, self.rewards + self.features),
            },
            parameters={"network": self.parameters, "trained": self._numbers},
            notes=[*_notes(cfg, self.device, self.scorers), *_pictures(self.policy)],
        )

    def start(self) -> dict[str, Work]:
        """Return the work before the first iteration of the config's run, by its parts."""
        weights = weight_costs(self.cfg, self.policy, self.gpus)
        parts = Start(self.cfg, self.costs, weights, self.gpus)
        return parts.all(loading(self.policy, self.rewards + self.features))

    @cached_property
    def _numbers(self) -> int:
        """Count the trained numbers."""
        return sum(p.numel() for p in self.policy.trainable.named().values())

    @cached_property
    def _step(self) -> Cost:
        """The cost of an optimizer step."""
        return _optimizer(self.policy, self.device)

    def _of_prompts(self, cfg: Config, weights: WeightCosts) -> Extrapolated:
        """Return the result of rehearsing one process; equal batches share one rehearsal."""
        # the rehearsal does not depend on where states are kept
        batch = f"{cfg.batch.model_copy(update={'states': 'device'})} {cfg.train.compile}"
        if batch not in self.rehearsals:
            self.rehearsals[batch] = rehearsed(cfg, self.policy.shapes)
        known = self.rehearsals[batch]
        events = known.events
        if cfg.batch.states == "host":
            events = [event.without(known.states) for event in events]
        phases = simulated(
            events,
            self.costs,
            cfg,
            cond=_cond_bytes(self.policy, cfg),
            gradients=self._gradients(cfg),
            weights=weights,
        )
        return Extrapolated(first=dict(known.first), rows=dict(known.rows), phases=phases)

    def _reduced(self, cfg: Config) -> dict[str, float]:
        """Return the cost of summing gradients over processes in the updates of an iteration. Those
        of split weights are summed in each backward (weight_costs.py)."""
        if self.gpus == 1 or (cfg.train.mode == "full" and cfg.train.shard):
            return {"gb": 0.0, "seconds": 0.0}
        size, calls = 4 * self._numbers, len(buckets([*self.policy.trainable.named().values()]))
        seconds = self.device.all_reduce(size, self.gpus, calls)
        return {"gb": cfg.batch.updates * size / GIB, "seconds": cfg.batch.updates * seconds}

    def _moved(self, cfg: Config, phases: dict[str, Phase], weights: WeightCosts) -> None:
        """Add weights that leave the device to the phases in which they are there, and the seconds
        of their return, once in an iteration after each absence."""
        if cfg.model.encoders == "leave":
            size = encoders_size(self.policy)
            phases["encode"].gb += size / GIB
            phases["encode"].spend("upload", size / self.device.upload)
        if cfg.model.offload != "none":
            for name, phase in phases.items():
                if name not in away(cfg):
                    phase.gb += weights.stays / GIB
            phases["update"].spend("upload", weights.stays / self.device.upload)
            if cfg.model.encoders == "leave":  # the denoiser was away for the text encoders, too
                phases["rollout"].spend("upload", weights.stays / self.device.upload)
        if cfg.model.offload == "all":  # rewards come to the device with the first score
            for name in SCORING:
                phases[name].gb += self.rewards / GIB
            phases["reward"].spend("upload", self.rewards / self.device.upload)

    def _gradients(self, cfg: Config) -> float:
        """Count the bytes of an update's gradients on a process, or of any other copy of the
        trained weights: copies are split in the same way as the weights."""
        shared = cfg.train.mode == "full" and cfg.train.shard
        return 4.0 * (self._numbers // self.gpus if shared else self._numbers)

    def _fixed(self, cfg: Config, weights: WeightCosts) -> dict[str, float]:
        """Return the GiB that stay, by kind: weights, and the tensors that trained ones need."""
        low_moments, setup = cfg.optimizer.name == "adamw8bit", self._setup(cfg)
        copy, prompts = self._gradients(cfg), cfg.batch.prompts // self.gpus
        copies = {
            "trained": 1 if cfg.train.mode == "lora" else 0,
            "views": len(setup.algorithm.views) + keeps_reference(setup),
            # 8-bit moments: a byte each, and a scale for 256 of them
            "moments": 2 * (1 / 4 + 1 / 256) if low_moments else 2,
            "average": 1 if cfg.ema.decay else 0,
        }
        leaving = cfg.model.encoders == "leave"
        # encoders' answers are kept until there are LARGEST bytes of them
        answers = self.costs.of(PolicyCall(what="encode", rows=prompts), cfg)[0].left
        asked = cfg.iterations * cfg.batch.prompts // self.gpus
        filled = min(LARGEST, answers * asked / max(1, prompts))
        found = {
            "network": weights.stays if cfg.model.offload == "none" else 0.0,
            "text encoders": 0.0 if leaving else encoders_size(self.policy),
            "vae": size_of(self.policy.vae),
            "rewards": self.features + (0.0 if cfg.model.offload == "all" else self.rewards),
            **{name: count * copy for name, count in copies.items()},
            "kept answers of encoders": filled,
        }
        return {name: size / GIB for name, size in found.items()}


def check_known(cfg: Config, gpus: int, machines: int = 1) -> None:
    """Raise ValueError if a run would not start, or if the budget cannot predict it."""
    of_config(cfg, method=make_algorithm(cfg))
    check_words(cfg, gpus, machines)


def check_words(cfg: Config, gpus: int, machines: int) -> None:
    """Raise ValueError where words alone say so; this needs no torch."""
    if gpus < 1:
        raise ValueError(f"--gpus {gpus} should be a whole number from 1")
    if machines < 1 or gpus % machines:
        raise ValueError(
            f"--machines {machines} should be a whole number from 1 that divides --gpus {gpus},"
            f" the processes of all machines together; try --gpus {8 * max(1, machines)}"
        )
    of_config(cfg, processes=gpus)
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


def scorers(cfg: Config) -> dict[str, float | None]:
    """Return the bytes of each network that scores or compares samples; None: not known."""
    found = {f'reward "{label}"': size for label, size in sizes(cfg.reward).items()}
    if cfg.diversity.features is not None:
        found[FEATURES] = features_bytes(cfg.diversity.features, cfg.diversity.weights)
    return found


def _cond_bytes(policy: Modelled, cfg: Config) -> float:
    """Count the bytes of an iteration's prompts, bound to the calls of the network."""
    cond = policy.encode(["prompt"] * cfg.batch.prompts)
    kept = [v for calls in cond.groups[0].kept for call in calls for v in call.values()]
    return float(sum(v.numel() * v.element_size() for v in kept if isinstance(v, torch.Tensor)))


def _optimizer(policy: Modelled, device: Device) -> Cost:
    """Return the cost of clipping and a step of AdamW, whose moments exist already."""
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
    return booked(meter)


def _pictures(policy: Modelled) -> list[str]:
    """Say what is taken for the pictures that prompts bring, where the network reads them."""
    tokens = max(call.appended for call in policy.shapes.calls)
    said = (
        f"each prompt is taken to bring one square picture, {tokens:,} tokens behind those of the"
        " latents; the seconds in which pictures are encoded are not counted"
    )
    return [said] if tokens else []


def _notes(cfg: Config, device: Device, scorers: dict[str, float | None]) -> list[str]:
    """Write a sentence about each cost that the numbers leave out."""
    notes = [
        "of rewards, the weights alone are counted: neither what they take above these while they"
        " score nor their seconds; of evaluations, the seconds of network and decoder alone"
    ]
    notes += [f"{what}: {UNKNOWN}" for what, size in scorers.items() if size is None]
    if cfg.train.precision != "no" or cfg.model.dtype != "fp32":
        notes.append(
            "where the ratio's self-test finds that low precision is not exact enough, old"
            " log-probs are computed again: a forward more for every trained row"
        )
    if cfg.optimizer.name not in OPTIMIZERS:
        notes.append(f"{cfg.optimizer.name} is counted as AdamW: two numbers of 32 bits a weight")
    if cfg.eval.height or cfg.eval.width:
        notes.append("evaluations are counted at the size of training, not at that of eval.height")
    if cfg.anchor.data.weight:
        notes.append("reading and encoding the media of anchor.data is not counted")
    if device.cuda:
        notes.append(f"seconds are {device.source}: not measured on a GPU")
    return notes
