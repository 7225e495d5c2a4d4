"""The content of a checkpoint: all that a resumed run needs to go on bit for bit.

It is taken between iterations, when nothing is in flight. It has no random state: every random
number is a function of the seed, the iteration and names. Before the first iteration it has no
tensors either: the config determines the weights, so that this checkpoint is small for any model.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from flowrl.runtime.processes import shares
from flowrl.runtime.processes.world import scaler_state
from flowrl.runtime.store import checkpoint
from flowrl.runtime.store.checkpoint import Checkpoint, CheckpointError, Tensors
from flowrl.runtime.store.run_folder import metrics_digest
from flowrl.training.ratio_check import RatioCheck
from flowrl.training.records import RunParts, Weights
from flowrl.training.update import Learner
from flowrl.training.watch.reward_trial import NoiseWatch


class Resumable(Protocol):
    """The parts of a trainer that a checkpoint saves and restores."""

    parts: RunParts
    learner: Learner
    ratio_check: RatioCheck
    noise_watch: NoiseWatch
    iteration: int
    hours: float
    stopped: str | None
    started: bool
    saved_at: int | None
    saved_time: float


def due(trainer: Resumable) -> bool:
    """Whether to write a checkpoint now, which all processes answer in the same way: by
    checkpoint.every, by checkpoint.minutes, or at the end."""
    cfg, done = trainer.parts.setup.cfg, trainer.iteration
    if done % cfg.checkpoint.every == 0 or done == cfg.iterations or trainer.stopped:
        return True
    minutes = cfg.checkpoint.minutes
    if minutes is None:
        return False
    return trainer.parts.source.world.from_main(
        time.monotonic() - trainer.saved_time >= 60 * minutes
    )


def is_split(weights: Weights) -> bool:
    """Whether each process holds a share of the trained weights, so that all save together."""
    return any(map(shares.is_split, weights.parameters.values()))


def save(trainer: Resumable) -> Path | None:
    """Write a checkpoint of the present iteration, if there is none -> its folder, in the main
    process; if weights are split, the others send their shares.

    Before the run was started nothing is written (None): its config determines everything.
    """
    parts, path, world = trainer.parts, trainer.parts.path, trainer.parts.source.world
    split = is_split(parts.weights)
    if not trainer.started or not (world.main or split):
        return None
    if trainer.saved_at == trainer.iteration:
        return checkpoint.folder_of(path, trainer.iteration)
    meta: dict[str, Any] = {
        "hours": trainer.hours,
        "step": trainer.learner.step,
        "nonfinite": trainer.learner.nonfinite,
        "ratio_checked": trainer.ratio_check.done,
        "recompute": trainer.ratio_check.recompute,
        "noise": trainer.noise_watch.noise,
        "memory": parts.setup.algorithm.memory,
        "choice": parts.source.chooser.state,
        "help": parts.source.chooser.helper.state if parts.source.chooser.helper else {},
        "guards": parts.guards.state,
        "watch": parts.watch.state,
        "scaler": scaler_state(parts.weights.accelerator),
        "flops": [[*call, flops] for call, flops in parts.source.ledger.flops_per_row.items()],
        "identity": parts.identity,
        "metrics": metrics_digest(path, trainer.iteration),
    }
    keep, spared = parts.setup.cfg.checkpoint.keep, parts.watch.spared
    tensors, folder = _tensors(trainer), None
    with world.together() if split else nullcontext():
        if world.main:
            folder = checkpoint.save(
                path, trainer.iteration, tensors, meta, keep=keep, spared=spared
            )
        else:
            checkpoint.gather(tensors)
    trainer.saved_at = trainer.iteration  # set after writing, because a signal may interrupt it
    trainer.saved_time = time.monotonic()
    return folder


def _tensors(trainer: Resumable) -> Tensors:
    if not trainer.iteration:
        return {}
    policy, weights = trainer.parts.source.policy, trainer.parts.weights
    views, trained = trainer.parts.setup.algorithm.views, policy.trainable
    tensors = {"policy": trained.tensors("default"), "ema": weights.ema.state_dict()}
    tensors |= {view: trained.tensors(view) for view in views}
    tensors["optimizer"] = checkpoint.pack_optimizer(weights.adamw, weights.parameters)
    if trainer.parts.source.buffer:
        tensors["replay"] = trainer.parts.source.buffer.state(trainer.iteration)
    return tensors


def load(trainer: Resumable, saved: Checkpoint) -> None:
    """Restore a checkpoint of `save`; CheckpointError if something is missing or does not fit."""
    try:
        if saved.meta["iteration"]:
            _load_tensors(trainer, saved)
        _load_meta(trainer, saved.meta)
    except KeyError as error:
        raise CheckpointError(
            f"{saved.folder / checkpoint.META} has no {error}, so it was altered"
        ) from error


def _load_tensors(trainer: Resumable, saved: Checkpoint) -> None:
    parts, weights = trainer.parts, trainer.parts.weights
    parts.source.policy.trainable.load("default", saved.group("policy"))
    for view in parts.setup.algorithm.views:
        parts.source.policy.trainable.load(view, saved.group(view))
    weights.ema.load_state_dict(saved.group("ema"))
    checkpoint.unpack_optimizer(weights.adamw, weights.parameters, saved.group("optimizer"))
    if parts.source.buffer:  # replay.size may have been set since the checkpoint
        parts.source.buffer.restore(saved.tensors.get("replay", {}))


def _load_meta(trainer: Resumable, meta: dict[str, Any]) -> None:
    parts = trainer.parts
    if meta["scaler"]:
        parts.weights.accelerator.scaler.load_state_dict(meta["scaler"])
    parts.setup.algorithm.memory = dict(meta["memory"])
    if "identity" in meta:  # earlier versions kept neither identity nor guards
        parts.guards.state = meta["guards"]
    if "choice" in meta:
        parts.source.chooser.restore(meta["choice"])
    if parts.source.chooser.helper:
        parts.source.chooser.helper.restore(meta.get("help", {}))
    if "watch" in meta:
        parts.watch.state = meta["watch"]
    measured = {(phase, kind, call): flops for phase, kind, call, flops in meta.get("flops", ())}
    parts.source.ledger.flops_per_row = measured
    trainer.noise_watch.noise = dict(meta["noise"])
    trainer.ratio_check.restore(done=meta["ratio_checked"], recompute=meta["recompute"])
    trainer.learner.step, trainer.learner.nonfinite = meta["step"], meta["nonfinite"]
    trainer.hours = meta["hours"]
    trainer.iteration = trainer.saved_at = meta["iteration"]
    trainer.started = True
