"""The records of a run: what it is made of, and what it gives to others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from flowrl.algorithms.common.base import Algorithm
from flowrl.config.schema import Config
from flowrl.data.prompts import Prompts
from flowrl.rollouts.records import Source
from flowrl.runtime.store.lock import Lock
from flowrl.training.diversity import Diversity
from flowrl.training.ema import Ema
from flowrl.training.watch.guards import Guards
from flowrl.training.watch.watch import Watch
from flowrl.types import Plan, PromptBatch, Rewards, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What is trained, and what steps it."""

    parameters: dict[str, torch.nn.Parameter]
    adamw: torch.optim.Optimizer
    optimizer: Any  # the same, prepared by accelerate: it knows the fp16 scaler
    ema: Ema
    accelerator: Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What a run is made of. Policy, rewards, processes and books are in `source`."""

    cfg: Config
    path: Path
    algorithm: Algorithm
    plan: Plan  # of the first iteration
    micro: int  # most states in one forward of the loss
    source: Source
    held_out: Prompts
    weights: Weights
    guards: Guards
    watch: Watch
    identity: dict[str, dict[str, Any]]  # what it was made of; see training/identity.py
    lock: Lock | None  # on `path`, of the main process

    @property
    def diversity(self) -> Diversity:
        """How samples' likeness to their groups changes their credit."""
        return Diversity(self.cfg.diversity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What one iteration did."""

    number: int  # from 1
    batch: PromptBatch
    rollout: Rollout
    rewards: Rewards
    shown: Tensor  # media of the first samples; empty for those from files
    metrics: dict[str, float]  # the line that metrics.jsonl holds


@dataclass(slots=True)
class Run:
    """A finished or stopped run. stopped: why it ended before its last iteration, or None."""

    path: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)
    stopped: str | None = None
    peak: dict[str, Any] = field(default_factory=dict)  # peak.json; {} where none was sought


class RunFailed(RuntimeError):
    """The run cannot go on; its last checkpoint stands."""


class NothingTrained(RuntimeError):
    """The run ended before any optimizer step, and its LoRA was not written. run: what there is."""

    def __init__(self, sentence: str, run: Run) -> None:
        super().__init__(sentence)
        self.run = run
