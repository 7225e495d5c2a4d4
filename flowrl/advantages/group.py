"""Advantages within groups of samples: GRPO's z-score.

Statistics are computed in fp64 from (reward, group) alone: over a whole iteration, gathered from
all processes, the result does not depend on their number. Invalid samples enter no statistic.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Std = Literal["group", "global"] | None
FLAT = 1e-6  # a standard deviation below it is rounding, not a signal


def group_relative(
    rewards: Tensor,
    group: Tensor,
    *,
    valid: Tensor | None = None,
    std: Std = "group",
    ddof: int = 0,
    eps: float = 1e-4,
    clip: float | None = 5.0,
    within: Tensor | None = None,
) -> Tensor:
    """A = (r - mean of its group) / (std + eps), clipped to +-clip: (B,), int (B,) -> (B,) fp32.

    std: "group" divides by the standard deviation of the group, "global" by that of all rewards
    given (Flow-GRPO), None by 1 (Dr. GRPO). ddof: 0 or 1. A group with std < 1e-6 gets 0, and so
    does an invalid sample (valid False, or a NaN reward). within (B,) int: "global" is over the
    rewards of one number, such as those of a domain; None: over all.
    """
    # values that are no numbers are read by no sum
    ok = usable(rewards, valid)
    r = torch.where(ok, rewards.double(), 0.0)
    _, g = torch.unique(group, return_inverse=True)
    centred, scale = centred_and_std(r, g, ok, ddof)
    varied = scale >= FLAT
    if std == "global":
        scale = std_of_all(r, ok, ddof, within)
    elif std not in ("group", None):
        raise ValueError(f'std="{std}" is unknown; choose "group", "global" or None')
    adv = centred if std is None else centred / (scale + eps)
    adv = torch.where(ok & varied, adv, 0.0)
    return (adv if clip is None else adv.clamp(-clip, clip)).float()


def centred_and_std(r: Tensor, g: Tensor, ok: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """r minus the mean of its group, and the group's std, over ok values: (n,) -> (n,), (n,).

    r fp64; g: the group of each value, numbered from 0.
    """
    size = int(g.max()) + 1 if len(g) else 0
    zeros = torch.zeros(size, dtype=torch.float64, device=r.device)
    count = zeros.index_add(0, g, ok.double())
    mean = zeros.index_add(0, g, torch.where(ok, r, 0.0)) / count.clamp(min=1)
    centred = torch.where(ok, r - mean[g], 0.0)
    var = zeros.index_add(0, g, centred.square()) / (count - ddof).clamp(min=1)
    return centred, var.sqrt()[g]


def std_of_all(r: Tensor, ok: Tensor, ddof: int, within: Tensor | None = None) -> Tensor:
    """Standard deviation of the ok values of r (n,) fp64, repeated for each value -> (n,). within
    (n,) int64 from 0: that of the values of one number; None: of all."""
    if within is None:
        within = torch.zeros(len(r), dtype=torch.int64, device=r.device)
    return centred_and_std(r, within, ok, ddof)[1]


def usable(values: Tensor, valid: Tensor | None) -> Tensor:
    """Which values are neither NaN nor marked invalid, (B,) bool."""
    return ~torch.isnan(values) if valid is None else valid & ~torch.isnan(values)
