"""The records of a run: its parts, and its results."""

from __future__ import annotations

import math
import webbrowser
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from flowrl.data.prompts import Prompts
from flowrl.data.scored_dataset import NO_MEDIA, Dataset
from flowrl.rollouts.records import Source
from flowrl.rollouts.trained import TrainingBatch
from flowrl.runtime.log import in_notebook
from flowrl.runtime.store.lock import Lock
from flowrl.training.ema import Ema
from flowrl.training.setup import Setup
from flowrl.training.watch.guards import Guards
from flowrl.training.watch.watch import Watch
from flowrl.types import Columns, PromptBatch, Rewards, Rollout, brief, weighted


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Weights:
    """The trained weights, and the objects that step them."""

    parameters: dict[str, torch.nn.Parameter]  # "<part>.<name in the part>" -> trained parameter
    adamw: torch.optim.Optimizer  # optimizer over these parameters; checkpoints hold its moments
    optimizer: Any  # the same optimizer, prepared by accelerate: it knows the fp16 scaler
    ema: Ema  # moving averages of the parameters, which are evaluated and exported
    accelerator: Accelerator  # precision, trackers and the fp16 scaler


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunParts:
    """The parts of a run. Policy, rewards, processes and books are in `source`."""

    setup: Setup  # the config, the algorithm, and facts that follow from them
    path: Path  # the run's folder
    source: Source  # source of samples and their scores
    held_out: Prompts  # prompts of evaluations; none of them is trained on
    weights: Weights  # trained weights, their optimizer and their averages
    guards: Guards  # signs that the run trains nothing
    watch: Watch  # a held-out reward and detectors: signs that the reward is being hacked
    # settings, files, networks and code of the run, see training/identity.py
    identity: dict[str, dict[str, Any]]
    lock: Lock | None  # lock on `path`; None in all processes but the main one
    validation: Dataset = NO_MEDIA  # held-out media or pairs (validation.py), or none


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """The rows that an iteration trains on this process, with their advantages."""

    batch: TrainingBatch  # samples of these rows: all that were drawn, some, or old ones too
    columns: Columns  # (n,) rows of the loss
    observed: dict[str, float]  # result of Algorithm.observe, a mean over processes
    # `observed`, and diversity/*, prompts/* and replay/* of all processes
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """The result of one iteration."""

    number: int  # number of the iteration, from 1
    batch: PromptBatch  # the P prompts of this process
    rollout: Rollout  # B samples of these prompts, and the states that led to them
    rewards: Rewards  # (B,) scores of these samples
    shown: Tensor  # (n, 3, H, W) media of the first samples; empty for samples from files
    metrics: dict[str, float]  # line of metrics.jsonl, the same on all processes

    def __repr__(self) -> str:
        return brief(
            self,
            f"number={self.number}",
            f"{len(self.batch)} prompts",
            f"{len(self.rollout.leaf)} samples",
            f"shown {tuple(self.shown.shape)}",
            f"rewards {weighted(self.rewards.weights)}",
            f"reward/total {self.metrics.get('reward/total', math.nan):.4g}",
            f"{len(self.metrics)} metrics",
        )

    def _repr_html_(self) -> str | None:
        """Show the first samples with their scores in a notebook; None: there are none."""
        from flowrl.report import grids, show  # pictures are needed in notebooks only

        first = self.shown[:16]
        if not grids.drawable(first):
            return None
        texts = [self.batch.text[g] for g in self.rollout.group[: len(first)].tolist()]
        scores = show.score_texts(self.rewards.total[: len(first)])
        return show.sheet(first, scores, texts, cell=96).html


@dataclass(slots=True)
class Run:
    """A finished or stopped run."""

    path: Path  # path of its folder
    metrics: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl
    # content of evaluation.json; {}: none was made
    evaluation: dict[str, Any] = field(default_factory=dict)
    stopped: str | None = None  # reason why it ended before its last iteration
    # content of peak.json; {}: no peak was sought
    peak: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        rows = [str(row.get("name")) for row in self.evaluation.get("rows", ())]
        facts = [f"path={str(self.path)!r}", f"{len(self.metrics)} iterations"]
        facts += [f"evaluated: {'; '.join(rows)}"] * bool(rows)
        facts += [f"stopped={self.stopped!r}"] * bool(self.stopped)
        facts += [f"peak at iteration {self.peak.get('iteration')}"] * bool(self.peak)
        return brief(self, *facts)

    def _repr_html_(self) -> str:
        """Show the head of the report in a notebook: result, pictures, curve of the reward."""
        from flowrl.report import show

        return show.framed(self.path, "head.html")

    def show(self, *, browser: bool = False) -> None:
        """Show the report below the cell of a notebook; elsewhere print its path, or open it in a
        browser."""
        from flowrl.report import run_page, show

        if in_notebook() and not browser:
            from IPython.display import display

            return display({"text/html": show.framed(self.path)}, raw=True)
        report = run_page.build(self.path)
        webbrowser.open(report.resolve().as_uri()) if browser else print(report)


class RunFailed(RuntimeError):
    """The run cannot go on; its last checkpoint stands."""


class NothingTrained(RuntimeError):
    """The run ended before any optimizer step, and its LoRA was not written. run: its files."""

    def __init__(self, sentence: str, run: Run) -> None:
        super().__init__(sentence)
        self.run = run
