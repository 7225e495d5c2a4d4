"""Run all iterations: progress bar, signals, stop rules, and files at the end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol

from flowrl.config.training import StopConfig
from flowrl.rewards import RewardUnavailable, TooManyInvalid
from flowrl.runtime import log
from flowrl.runtime.memory import ran_out
from flowrl.runtime.processes.world import Lost
from flowrl.runtime.signals import Aborted, StopRequest, by_signal
from flowrl.runtime.store import history
from flowrl.runtime.text import error_text
from flowrl.training import outputs, state
from flowrl.training.out_of_memory import explained
from flowrl.training.records import Iteration, NothingTrained, Run
from flowrl.training.watch.guards import Dead

# metric -> its word beside the progress bar; the first that there is, is shown
SHOWN = {"reward/total": "reward", "policy/teacher_distance": "distance", "policy/error": "error"}


class Iterating(outputs.Running, Protocol):
    """The parts of a trainer that a run needs; a trainer trains when it is iterated."""

    def __iter__(self) -> Iterator[Iteration]: ...


def run_to_the_end(trainer: Iterating) -> Run:
    """Iterate with a progress bar, evaluate, and write the LoRA and the report; unlock the run's
    folder, however the run ends."""
    with trainer.parts.lock or nullcontext(), recorded(trainer), explained(trainer):
        iterate(trainer)
        return outputs.finish(trainer)


@contextmanager
def recorded(trainer: Iterating) -> Iterator[None]:
    """Write into history.jsonl why a run that had started failed; a disk may be full."""
    try:
        yield
    except Exception as error:
        path, main = trainer.parts.path, trainer.parts.source.world.main
        if main and (path / history.FILE).exists() and not isinstance(error, NothingTrained):
            what = error_text(error) or type(error).__name__
            with suppress(OSError):
                history.add(path, "failed", iteration=trainer.iteration, what=what)
        raise


def iterate(trainer: Iterating) -> None:
    """Run the remaining iterations, and evaluate after them."""
    cfg, main = trainer.cfg, trainer.parts.source.world.main
    bar = log.Progress(cfg.iterations, done=trainer.iteration, show=main)
    with StopRequest(trainer), bar:
        try:
            for it in trainer:
                norm = it.metrics["policy/grad_norm"]
                shown = {word: it.metrics[k] for k, word in SHOWN.items() if k in it.metrics}
                facts: dict[str, Any] = dict([*shown.items()][:1])
                if it.metrics["policy/rows"] or norm or trainer.learner.nonfinite:
                    facts["grad"] = norm
                else:
                    facts["no signal:"] = "all groups have equal rewards"
                bar.update(it.number, it.metrics["time/iteration"], **facts)
            if not by_signal(trainer.stopped):
                outputs.evaluate(trainer, "after")
        except Aborted as abort:
            trainer.stopped = str(abort)
        except Exception as error:
            # Save if weights are those of a whole iteration and all who hold them are here: the
            # first kind of error comes on all processes at once, the second on one alone.
            on_all = isinstance(error, TooManyInvalid | Dead)
            on_one = isinstance(error, RewardUnavailable | Lost) or ran_out(error)
            split = state.is_split(trainer.parts.weights)
            if (on_all or (on_one and not split)) and not trainer.learner.touched:
                trainer.save()
            raise
        if trainer.stopped:
            trainer.save()


def stop_rule(stop: StopConfig, metrics: dict[str, float], hours: float) -> str | None:
    """Return the reason why a run ends after an iteration with these metrics; None: it goes on."""
    name = "reward/total" if stop.domain is None else f"reward/total/{stop.domain}"
    # an iteration may have no prompt of the domain
    reward, kl = metrics.get(name, -math.inf), metrics.get("policy/kl", 0.0)
    if stop.kl is not None and kl > stop.kl:
        return f"policy/kl {kl:.4g} exceeds stop.kl={stop.kl}"
    if stop.reward is not None and reward >= stop.reward:
        return f"{name} {reward:.4g} reached stop.reward={stop.reward}"
    if stop.hours is not None and hours >= stop.hours:
        return f"stop.hours={stop.hours} are over"
    if stop.watch == "stop" and metrics.get("watch/past_peak"):
        return (
            f"the held-out reward, {metrics['watch/held_out']:.4g}, lies significantly below its"
            f" peak, {metrics['watch/best']:.4g} at iteration {metrics['watch/peak']:g}"
            " (stop.watch=stop)"
        )
    return None
