"""Resume a run: check that it is still the same, and choose the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.config import load as config
from flowrl.config.compose import ConfigError
from flowrl.config.gone import without_gone
from flowrl.config.schema import Config
from flowrl.runtime.log import logger
from flowrl.runtime.store import checkpoint, files, history
from flowrl.runtime.store.checkpoint import Checkpoint, CheckpointError
from flowrl.runtime.store.run_folder import config_file, metrics_digest, recorded
from flowrl.runtime.text import listed
from flowrl.training import identity, state
from flowrl.training.identity import Identity


def config_of(run: Path, overrides: list[str] | None = None) -> Config:
    """Return the Config of a run, changed by overrides; it comes from the newest checkpoint if
    config.yaml was lost."""
    path = run / "config.yaml"
    kept = None if path.is_file() else (_peek(run).get("identity") or {}).get("config")
    if kept:
        files.write(path, config.dump(Config.model_validate(without_gone(kept))))
        logger.warning(f"{path} was missing; it was written again from the newest checkpoint")
    return config.load_config(config_file(run), overrides or [])


def write_config(run: Path, cfg: Config) -> None:
    """Write config.yaml, unless the existing one says the same."""
    path = run / "config.yaml"
    try:
        same = path.exists() and config.read_config(path) == cfg
    except (ConfigError, OSError):
        same = False
    if not same:
        files.write(path, config.dump(cfg))


def check_resume(cfg: Config, run: Path, *, accept: bool = False) -> None:
    """Raise ValueError that names the differences if a run would not go on with the settings, files
    and code of its newest checkpoint, apart from settings that change no number. Nothing is loaded
    for it."""
    config_file(run)
    if checkpoint.steps(run) and not accept:
        _refuse(_changes(run, _peek(run), identity.of_config(cfg)), run)


def resume(trainer: state.Resumable, *, accept: bool = False) -> None:
    """Load the newest whole checkpoint; a run that has none yet starts from iteration 0.

    Damage, losses and changes are reported and kept in history.jsonl. All processes go on from the
    same checkpoint.
    """
    run, world = trainer.parts.path, trainer.parts.source.world
    found, changes = None, []
    with world.all_or_none(ValueError):
        if world.main and checkpoint.steps(run):
            found = checkpoint.load_newest(run)
            changes = _changes(run, found.meta, trainer.parts.identity)
            if not accept:
                _refuse(changes, run)
    folder = world.from_main(str(found.folder) if found else None)
    if folder is None:
        if world.main:
            logger.warning(f"{run} has no checkpoint yet: it starts from iteration 0")
        return
    with world.all_or_none(ValueError):
        found = found or _load(Path(folder))
        state.load(trainer, found)
    if world.main:
        _tell(run, found, changes, trainer.parts.identity["sources"])


def _load(folder: Path) -> Checkpoint:
    tensors, meta = checkpoint.load(folder)
    return Checkpoint(folder=folder, tensors=tensors, meta=meta, damaged={})


def _peek(run: Path) -> dict[str, Any]:
    """Read meta.json of the newest checkpoint, unverified; {} if there is none to read."""
    try:
        meta = checkpoint.read_json(checkpoint.latest(run) / checkpoint.META)
    except (CheckpointError, OSError):
        return {}
    return meta if isinstance(meta, dict) else {}


def _changes(run: Path, meta: dict[str, Any], now: Identity) -> list[str]:
    """List differences from a checkpoint, except those that were accepted since it was written."""
    kept = meta.get("identity")
    if not kept:  # an earlier version wrote it, without an identity
        kept = {"config": config.read_config(run / "config.yaml").model_dump(mode="json")}
    accepted = [line for line in history.read(run) if line.get("event") == "changed"][-1:]
    if accepted and accepted[0].get("iteration") == meta.get("iteration"):
        known = set(accepted[0].get("changes", ()))
    else:
        known = set()
    found = identity.differences(kept, now, run)
    return [] if known.issuperset(found) else found


def _refuse(changes: list[str], run: Path) -> None:
    if changes:
        raise ValueError(
            f"{run} has changed since its newest checkpoint: {listed(changes)}; undo that, start"
            " a new run, or add --accept-changes to go on with it"
        )


def _tell(run: Path, found: Checkpoint, changes: list[str], sources: dict[str, str]) -> None:
    """Warn about damage, losses and edits in a run, and write them to history.jsonl."""
    iteration = int(found.meta["iteration"])
    history.add(run, "resumed", iteration=iteration)
    # newer checkpoints that cannot be read are renamed, so that the next resume does not try them
    for folder, what in found.damaged.items():
        aside = checkpoint.set_aside(folder)
        _note(
            run,
            "damaged",
            iteration,
            f"{what}; it is kept as {aside.name}, and the run goes on from {found.folder.name}",
        )
    # compare settings, files and code, as far as the checkpoint knows them
    kept = found.meta.get("identity")
    if not kept:
        logger.warning(
            f"{found.folder} does not say what it was trained with (an earlier version wrote it),"
            " so only config.yaml was compared"
        )
    elif kept["sources"] != sources:
        what = "flowrl's source code was edited since then, so that numbers may differ"
        _note(run, "edited", iteration, what)
    if changes:
        what = f"accepted: {listed(changes)}"
        _note(run, "changed", iteration, what, changes=changes)
    # check that metrics.jsonl still has the lines before which the checkpoint was written
    lines = recorded(run)
    if lost := [str(i) for i in range(1, iteration + 1) if i not in lines]:
        _note(
            run,
            "lost",
            iteration,
            f"metrics.jsonl lacks {len(lost)} of the {iteration}"
            f" iterations up to {found.folder.name} ({listed(lost)}); its curves have that gap",
        )
    elif found.meta.get("metrics") not in (None, metrics_digest(run, iteration)):
        _note(
            run,
            "edited",
            iteration,
            f"metrics.jsonl was edited: up to iteration {iteration} it is not what"
            f" {found.folder.name} was written with",
        )


def _note(run: Path, event: str, iteration: int, what: str, **facts: Any) -> None:
    logger.warning(what)
    history.add(run, event, iteration=iteration, what=what, **facts)
