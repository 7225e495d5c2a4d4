"""What a run reads off its iterations beside what it trains on them.

An observer is a function of a frozen record of the iteration. It returns metrics, and it changes
neither samples, advantages, rows nor weights; what does is a named step of draw, credit or update.
Observers run in one order on all processes, as some of them gather values.
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

    number: int  # of the iteration, from 1
    drawn: Drawn  # prompts, samples and rewards of this process
    rewards: Rewards  # scores of the samples of all processes
    group: Tensor  # (all samples,) int64, equal for the samples of one prompt
    batch: TrainingBatch  # what was trained on this process: samples and their advantages
    columns: Columns  # (n,) rows of the loss, on this process
    metrics: Mapping[str, float]  # reward/*, and those of credit and update, of all processes


Observer = Callable[[Observation], dict[str, float]]
