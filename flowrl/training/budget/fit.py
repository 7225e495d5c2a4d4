"""Find the cards that a run fits, and the settings that make it fit: one change after the other
(lighter.py) to the phase with the peak, each with a budget of its own."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flowrl.config.device import usual_device
from flowrl.config.lighter import Settings, Shortage, as_words, changed, next_change, value_of
from flowrl.config.schema import Config
from flowrl.runtime.log import logger
from flowrl.runtime.processes.launcher import is_main, launched
from flowrl.training.budget.planner import UNKNOWN, Budget, Planner
from flowrl.training.budget.roofline import GIB, Device, of_cuda
from flowrl.training.budget.start import Work
from flowrl.training.budget.whole_run import hours

# size of a card in gigabytes -> GiB that programs find free on it
CARDS = {24: 23.5, 40: 39.4, 80: 79.1, 141: 139.8}
MOST = 16  # most changes that are tried
# number of weights from which a network's budget, at a run's start, is worth its seconds
LARGE = 300_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A budget, and the settings that it replaces in the config."""

    settings: Settings  # settings that differ from the config, by dotted name
    budget: Budget  # budget of the config with these settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Budgets of a config and of lighter ones."""

    steps: list[Step]  # steps from the config itself to ever more changed settings

    @property
    def own(self) -> Budget:
        """The budget of the config itself."""
        return self.steps[0].budget

    @property
    def fits(self) -> bool | None:
        """Whether the device holds the run as it is; None: its memory is not known."""
        free = self.own.device.memory
        return None if free is None else self.own.needed <= free

    def on(self, free: float) -> Step | None:
        """Return the first step that a card with so many free GiB can hold; None: there is none."""
        return next((step for step in self.steps if step.budget.needed <= free), None)


def fit(planner: Planner, cards: tuple[float, ...] = tuple(CARDS.values())) -> Fit:
    """Change settings until the smallest of the cards is enough, or nothing is left to change."""
    steps, cfg = [Step(settings={}, budget=planner.budget())], planner.cfg
    while len(steps) <= MOST and steps[-1].budget.needed > min(cards):
        settings = next_change(cfg, shortage(planner, steps[-1].budget, cards), modelled=True)
        if settings is None:
            break
        cfg = changed(cfg, settings)
        since = {**steps[-1].settings, **settings}
        differ = {name: v for name, v in since.items() if value_of(planner.cfg, name) != v}
        steps.append(Step(settings=differ, budget=planner.budget(cfg)))
    return Fit(steps=steps)


def shortage(planner: Planner, budget: Budget, cards: tuple[float, ...]) -> Shortage:
    """Describe where a run that fits one card must save memory to fit the next smaller one."""
    free = [card for card in cards if card > budget.resident + budget.device.reserve]
    return Shortage(
        phase=budget.highest,
        # then smaller cards do not hold even the memory that stays
        held=not free or budget.needed <= min(free),
        gpus=planner.gpus,
        state=planner.state,
        cuda=planner.device.cuda,
    )


def record(found: Fit, start: dict[str, Work]) -> dict[str, Any]:
    """Write a fit, and the work of the run's start, as JSON: see docs/budget.md for its keys."""
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
            # memory that stays, by parts: a key with a slash is a part of the key before it
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
        "start": {name: asdict(work) for name, work in start.items()},
        "all_reduce": b.reduced,
        "seconds": b.seconds,
        "run": b.run,
        "flops": b.flops,
        "utilisation": b.utilisation,
        "cards": {str(card): _on(found, free) for card, free in CARDS.items()},
        "fits": found.fits,
        "card_gb": b.device.memory,
        "notes": b.notes,
    }


def _on(found: Fit, free: float) -> dict[str, Any]:
    """Say whether a card holds the run, unchanged or with other settings."""
    if (step := found.on(free)) is None:
        return {"fits": False, "settings": None, "gb": None, "seconds": None}
    told = {"gb": step.budget.needed, "seconds": step.budget.seconds}
    return {"fits": not step.settings, "settings": step.settings, **told}


def verdict(found: Fit) -> str:
    """Say whether the device holds the run, and what to add where it does not; "": not known."""
    b, free = found.own, found.own.device.memory
    if free is None:
        return ""
    if found.fits:
        took = hours(b.run["total"])
        return f"fits {b.device.name}: yes, {b.needed:.1f} of {free:.1f} GB, {took} h"
    step = found.on(free)
    how = f"add {as_words(step.settings)}" if step else "no settings of a config make it fit"
    return f"does not fit {b.device.name}: needs {b.needed:.1f} of {free:.1f} GB; {how}"


class DoesNotFit(ValueError):
    """A run that its device cannot hold."""


def check(found: Fit, free: float) -> None:
    """DoesNotFit if a device with so many GiB cannot hold the run; it names the nearest settings
    that fit."""
    b, step = found.own, found.on(free)
    if step is not None and not step.settings:
        return
    kept = f"{b.resident:.1f} GB of it stay: weights, and what is trained"
    fix = f"try {as_words(step.settings)}" if step else f"no batch size is small enough: {kept}"
    raise DoesNotFit(
        f"this run would need {b.needed:.1f} GB in the phase {b.highest} (modelled), and the device"
        f" has {free:.1f}; {fix}; guard.fits=false starts it all the same"
    )


def summary(found: Fit) -> str:
    """Write one paragraph about a run, before it starts."""
    b = found.own
    parts = ", ".join(
        f"{name} {phase.seconds:.3g} s" for name, phase in b.phases.items() if phase.flops
    )
    unknown = "".join(f"; {note}" for note in b.notes if UNKNOWN in note)
    return (
        f"budget     {b.needed:.1f} GB in the phase {b.highest}, {b.resident:.1f} of them all the"
        f" time; {hours(b.run['total'])} h without rewards, {b.seconds:.3g} s an iteration"
        f" ({parts}),"
        f" {b.utilisation:.0%} of {b.device.name}'s matmul ceiling; {b.device.source}{unknown}"
    )


def before(cfg: Config) -> str | None:
    """Write what `flowrl train` says about a run before it starts on this machine's GPU. DoesNotFit
    if guard.fits is true and it does not; None without a GPU, and in all processes but the first.
    """
    device = this_gpu() if is_main() else None
    if device is None:
        return None
    gpus = launched()
    machines = max(1, gpus // int(os.environ.get("LOCAL_WORLD_SIZE", gpus)))
    return planned(cfg, device.over(machines, gpus), gpus=gpus)


def this_gpu() -> Device | None:
    """Return the GPU of a run in this process; None if it runs on a CPU."""
    if usual_device() != "cuda":
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return of_cuda(found.name, found.total_memory / GIB)


def planned(cfg: Config, device: Device, *, gpus: int = 1) -> str | None:
    """Write the summary of a run on a device. None if the network is small, or its calls are not
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
