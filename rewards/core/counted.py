"""The values that weights multiply, where rewards depend on each other.

gate      c = r where every named reward is at least its threshold, else 0
stratify  c = gap * u within each group; u in [0, 1] is the place of r between the lowest and the
          highest of its level, 0.5 where these are equal; gap is the smallest distance between two
          levels of weight * primary, or the weight where there is one level. With shares w of a sum
          below 1, weight * primary + w * c keeps the order of levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from flowrl.rewards.core.reward_set import RewardSet

APART = 1e-6  # least distance between two levels: closer values of the primary reward are one level


def counted(
    chosen: RewardSet,
    raw: Mapping[str, Tensor],
    group: Tensor | None,
    asked: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Values (B,) fp32 of the weighted rewards that have a gate or are stratified, from raw ones
    (B,), NaN where scoring failed. group (B,): needed if a reward is stratified. asked: (B,) bool
    of rewards that are not asked for every sample; see domains.py.

    NaN where a reward is absent, a gate failed, or the reward itself did with its gates open.
    Samples that are invalid by any reward take no part in levels.
    """
    weighted = [label for label in raw if chosen.weights[label]]
    doors = {label: door(chosen.gates(label), raw) for label in weighted if chosen.gates(label)}
    # an absent reward has no value, be its gate open or closed
    everywhere = torch.ones(len(next(iter(raw.values()))), dtype=torch.bool)
    absent = {k: ~asked.get(k, everywhere).to(value.device) for k, value in raw.items()}
    out = {
        k: behind(raw[k], opened).masked_fill(absent[k], math.nan) for k, opened in doors.items()
    }
    strata = {label: chosen.strata[label] for label in weighted if label in chosen.strata}
    if not strata:
        return out
    assert group is not None
    terms = {label: out.get(label, raw[label]) for label in weighted}
    known = torch.stack([term.isfinite() | absent[k] for k, term in terms.items()]).all(0)
    for label, primary in strata.items():
        opened = doors.get(label, torch.ones_like(raw[label]))
        part = known & (opened == 1) & ~absent[label]
        own = within_levels(raw[label], terms[primary], chosen.weights[primary], group, part)
        out[label] = behind(own, opened).masked_fill(absent[label], math.nan)
    return out


def door(thresholds: Mapping[str, float], raw: Mapping[str, Tensor]) -> Tensor:
    """(B,) fp32 without gradient: 1 where every named reward is at least its threshold, 0 where one
    is not, NaN where one failed."""
    values = torch.stack([raw[label].detach() for label in thresholds])  # (gates, B)
    least = torch.tensor(list(thresholds.values()), device=values.device)
    opened = (values >= least[:, None]).all(0).float()
    return opened.masked_fill(~values.isfinite().all(0), math.nan)


def behind(value: Tensor, opened: Tensor) -> Tensor:
    """The value (B,) where the door (B,) is open, and 0 where it is closed, also for a NaN
    value."""
    return torch.where(opened == 0, 0.0, opened * value)


def within_levels(
    value: Tensor, primary: Tensor, weight: float, group: Tensor, part: Tensor
) -> Tensor:
    """gap * u (B,) fp32 for the samples that take part (B,) bool, NaN for the others."""
    device, out = value.device, torch.full(value.shape, math.nan, dtype=torch.float64)
    value, primary, group, part = (t.cpu() for t in (value, primary, group, part))
    for g in group[part].unique():
        rows = torch.nonzero((group == g) & part).flatten()
        level, gap = levels(primary[rows], weight)
        for one in level.unique():
            members = rows[level == one]
            out[members] = gap * place(value[members].double())
    return out.float().to(device)


def levels(primary: Tensor, weight: float) -> tuple[Tensor, float]:
    """The level of each value (n,) of one group, from 0, (n,) int64, and the gap."""
    order = primary.argsort()
    new = primary[order].double().diff() >= APART
    level = torch.empty_like(order)
    level[order] = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)])
    # weight * primary in fp32, as the sum has it
    distances = (weight * primary[order]).double().diff()[new]
    return level, float(distances.min()) if len(distances) else weight


def place(values: Tensor) -> Tensor:
    """Places (n,) of one level's values, 0 for the lowest to 1; 0.5 if all are equal."""
    low, high = values.aminmax()
    return (values - low) / (high - low) if high > low else torch.full_like(values, 0.5)
