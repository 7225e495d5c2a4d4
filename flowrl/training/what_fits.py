"""After memory ran out on a GPU: the nearest settings that fit, by the budget (budget.py).

torch says how much it tried to allocate. Settings fit with which the phase that ran out needs at
least that much less than with the run's own, and no phase more than the device holds. Everything
else about the run is in the sentence of out_of_memory.py, whose next lighter setting stands where
the budget does not know the model, or no settings fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from flowrl.config.combine import Settings, changed, combines, words
from flowrl.runtime.log import logger
from flowrl.runtime.memory import OutOfMemory
from flowrl.runtime.roofline import Device
from flowrl.runtime.text import printable
from flowrl.training.budget import Budget, Planner
from flowrl.training.budget_fit import search, this_gpu
from flowrl.training.lighter import Shortage
from flowrl.training.out_of_memory import Case
from flowrl.training.phases import Phase

PATIENCE = 600  # seconds that others have to wait at least where one of several processes searches
# phases of a budget that are one in a run
PARTS = {
    "rollout": ("encode", "rollout"),
    "evaluation": ("encode", "rollout"),
    "update": ("update", "optimizer"),
}
Short = Callable[[Budget], Shortage | None]


@contextmanager
def naming_what_fits() -> Iterator[None]:
    """An OutOfMemory inside names the nearest settings that fit, where the budget knows them."""
    try:
        yield
    except OutOfMemory as error:
        case: Case | None = error.case
        found = None if case is None else what_fits(case)
        if found is None:
            raise
        raise case.error(found) from error


def what_fits(case: Case) -> str | None:
    """What to set, by the budget; None where that is not known. Needs no memory of a GPU."""
    device, others = this_gpu(), case.short.gpus > 1
    if device is None or case.tried is None or (others and case.cfg.guard.rank_seconds < PATIENCE):
        return None
    logger.info("out of memory: looking for settings that fit, which may take a minute or two")
    try:
        found = nearest(case, device)
    except (Exception, KeyboardInterrupt) as error:  # the sentence is what has to be said
        logger.info(f"no budget: {printable(error, 200) or type(error).__name__}")
        return None
    if found is None:
        logger.info("no settings are known that fit, by the budget")
        return None
    settings, less = found
    return (
        f"set {words(settings)}, the nearest that fits by the budget (modelled): the phase"
        f" {case.short.phase} then needs {less:.3g} GB less"
    )


def nearest(case: Case, device: Device) -> tuple[Settings, float] | None:
    """(settings that fit, GiB that the phase then needs less); None where there are none."""
    planner = Planner(case.cfg, device, gpus=case.short.gpus)
    phase = case.short.phase
    own = of_phase(planner.budget(), phase).needed
    most = own - case.tried

    def short(budget: Budget) -> Shortage | None:
        for part, gb in ((of_phase(budget, phase), most), (budget, device.memory)):
            if part.needed > gb:
                held = gb <= part.resident + device.reserve
                state, cuda = planner.state, device.cuda
                return replace(case.short, phase=part.highest, held=held, state=state, cuda=cuda)
        return None

    if most <= device.reserve:
        return None
    last = search(planner, short)[-1]
    if short(last.budget) is not None:
        return None
    settings = without_idle(planner, last.settings, short)
    budget = planner.budget(changed(planner.cfg, settings))
    return settings, own - of_phase(budget, phase).needed


def without_idle(planner: Planner, settings: Settings, short: Short) -> Settings:
    """Without those that are not needed beside the others; what takes the most time goes first."""
    for name in reversed(settings):
        rest = {key: value for key, value in settings.items() if key != name}
        cfg = changed(planner.cfg, rest)
        if combines(cfg) and short(planner.budget(cfg)) is None:
            settings = rest
    return settings


def of_phase(budget: Budget, phase: str) -> Budget:
    """A budget of one phase of a run alone; of what stays, where the run was in none."""
    parts = {part: budget.phases.get(part) for part in PARTS.get(phase, (phase,))}
    known = {part: found for part, found in parts.items() if found is not None}
    return replace(budget, phases=known or {phase: Phase()})
