"""The folder of a run: named, locked by the main process, and known to all of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrl.config.schema import Config
from flowrl.runtime.processes.world import World
from flowrl.runtime.store.lock import Lock

DOING = "flowrl train"
# files and folders of a run; with one of the first two it can be resumed
RUN_FILES = ("config.yaml", "checkpoints", "metrics.jsonl")


@contextmanager
def claimed(cfg: Config, resume: Path | None, world: World) -> Iterator[tuple[Path, Lock | None]]:
    """Give the run's folder, with the main process's lock on it.

    An error inside gives both back: a folder that was made for it is removed again.
    """
    lock = None
    with world.all_or_none(ValueError):
        if world.main:
            try:
                lock = Lock(resume, DOING) if resume else _new(cfg)
            except OSError as error:
                raise ValueError(str(error)) from error
    path = Path(world.from_main(str(lock.folder) if lock else None))
    try:
        yield path, lock
    except BaseException:
        if lock:
            lock.withdraw()
        raise


def _new(cfg: Config) -> Lock:
    """Lock a folder that holds no run."""
    path, made = _folder(cfg)
    lock = Lock(path, DOING)
    if holds := next((name for name in RUN_FILES if (path / name).exists()), None):
        lock.withdraw()
        what = f"resume it with `flowrl train --resume {path}`, or choose another output="
        if holds == RUN_FILES[-1]:
            what = "its config.yaml is missing, so restore that, or choose another output="
        raise ValueError(f"{path} already holds a run; {what}")
    lock.made = made
    return lock


def _folder(cfg: Config) -> tuple[Path, list[Path]]:
    """Make the folder that `output` names, or one under runs/ -> (it, the folders made)."""
    if cfg.output:
        path = Path(cfg.output)
        made = _missing(path)
        path.mkdir(parents=True, exist_ok=True)
        return path, made
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{cfg.algorithm['label']}"
    for number in itertools.count(1):
        path = Path("runs", name if number == 1 else f"{name}-{number}")
        made = _missing(path)
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another run that started in the same second has this folder
            continue
        return path, made
    raise AssertionError


def _missing(path: Path) -> list[Path]:
    """List the folders of a path that do not exist yet, the innermost first."""
    return [place for place in (path, *path.parents) if not place.exists()]
