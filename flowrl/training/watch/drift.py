"""The metric watch/drift: how far samples have moved from those of the first iteration.

No second model is sampled. The untrained policy made the samples of the first iteration, and their
mean and standard deviation in each feature (flowrl/rollouts/detectors.py) are kept. Drift is the
root mean square, over features, of the distance between the means now and then, in units of those
standard deviations. Prompts differ between iterations, so means differ by chance; the variance of a
mean, estimated from the means of groups, is subtracted, and a result below 0 counts as 0.

0: no change that chance does not explain. 1: the mean picture is as far from the first one as a
typical picture was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# least standard deviation of a feature: one that was constant counts as jittering by this
HALF_A_LEVEL = 0.5 / 255


def base_of(values: Tensor, group: Tensor) -> dict[str, Any]:
    """Compute what is kept of the first iteration's features (B, D), for samples in groups (B,), as
    lists of D numbers."""
    values, group = _known(values, group)
    if not len(values):
        return {}
    return {
        "mean": values.mean(0).tolist(),
        "variance": values.var(0, correction=0).tolist(),
        "chance": _of_mean(values, group).tolist(),
    }


def drift(values: Tensor, group: Tensor, base: dict[str, Any]) -> float:
    """Return the distance of features (B, D) from those of a base, in standard deviations of the
    base; 0 if either has no sample."""
    values, group = _known(values, group)
    if not len(values) or not base:
        return 0.0
    mean, variance, chance = (
        values.new_tensor(base[name]) for name in ("mean", "variance", "chance")
    )
    moved = (values.mean(0) - mean).square() - chance - _of_mean(values, group)
    return float((moved / (variance + HALF_A_LEVEL**2)).mean().clamp(min=0).sqrt())


def _known(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Return the samples whose features are finite, in fp64 on the CPU."""
    rows = values.isfinite().all(1)
    return values[rows].cpu().double(), group[rows].cpu()


def _of_mean(values: Tensor, group: Tensor) -> Tensor:
    """Estimate the variance of the mean over samples (B, D) -> (D,), by the spread of the groups'
    means, or of the samples if there is one group."""
    whose = group.unique(return_inverse=True)[1]
    sizes = torch.bincount(whose).to(values)
    if len(sizes) == 1:
        rows = values
    else:
        rows = values.new_zeros(len(sizes), values.shape[1]).index_add(0, whose, values)
        rows = rows / sizes[:, None]
    return rows.var(0, correction=0) / max(1, len(rows) - 1)
