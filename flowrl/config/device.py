"""Defaults of a model that no file of configs/model describes, on a GPU.

The schema's defaults suit the embedded model on a CPU. A hub id or folder is most often a large
pipeline, for which fp32 weights and 64 rows in a forward run out of memory on any GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from flowrl.runtime import registry
from flowrl.runtime.excerpt import part
from flowrl.runtime.log import logger
from flowrl.runtime.processes.launcher import is_on

ON_A_GPU: dict[str, dict[str, Any]] = {
    "model": {"dtype": "bf16"},
    "batch": {"micro": 4, "decode": 4},
    "train": {"gradient_checkpointing": True},
}


def usual_device() -> str:
    """Kind of device on which a run will be, as accelerate's launcher sets it."""
    import torch  # imported here, because rules over words alone need no torch

    on_cpu = is_on(os.environ, "ACCELERATE_USE_CPU")
    return "cuda" if torch.cuda.is_available() and not on_cpu else "cpu"


def on_this_device(source: str | None) -> dict[str, Any]:
    """Defaults of a model from a hub or folder on this run's device, which override the schema's
    and are overridden by all that is stated; {} for named models and for those that code makes."""
    if source is None or registry.is_place(source) or registry.is_live(source):
        return {}
    placed = "/" in source and not source.startswith("package:") or Path(source).is_dir()
    own = placed and not part("flowrl.policy.folder", "not_a_model")(source)
    own = own and usual_device() == "cuda"
    return ON_A_GPU if own else {}


def say(source: str | None, defaults: Mapping[str, Any], merged: Any) -> None:
    """Log which of these defaults a config has."""
    keys = [f"{section}.{key}" for section, own in defaults.items() for key in own]
    given = OmegaConf.create(dict(defaults))
    kept = {key: OmegaConf.select(merged, key) for key in keys}
    taken = {key: value for key, value in kept.items() if value == OmegaConf.select(given, key)}
    if taken:
        words = ", ".join(f"{key}={str(value).lower()}" for key, value in taken.items())
        logger.info(
            f"{source} has no file in configs/model: on a GPU it is run with {words}, as fp32 and"
            " large batches run out of memory; what you set yourself stands"
        )
