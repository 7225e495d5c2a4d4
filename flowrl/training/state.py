"""What a checkpoint holds: all that a resumed run needs to go on bit for bit.

Taken between iterations, when nothing is in flight. No random state: every random number is a
function of the seed, the iteration and names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from flowrl.runtime import checkpoint, distributed
from flowrl.training.ratio_check import RatioCheck
from flowrl.training.records import Parts
from flowrl.training.reward_trial import NoiseWatch
from flowrl.training.update import Learner


class Resumable(Protocol):
    """The state of a trainer."""

    parts: Parts
    learner: Learner
    ratio_check: RatioCheck
    noise_watch: NoiseWatch
    iteration: int
    hours: float
    saved_at: int | None


def save(trainer: Resumable) -> Path:
    """Write a checkpoint of the present iteration, if there is none -> its folder."""
    parts, path = trainer.parts, trainer.parts.path
    if trainer.saved_at == trainer.iteration:
        return checkpoint.folder_of(path, trainer.iteration)
    policy, weights = parts.source.policy, parts.weights
    tensors = {"policy": policy.state("default"), "ema": weights.ema.state_dict()}
    tensors |= {view: policy.state(view) for view in parts.algorithm.views}
    tensors["optimizer"] = checkpoint.pack_optimizer(weights.adamw, weights.parameters)
    meta: dict[str, Any] = {
        "hours": trainer.hours,
        "step": trainer.learner.step,
        "nonfinite": trainer.learner.nonfinite,
        "ratio_checked": trainer.ratio_check.done,
        "recompute": trainer.ratio_check.recompute,
        "noise": trainer.noise_watch.noise,
        "memory": parts.algorithm.memory,
        "guards": parts.guards.state,
        "scaler": distributed.scaler_state(weights.accelerator),
    }
    keep = parts.cfg.checkpoint.keep
    folder = checkpoint.save(path, trainer.iteration, tensors, meta, keep=keep)
    trainer.saved_at = trainer.iteration  # only now: a signal may interrupt the writing
    return folder


def load(trainer: Resumable, folder: Path) -> None:
    """Inverse of `save`."""
    tensors, meta = checkpoint.load(folder)
    parts, weights = trainer.parts, trainer.parts.weights
    parts.source.policy.load_state("default", tensors["policy"])
    for view in parts.algorithm.views:
        parts.source.policy.load_state(view, tensors[view])
    weights.ema.load_state_dict(tensors["ema"])
    packed = tensors.get("optimizer", {})
    checkpoint.unpack_optimizer(weights.adamw, weights.parameters, packed)
    if meta["scaler"]:
        weights.accelerator.scaler.load_state_dict(meta["scaler"])
    parts.algorithm.memory = dict(meta["memory"])
    parts.guards.state = meta["guards"]
    trainer.noise_watch.noise = dict(meta["noise"])
    trainer.ratio_check.restore(done=meta["ratio_checked"], recompute=meta["recompute"])
    trainer.learner.step, trainer.learner.nonfinite = meta["step"], meta["nonfinite"]
    trainer.hours = meta["hours"]
    trainer.iteration = trainer.saved_at = meta["iteration"]
