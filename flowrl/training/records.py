"""The records of a run: what it is made of, and what it gives to others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from flowrl.data.prompts import Prompts
from flowrl.rollouts.records import Source
from flowrl.rollouts.trained import TrainingBatch
from flowrl.runtime.store.lock import Lock
from flowrl.training.ema import Ema
from flowrl.training.setup import Setup
from flowrl.training.watch.guards import Guards
from flowrl.training.watch.watch import Watch
from flowrl.types import Columns, PromptBatch, Rewards, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What is trained, and what steps it."""

    parameters: dict[str, torch.nn.Parameter]  # by "<part>.<name in the part>", all that is trained
    adamw: torch.optim.Optimizer  # over these parameters; checkpoints hold its moments
    optimizer: Any  # the same, prepared by accelerate: it knows the fp16 scaler
    ema: Ema  # moving averages of the parameters, which are evaluated and exported
    accelerator: Accelerator  # precision, trackers and the fp16 scaler


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What a run is made of. Policy, rewards, processes and books are in `source`."""

    setup: Setup  # the config, the algorithm, and what follows from them
    path: Path  # the run's folder
    source: Source  # where samples come from and who scores them
    held_out: Prompts  # prompts of evaluations; none of them is trained on
    weights: Weights  # what is trained, its optimizer and its averages
    guards: Guards  # signs that the run trains nothing
    watch: Watch  # a held-out reward and detectors: signs that the reward is being hacked
    identity: dict[str, dict[str, Any]]  # what the run was made of, see training/identity.py
    lock: Lock | None  # on `path`; None in all processes but the main one


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """The rows that an iteration trains on this process, with their advantages."""

    batch: TrainingBatch  # the samples they belong to: all that were drawn, some, or old ones too
    columns: Columns  # (n,) rows of the loss
    observed: dict[str, float]  # what Algorithm.observe found, a mean over processes
    metrics: dict[str, float]  # these, and diversity/*, prompts/* and replay/* of all processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What one iteration did."""

    number: int  # from 1
    batch: PromptBatch  # the P prompts of this process
    rollout: Rollout  # their B samples, and the states that led to them
    rewards: Rewards  # (B,) scores of these samples
    shown: Tensor  # (n, 3, H, W) media of the first samples; empty for those from files
    metrics: dict[str, float]  # the line that metrics.jsonl holds, the same on all processes


@dataclass(slots=True)
class Run:
    """A finished or stopped run."""

    path: Path  # its folder
    metrics: list[dict[str, Any]] = field(default_factory=list)  # the lines of metrics.jsonl
    evaluation: dict[str, Any] = field(default_factory=dict)  # evaluation.json; {}: none was made
    stopped: str | None = None  # why it ended before its last iteration
    peak: dict[str, Any] = field(default_factory=dict)  # peak.json; {} where none was sought


class RunFailed(RuntimeError):
    """The run cannot go on; its last checkpoint stands."""


class NothingTrained(RuntimeError):
    """The run ended before any optimizer step, and its LoRA was not written. run: what there is."""

    def __init__(self, sentence: str, run: Run) -> None:
        super().__init__(sentence)
        self.run = run
