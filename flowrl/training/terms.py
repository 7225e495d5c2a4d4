"""What the gradient of an update is the sum of: the method's own loss and, where rewards have
mode=grad, the loss of these. Each is a mean over its own rows, whatever the number of the other's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.algorithms.common.base import Algorithm
from flowrl.algorithms.common.climb import Climb
from flowrl.rollouts.records import Source
from flowrl.rollouts.trained import TrainingBatch
from flowrl.runtime.ledger import CountedPolicy
from flowrl.runtime.processes.world import World
from flowrl.training import gradient
from flowrl.types import Columns, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """An objective and its rows on this process."""

    objective: Algorithm
    rows: Columns
    weight: float = 0.0  # of the rows of all processes, which their summed loss is divided by
    count: float = 0.0  # how many these are

    def part(self, u: int, turns: Tensor, world: World) -> Term:
        """The rows of update u; turns (P,): in which update each prompt is."""
        rows = self.rows[torch.nonzero(turns[self.rows.prompt] == u).flatten()]
        count = torch.stack([rows.weight.sum(), rows.weight.new_tensor(float(len(rows)))])
        weight, number = world.sum(count).tolist()
        return replace(self, rows=rows, weight=weight, count=number)

    def accumulate(self, policy: CountedPolicy, rollout: Rollout, micro: int) -> dict[str, Tensor]:
        """Add the gradient of the mean loss -> metrics, summed over this process's rows."""
        if not len(self.rows) or not self.weight:
            return {}
        return gradient.accumulate(
            self.objective,
            policy,
            rollout,
            self.rows,
            micro=micro,
            total_weight=self.weight,
            backward=policy.backward,
        )


def gradient_terms(source: Source, trained: TrainingBatch, iteration: int) -> list[Term]:
    """The term of rewards with mode=grad that count in this iteration, if there are any, on its new
    samples."""
    climbed, cfg = source.climbed, source.cfg
    if climbed is None or not any(climbed.weights.values()):
        return []
    objective = Climb(cfg.gradient)
    rows = objective.rows(trained.rollout, trained.fresh, seed=cfg.seed, iteration=iteration)
    return [Term(objective=objective, rows=rows)]


class Means:
    """Metrics of several updates, each averaged over the rows of its term."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}  # name -> sum, weight

    def add(self, summed: dict[str, float], weight: float) -> None:
        """An update's, summed over rows of this weight."""
        for name, value in summed.items():
            total, before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = total + value, before + weight

    def __call__(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self.sums.items()}
