"""The weights of the held-out reward's peak, beside the final ones: lora-peak/ and peak.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowrl.policy.weights.lora import write_settings
from flowrl.runtime.log import logger
from flowrl.runtime.store import checkpoint, files
from flowrl.runtime.store.checkpoint import CheckpointError
from flowrl.runtime.store.run_folder import PEAK
from flowrl.training.records import RunParts
from flowrl.training.watch.watch import nearest

FOLDER = "lora-peak"


def write(parts: RunParts) -> None:
    """At the end of a run, on the main process, write the averaged LoRA of the checkpoint nearest
    the peak, and peak.json. If no peak is known, nothing is written, and older files are removed.
    """
    path, peak = parts.path, parts.watch.peak
    for old in (path / FOLDER, path / PEAK):
        if old.exists():
            files.remove(old)
    saved = {checkpoint.iteration_of(folder): folder for folder in checkpoint.steps(path)}
    if peak is None or not saved:
        return
    step = nearest(list(saved), peak)
    record: dict[str, Any] = {
        "held_out": parts.setup.cfg.watch.held_out,
        "iteration": peak.iteration,
        "value": peak.best,
        "last": peak.now,
        "checkpoint": saved[step].name,
        "lora": None,
    }
    if step and parts.setup.cfg.train.mode == "lora" and parts.source.policy.trainable.named():
        try:
            _export(parts, saved[step])
            record["lora"] = FOLDER
        except CheckpointError as error:
            logger.warning(f"the LoRA of the held-out reward's peak was not written: {error}")
    files.write(path / PEAK, json.dumps(record, indent=1))


def _export(parts: RunParts, folder: Path) -> None:
    """Write the averaged LoRA of a checkpoint; afterwards the policy has its own weights again."""
    tensors, _ = checkpoint.load(folder)
    policy, out = parts.source.policy, parts.path / FOLDER
    present = {name: value.detach().clone() for name, value in policy.state("default").items()}
    policy.trainable.load("default", tensors["policy"])
    try:
        with parts.weights.ema.swapped(tensors["ema"]):
            policy.save_lora(out)
    finally:
        policy.trainable.load("default", present)
    write_settings(out, parts.setup.cfg.train.lora.model_dump(), policy.trainable.part_names)
