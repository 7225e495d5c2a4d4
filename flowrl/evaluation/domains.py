"""Readings of an evaluation by domain, where rewards state domains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flowrl.rewards import RewardSet
from flowrl.rewards.core.domains import covers

Values = dict[str, Tensor]  # reading -> (n,) of n images


def by_domain(
    values: Mapping[str, Tensor], domains: Sequence[str], rewards: RewardSet
) -> tuple[Values, Values]:
    """Add the readings of each domain, domain/reading, and macro -> (values (n,) fp32, whether each
    was asked for, (n,) bool).

    domains: (n,) of the images. macro is the total times n / (D n_d), with n_d images of D domains
    that have one, so that its mean over images is the mean of the domains' mean totals. A reading
    that no image was asked for is left out.
    """
    asked_for, everyone = covers(rewards, domains), torch.ones(len(domains), dtype=torch.bool)
    asked = {name: asked_for.get(name.partition("/")[0], everyone) for name in values}
    out, known = dict(values), values["total"].isfinite()
    macro = torch.full((len(domains),), math.nan)
    own = {name: torch.tensor([other == name for other in domains]) for name in sorted({*domains})}
    there = sum(bool((known & rows).any()) for rows in own.values())
    for domain, rows in own.items():
        for name, value in values.items():
            # a part of a reward of this domain alone would be shown twice
            if "/" in name and not bool((asked[name] & ~rows).any()):
                continue
            out[f"{domain}/{name}"] = value.masked_fill(~rows, math.nan)
            asked[f"{domain}/{name}"] = rows & asked[name]
        share = int(known.sum()) / (there * max(1, int((known & rows).sum())) or 1)
        macro[rows] = values["total"][rows] * share
    asked["macro"], out["macro"] = everyone, macro
    kept = [name for name in out if bool(asked[name].any())]
    return {name: out[name] for name in kept}, {name: asked[name] for name in kept}
