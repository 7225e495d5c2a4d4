"""A run that has nothing left to do: resuming it ends before a model is loaded."""

from __future__ import annotations

from pathlib import Path

from flowrl.config.live import Live, check_given
from flowrl.config.load import read_config
from flowrl.config.schema import Config
from flowrl.runtime.store import checkpoint, history
from flowrl.runtime.store.run_folder import config_file, trained_iterations
from flowrl.training.outputs import ALL_DONE, result
from flowrl.training.records import Run
from flowrl.training.resume import check_resume


def finished(cfg: Config, run: Path, *, accept: bool = False) -> Run | None:
    """Return the result of a run whose iterations are done and evaluated. None: something is left
    to do, settings are others than then, or one of its files is missing or damaged.

    accept: as in `flowrl.train`; ValueError where a resume would be refused by its settings.
    """
    last = (history.read(run) or [{}])[-1]
    if (last.get("event"), last.get("what")) != ("ended", ALL_DONE):
        return None
    check_given(cfg, Live())  # a run of live objects is resumed from its script
    check_resume(cfg, run, accept=accept)
    try:
        newest = checkpoint.latest(run)
        if read_config(config_file(run)) != cfg or checkpoint.iteration_of(newest) < cfg.iterations:
            return None
        checkpoint.load(newest)  # an error where it is damaged, which a start repairs
        found = result(run)
    except (ValueError, OSError):
        return None
    rows = {row["name"]: row.get("iteration") for row in found.evaluation.get("rows", ())}
    evaluated = rows.get("after") == cfg.iterations or not (rows or cfg.data.eval)
    trained = trained_iterations(found.metrics) == list(range(1, cfg.iterations + 1))
    exported = cfg.train.mode != "lora" or any((run / name).is_dir() for name in ("lora", "heads"))
    nothing = trained and found.metrics[-1].get("optimizer/step") == 0
    return found if evaluated and trained and exported and not nothing else None


def sentence(run: Run) -> str:
    """Say that a run is finished, and how it goes on."""
    done = trained_iterations(run.metrics)[-1]
    return (
        f"{run.path} is finished: all {done} iterations are done, so nothing was trained or"
        f" evaluated again; add iterations={2 * done}, for example, to go on with it"
    )
