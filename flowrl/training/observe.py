"""Observers: metrics that a run reads from its iterations beside the training.

An observer is a function of a frozen record of the iteration. It returns metrics, and it changes
neither samples, advantages, rows nor weights; code that changes them is a named step of draw,
credit or update. Observers run in one order on all processes, because some of them gather values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from flowrl.rollouts.records import Drawn
from flowrl.rollouts.trained import TrainingBatch
from flowrl.types import Columns, Rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An iteration after its update, before the old policy follows."""

    number: int  # number of the iteration, from 1
    drawn: Drawn  # prompts, samples and rewards of this process
    rewards: Rewards  # scores of the samples of all processes
    group: Tensor  # (all samples,) int64, equal for the samples of one prompt
    batch: TrainingBatch  # samples that were trained on this process, and their advantages
    columns: Columns  # (n,) rows of the loss, on this process
    metrics: Mapping[str, float]  # reward/*, and the metrics of credit and update, of all processes


Observer = Callable[[Observation], dict[str, float]]
