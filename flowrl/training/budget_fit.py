"""Which cards a run fits, and which settings make it fit: one change after the other to the phase
with the peak, each a budget of its own.

A way to save memory is one record of CHANGES: the phases that it makes smaller, and the settings
that it would have, from a config; None where it has nothing left to give.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flowrl.config.combine import Settings, changed, combines, value_of, words
from flowrl.config.device import usual_device
from flowrl.config.schema import Config
from flowrl.runtime.log import logger
from flowrl.runtime.roofline import GIB, Device, of_cuda
from flowrl.training.budget import Budget, Planner
from flowrl.training.phases import PHASES

# GiB that programs find free on cards of so many gigabytes
CARDS = {24: 23.5, 40: 39.4, 80: 79.1, 141: 139.8}
MOST = 16  # changes that are tried
LARGE = 300_000_000  # weights of a network from which a run's budget is worth seconds at its start


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A way to save memory in some phases. settings(cfg, gpus): None where it has nothing left;
    stays: whether what stays is less."""

    phases: frozenset[str]
    settings: Callable[[Config, int], Settings | None]
    stays: bool = False


def _half(name: str, most: int) -> Callable[[Config, int], Settings | None]:
    """Half of batch.<name>, from at most `most` on."""

    def settings(cfg: Config, gpus: int) -> Settings | None:
        now = min(getattr(cfg.batch, name), most)
        return {f"batch.{name}": now // 2} if now > 1 else None

    return settings


def _switch(name: str, value: Any) -> Callable[[Config, int], Settings | None]:
    """A setting at a value, once."""

    def settings(cfg: Config, gpus: int) -> Settings | None:
        return None if value_of(cfg, name) == value else {name: value}

    return settings


def _shard(cfg: Config, gpus: int) -> Settings | None:
    return None if gpus == 1 or cfg.train.shard else {"train.shard": ["denoiser"]}


def _quantize(kind: str) -> Callable[[Config, int], Settings | None]:
    """Weights that then stay on the device."""

    def settings(cfg: Config, gpus: int) -> Settings | None:
        if cfg.model.quantize in (kind, "nf4"):
            return None
        stays = cfg.model.offload == "none"
        return {"model.quantize": kind} | ({} if stays else {"model.offload": "none"})

    return settings


def _checkpointing(cfg: Config, gpus: int) -> Settings | None:
    """Of every second block, then of all."""
    now = float(cfg.train.gradient_checkpointing)
    return None if now == 1 else {"train.gradient_checkpointing": 0.5 if now < 0.5 else True}


NETWORK = frozenset({"rollout", "reference", "update"})
ALL = frozenset(PHASES)
# what costs the least time first
CHANGES = (
    Change(phases=frozenset({"decode", "reward"}), settings=_half("decode", 16)),
    Change(phases=ALL - {"encode"}, settings=_switch("model.encoders", "leave"), stays=True),
    Change(
        phases=frozenset({"encode", "decode", "reward"}),
        settings=_switch("model.offload", "denoiser"),
        stays=True,
    ),
    Change(
        phases=ALL - {"encode", "rollout", "optimizer"}, settings=_switch("batch.states", "host")
    ),
    Change(phases=ALL, settings=_shard, stays=True),
    # a reference inside of an update is on top of what that keeps
    Change(phases=frozenset({"update", "reference"}), settings=_checkpointing),
    Change(phases=ALL, settings=_quantize("int8"), stays=True),
    Change(phases=NETWORK, settings=_half("micro", 1 << 30)),
    Change(phases=ALL, settings=_switch("optimizer.name", "adamw8bit"), stays=True),
    Change(phases=ALL, settings=_quantize("nf4"), stays=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A budget, and the settings that it has in place of the config's."""

    settings: Settings
    budget: Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The config's own budget first, then with ever more settings changed."""

    steps: list[Step]

    @property
    def own(self) -> Budget:
        return self.steps[0].budget

    def on(self, gigabytes: float) -> Step | None:
        """The first that a card with so many GiB holds; None: none does."""
        return next((step for step in self.steps if step.budget.needed <= gigabytes), None)


def fit(planner: Planner, cards: tuple[float, ...] = tuple(CARDS.values())) -> Fit:
    """Change settings until the smallest of the cards is enough, or nothing is left to change."""
    steps, cfg, state = [Step(settings={}, budget=planner.budget())], planner.cfg, planner.state
    while len(steps) <= MOST:
        budget = steps[-1].budget
        if budget.needed <= min(cards):
            break
        free = [card for card in cards if card > budget.resident + budget.device.reserve]
        held = not free or budget.needed <= min(free)  # by what stays, from the next smaller card
        settings = next_change(cfg, budget.highest, planner.gpus, held, state=state)
        if settings is None:
            break
        cfg = changed(cfg, settings)
        since = {**steps[-1].settings, **settings}
        differ = {name: v for name, v in since.items() if value_of(planner.cfg, name) != v}
        step = Step(settings=differ, budget=planner.budget(cfg))
        steps.append(step)
    return Fit(steps=steps)


def next_change(
    cfg: Config, phase: str, gpus: int, held: bool, *, state: int = 1
) -> Settings | None:
    """The settings of the first change that makes a phase smaller; held: what stays, too. state:
    network rows of one state, the least that a forward has."""
    for change in CHANGES:
        if held and not change.stays:
            continue
        settings = change.settings(cfg, gpus) if phase in change.phases else None
        if settings is None or settings.get("batch.micro", state) < state:
            continue
        if combines(cfg, settings):
            return settings
    return None


def record(found: Fit) -> dict[str, Any]:
    """A fit as JSON: see docs/budget.md for its keys."""
    b = found.own
    return {
        "model": b.model,
        "pipeline": b.pipeline,
        "architecture": b.architecture,
        "device": b.device.name,
        "gpus": b.gpus,
        "basis": b.device.source,
        "samples": b.samples,
        "parameters": b.parameters,
        "gb": {
            "resident": b.resident,
            "peak": b.peak,
            "needed": b.needed,
            "highest": b.highest,
            **{f"resident/{name}": size for name, size in b.fixed.items()},
        },
        "phases": {
            name: {
                "gb": b.resident + phase.gb,
                "above_gb": phase.gb,
                "seconds": phase.seconds,
                "flops": phase.flops,
                "rows": phase.rows,
                "ledger": phase.ledger,
            }
            for name, phase in b.phases.items()
        },
        "rows": b.rows,
        "first_iteration": b.first,
        "all_reduce": b.reduced,
        "seconds": b.seconds,
        "flops": b.flops,
        "utilisation": b.utilisation,
        "cards": {str(card): _on(found, free) for card, free in CARDS.items()},
        "notes": b.notes,
    }


def _on(found: Fit, free: float) -> dict[str, Any]:
    """Whether a card holds the run: as it is, or with other settings."""
    step = found.on(free)
    if step is None:
        return {"fits": False, "settings": None, "gb": None, "seconds": None}
    b = step.budget
    return {
        "fits": not step.settings,
        "settings": step.settings,
        "gb": b.needed,
        "seconds": b.seconds,
    }


class DoesNotFit(ValueError):
    """A run that its device cannot hold."""


def check(found: Fit, free: float) -> None:
    """DoesNotFit where a device with so many GiB cannot hold the run; it names the nearest settings
    that fit."""
    b, step = found.own, found.on(free)
    if step is not None and not step.settings:
        return
    kept = f"{b.resident:.1f} GB of it stay: weights, and what is trained"
    fix = f"try {words(step.settings)}" if step else f"no batch size is small enough: {kept}"
    raise DoesNotFit(
        f"this run would need {b.needed:.1f} GB in the phase {b.highest} (modelled), and the device"
        f" has {free:.1f}; {fix}; guard.fits=false starts it all the same"
    )


def summary(found: Fit) -> str:
    """One paragraph about a run, before it starts."""
    b = found.own
    parts = ", ".join(
        f"{name} {phase.seconds:.3g} s" for name, phase in b.phases.items() if phase.flops
    )
    return (
        f"budget     {b.needed:.1f} GB in the phase {b.highest}, {b.resident:.1f} of them all the"
        f" time; {b.seconds:.3g} s an iteration without rewards ({parts}),"
        f" {b.utilisation:.0%} of {b.device.name}'s matmul ceiling; {b.device.source}"
    )


def before(cfg: Config) -> str | None:
    """What `flowrl train` says of a run that is to start on this machine's GPU. DoesNotFit where
    guard.fits is true and it does not; None without a GPU, and in all processes but the first."""
    if os.environ.get("RANK", "0") != "0" or usual_device() != "cuda":
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    device = of_cuda(found.name, found.total_memory / GIB)
    return planned(cfg, device, gpus=int(os.environ.get("WORLD_SIZE", "1")))


def planned(cfg: Config, device: Device, *, gpus: int = 1) -> str | None:
    """The summary of a run on a device. None where the network is small, or where its calls are not
    known."""
    try:
        planner = Planner(cfg, device, gpus=gpus)
    except ValueError as error:
        logger.info(f"no budget: {error}")
        return None
    free = device.memory
    if planner.parameters < LARGE or free is None:
        return None
    found = fit(planner, (free,))
    if cfg.guard.fits:
        check(found, free)
    return summary(found)
