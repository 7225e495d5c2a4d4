"""Which rewards are suspect: GARDO's gate (arXiv:2512.24138) of the distance to the reference.

A sample that the trained reward ranks high and other rewards rank low has perhaps found what the
trained reward gets wrong; only such samples are held to the reference. Ranks are 1 for the best of
all samples of an iteration, over all processes, and equal scores share the mean of their ranks.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.types import Rewards

Sign = Literal["hacked", "code"]


def ranks(score: Tensor) -> Tensor:
    """Rank each score among all, (n,) -> (n,) fp64; 1 is the highest, equal ones share a mean."""
    _, place, count = torch.unique(-score.double(), return_inverse=True, return_counts=True)
    return (count.cumsum(0).double() - (count - 1).double() / 2)[place]


def suspects(
    rewards: Rewards, *, main: str, auxiliary: tuple[str, ...], share: float, sign: Sign
) -> Tensor:
    """1 for samples whose reward is suspect, 0 for the others: (B,) fp32.

    u is the mean of the auxiliary rewards' ranks minus the rank of `main` (hacked: main ranks the
    sample higher than the others do), or the reverse (code: as in the authors' code). Suspect are
    u above the percentile 100 (1 - share) of those u that are at least 0; where none is, nobody is.
    A sample without one of these scores, or that is invalid, has no rank and is not suspect. With
    rewards by domain, samples are compared with those of their domain.
    """
    for label in (main, *auxiliary):
        if label not in rewards.raw:
            raise ValueError(
                f"algorithm.kl_gate compares ranks of reward {label}, which has no scores in this"
                f" iteration; there are {', '.join(rewards.raw) or 'none'}"
            )
    ranked = rewards.valid.clone()
    for label in (main, *auxiliary):
        ranked &= rewards.raw[label].isfinite()
    gate = torch.zeros_like(rewards.total, dtype=torch.float32)
    for domain in [*rewards.by_domain().values()] or [ranked]:
        rows = ranked & domain
        # u times the number of auxiliary rewards: multiples of 1/2, so that equal ones are equal
        others = sum((ranks(rewards.raw[label][rows]) for label in auxiliary), torch.tensor(0.0))
        u = others - len(auxiliary) * ranks(rewards.raw[main][rows])
        u = u if sign == "hacked" else -u
        if bool((u >= 0).any()):
            # a linear percentile lies between two neighbours, or on the lower: exceeding either is
            # the same
            least = u[u >= 0].sort().values
            gate[rows] = (u > least[int((1 - share) * (len(least) - 1) + 1e-9)]).float()
    return gate
