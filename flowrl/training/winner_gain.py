"""Whether samples of positive advantage become more likely than under the reference.

Below 0 the update makes good samples less likely, as preference losses do when they push bad ones
away further.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.algorithms.common.base import Algorithm, VelocityField
from flowrl.samplers import keys
from flowrl.training.gradient import split
from flowrl.training.observe import Observation
from flowrl.training.update import Learner
from flowrl.types import Columns, Rollout

Across = Callable[[Tensor], Tensor]


def winner_gain(learner: Learner, seen: Observation) -> dict[str, float]:
    """Observe policy/winner_gain, in runs that have a reference at hand."""
    with learner.policy.ledger.phase("reference"):
        gain = mean_gain(
            learner.algorithm,
            learner.policy,
            seen.batch.rollout,
            seen.columns,
            micro=learner.micro,
            gather=learner.world.gather,
            total=learner.world.sum,
        )
    return {} if gain is None else {"policy/winner_gain": gain}


def _alone(value: Tensor) -> Tensor:
    return value


@torch.no_grad()
def mean_gain(
    algorithm: Algorithm,
    policy: VelocityField,
    rollout: Rollout,
    batch: Columns,
    *,
    micro: int = 64,
    most: int = 16,
    gather: Across = _alone,
    total: Across = _alone,
) -> float | None:
    """Return the mean of fit(policy) - fit(reference) over rows of positive advantage, or None.

    It reads about `most` rows, drawn by their noise keys. gather, total: concatenate and sum over
    processes, so that the same rows are chosen for any number of processes.
    """
    rows = torch.nonzero((batch.adv > 0).flatten()).flatten()  # adv is (n,), or (n, 1)
    draw = keys.uniform(keys.key("winners", batch.noise_key[rows]))
    highest = gather(draw).sort().values[:most][-1:]
    rows = rows[draw <= highest] if len(highest) else rows
    gain = torch.zeros(2, dtype=torch.float64, device=batch.adv.device)  # sum and count
    winners = batch[rows].brought_near()
    for part in split(algorithm, winners, micro):
        chosen = winners[part]
        now = algorithm.fit(policy, rollout, chosen)
        with policy.view("reference"):
            gain[0] += (now - algorithm.fit(policy, rollout, chosen)).double().sum()
        gain[1] += len(part)
    value, count = total(gain).tolist()
    return value / count if count else None
