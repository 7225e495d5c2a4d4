"""Trackers of a run, through accelerate: W&B, TensorBoard, trackio, SwanLab and its others.

What these four write lies in tracker/ of the run's folder. They show metrics, pictures of samples/,
the table of evaluations and the config. One that fails is left out; training goes on without it.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from PIL import Image

from flowrl.config.load import flatten
from flowrl.report import tables
from flowrl.runtime.log import logger
from flowrl.runtime.store import files, side_files
from flowrl.runtime.text import error_text
from flowrl.training.records import RunParts

FOLDER = "tracker"  # in the run's folder; TensorBoard's runs have always had this name
MEDIA = ("wandb", "trackio", "swanlab")  # packages that have Image and Video, and nested configs


def start(parts: RunParts, iteration: int) -> None:
    """Open the trackers of a run that goes on after `iteration`; only the main process has any."""
    cfg, trackers = parts.setup.cfg, parts.weights.accelerator.trackers
    if trackers or not parts.source.world.main:
        return
    names = get_available_trackers() if "all" in cfg.trackers else cfg.trackers
    for name in dict.fromkeys(map(str, names)):
        kind = LOGGER_TYPE_TO_CLASS[name]
        project = FOLDER if name == "tensorboard" else cfg.tracking.project
        place = [str(parts.path)] * kind.requires_logging_directory
        trackers.append(kind(project, *place, **options(parts, name, iteration)))
    tree, plain = cfg.model_dump(mode="json"), bool | int | float | str
    flat = {k: v if isinstance(v, plain) else str(v) for k, v in flatten(tree).items()}
    each(parts, lambda tracker: tracker.start())
    each(parts, lambda t: t.store_init_configuration(tree if t.name in MEDIA else flat))
    for run in (t.tracker for t in trackers if t.name == "wandb"):
        if not (run.offline or run.disabled):
            logger.info(f"W&B shows the run at {run.url}")


def options(parts: RunParts, name: str, iteration: int) -> dict[str, Any]:
    """Give names, places and the record that goes on, in the words of a tracker."""
    if name not in MEDIA:
        # TensorBoard drops what was written after that
        return {"purge_step": iteration + 1} if name == "tensorboard" else {}
    folder, known = (parts.path / FOLDER).absolute(), identified(parts.path)
    os.environ |= {f"WANDB_{kind}_DIR": f"{folder}/wandb" for kind in ("CACHE", "DATA")}
    os.environ.setdefault("TRACKIO_DIR", f"{folder}/trackio")  # read once, when it is imported
    os.environ.setdefault("WANDB_SILENT", "true")  # no summary above the last lines of a command
    own, method = parts.setup.cfg.tracking, parts.setup.cfg.algorithm["label"]
    named = {"name": own.name or known["name"], "group": own.group or method, "resume": "allow"}
    if name == "trackio":
        return {**named, "embed": False}
    # reinit: not the run of an earlier training here that was left open
    named |= {"id": known["id"], "tags": own.tags, "reinit": True}
    if name == "swanlab":
        return {**named, "log_dir": f"{folder}/swanlab", "workspace": own.entity}
    mode = os.environ.get("WANDB_MODE")
    return {**named, "dir": f"{folder}", "entity": own.entity, "mode": mode}


def identified(run: Path) -> dict[str, str]:
    """Read the id and the name by which trackers know a run, or choose them at its first start. A
    copy of a folder that is still there is a run of its own; one that was moved is not."""
    file = run.resolve() / FOLDER / "run.json"
    kept = side_files.read(file, again="resume the run") if file.exists() else {}
    original = Path(kept.get("file", file))
    copied = original != file and original.exists() and original.read_bytes() == file.read_bytes()
    if not {"id", "name"} <= kept.keys() or copied:
        kept = {"id": secrets.token_hex(6), "name": run.resolve().name}
    kept["file"] = str(file)
    files.write(file, json.dumps(kept))
    return kept


def put(parts: RunParts, step: int, name: str, kind: str, *value: Any) -> None:
    """Show an Image or a Video, by the path of its file, or a Table, by its heads and its rows."""

    def act(tracker: GeneralTracker) -> None:
        made, thing = kind, value
        if kind == "Table" and tracker.name in ("tensorboard", "swanlab"):
            made, thing = "Text", (tables.markdown(*value),)
        if tracker.name == "tensorboard" and made == "Image":
            pixels = np.asarray(Image.open(thing[0]))[None]
            tracker.log_images({name: pixels}, step=step, dataformats="NHWC")
        elif tracker.name == "tensorboard" and made == "Text":
            tracker.log({name: thing[0]}, step=step)
        elif tracker.name in MEDIA and (tracker.name != "swanlab" or thing[0][-4:] != ".mp4"):
            tracker.log({name: getattr(import_module(tracker.name), made)(*thing)}, step=step)

    each(parts, act)


def finish(parts: RunParts) -> None:
    """Close the trackers."""
    # trackio's own function also takes back what it would print when Python ends
    each(parts, lambda t: (import_module(t.name) if t.name == "trackio" else t).finish())
    parts.weights.accelerator.trackers.clear()


def each(parts: RunParts, act: Callable[[GeneralTracker], None]) -> None:
    """Do something with every tracker; one that fails is left out from then on."""
    trackers = parts.weights.accelerator.trackers
    for tracker in tuple(trackers):
        try:
            act(tracker)
        except Exception as error:
            trackers.remove(tracker)
            what = f"{type(error).__name__}: {error_text(error)}"
            logger.warning(
                f"trackers: {tracker.name} failed, and the run goes on without it: {what}"
            )
