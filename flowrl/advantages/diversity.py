"""Diversity within groups, seen in features of the media: rewards and advantages that know how like
a sample is to the other members of its group.

adjusted  a redundant sample's reward is discounted (DRA-GRPO, arXiv:2505.09655), and the distance
          to the nearest neighbour is added as one more reward
scaled    advantages of a group times a function of its semantic entropy (SEED-GRPO,
          arXiv:2505.12346)

Everything is a function of one group at a time, in fp64, whatever the order of its members. Samples
without a reward are nobody's neighbours. Members whose features are equal have similarity 1,
novelty 0 and entropy 0 exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from flowrl.types import Rewards

# base above which a reward is discounted: its group's lowest, or 0
Above = Literal["lowest", "zero"]
NOVELTY = "diversity/novelty"  # name of the bonus among the adjusted rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How each sample lies among the other members of its group: (B,) fp64 each, 0 for a sample
    that has no others."""

    compared: Tensor  # (B,) bool: the sample and another member of its group have a reward
    cosine: Tensor  # mean cosine with the others, in [-1, 1]
    similarity: Tensor  # mean similarity to the others, in [0, 1]; the discount reads it
    novelty: Tensor  # 1 - cosine with the nearest other, in [0, 2]
    entropy: Tensor  # entropy of the group's clusters over its maximum log n, in [0, 1]


def spread(
    features: Tensor,
    group: Tensor,
    valid: Tensor,
    *,
    temperature: float | None = None,
    threshold: float = 0.9,
) -> Spread:
    """Features (B, d), group (B,) int, valid (B,) bool -> how each sample lies in its group.

    temperature: similarity is exp((cosine - 1) / temperature); None: the cosine, at least 0.
    threshold: members whose cosine is at least this are in one cluster, and so are members that a
    chain of such pairs joins. A valid row of features is finite and not 0.
    """
    zeros = torch.zeros(len(group), dtype=torch.float64, device=features.device)
    cosine, similarity, novelty, entropy = (zeros.clone() for _ in range(4))
    compared = torch.zeros_like(valid)
    for g in group.unique():
        rows = torch.nonzero((group == g) & valid).flatten()
        n = len(rows)
        if n < 2:
            continue
        cos = cosines(features[rows])
        # a cosine may be negative, and the discount needs similarities in [0, 1]
        near = cos.clamp(min=0) if temperature is None else ((cos - 1) / temperature).exp()
        others = ~torch.eye(n, dtype=torch.bool, device=cos.device)
        compared[rows] = True
        cosine[rows] = mean_over(cos, others)
        similarity[rows] = mean_over(near, others)
        # the diagonal is left out: each sample equals itself
        novelty[rows] = 1 - cos.masked_fill(~others, -torch.inf).amax(1)
        entropy[rows] = entropy_of(clusters(cos >= threshold)) / math.log(n)
    return Spread(
        compared=compared, cosine=cosine, similarity=similarity, novelty=novelty, entropy=entropy
    )


def cosines(features: Tensor) -> Tensor:
    """(n, d) -> (n, n) fp64: 1 - |a - b|^2 / 2 of unit vectors, which is 1 exactly where a = b."""
    unit = normalize(features.double(), dim=1)
    squares = torch.stack([(unit - row).square().sum(1) for row in unit])
    return (1 - squares / 2).clamp(-1, 1)


def mean_over(values: Tensor, others: Tensor) -> Tensor:
    """Mean of each row of (n, n) over its others, added in the order of the values, so that the
    order of the members changes no bit."""
    ordered = values.masked_fill(~others, torch.inf).sort(1).values[:, :-1]
    return ordered.sum(1) / (len(values) - 1)


def clusters(linked: Tensor) -> Tensor:
    """(n, n) bool, symmetric and true on its diagonal -> cluster of each member (n,): the first
    member that a chain of links reaches."""
    own = torch.arange(len(linked), device=linked.device)
    while True:
        reached = torch.where(linked, own, len(linked)).amin(1)
        if torch.equal(reached, own):
            return own
        own = reached


def entropy_of(cluster: Tensor) -> float:
    """-sum p log p over the shares p of clusters (n,), in nats."""
    p = (torch.unique(cluster, return_counts=True)[1].double() / len(cluster)).sort().values
    return abs(float((p * p.log()).sum()))


# ---------------------------------------------------------------------- rewards and advantages


def adjusted(
    rewards: Rewards,
    group: Tensor,
    found: Spread,
    *,
    redundancy: float = 0.0,
    above: Above = "lowest",
    novelty: float = 0.0,
) -> Rewards:
    """The rewards from which advantages are made.

    The part of a reward above its base is divided by 1 + redundancy * similarity; redundancy G - 1
    with above="zero" gives DRA-GRPO's 1 + sum of similarities. Then novelty * nearest distance is
    added as one more reward. redundancy 0 and novelty 0 change no bit.
    """
    terms, weights, total = dict(rewards.terms), dict(rewards.weights), rewards.total
    if redundancy:
        divisor = 1 + redundancy * found.similarity
        total = discounted(total, group, divisor, above=above)
        for name, value in terms.items():  # a weight below 0 makes it a cost: lower is better
            sign = -1.0 if weights.get(name, 0) < 0 else 1.0
            terms[name] = sign * discounted(sign * value, group, divisor, above=above)
    if novelty:
        bonus = torch.where(rewards.valid, found.novelty, torch.nan).float()
        terms[NOVELTY], weights[NOVELTY] = bonus, novelty
        total = total + novelty * bonus
    return replace(rewards, raw=terms, counted={}, weights=weights, total=total)


def discounted(value: Tensor, group: Tensor, divisor: Tensor, *, above: Above) -> Tensor:
    """base + (value - base) / divisor where value exceeds base: (B,) fp32 -> (B,) fp32.

    base: the lowest value of the group, which no shift of all rewards changes; or zero.
    """
    exact = value.double()
    base = torch.zeros_like(exact)
    if above == "lowest":
        _, g = torch.unique(group, return_inverse=True)
        low = torch.full_like(exact, torch.inf)
        base = low.scatter_reduce(0, g, exact.nan_to_num(torch.inf), "amin")[g]
    return torch.where(exact > base, base + (exact - base) / divisor, exact).float()


def scaled(adv: Tensor, found: Spread, weight: float) -> Tensor:
    """adv * (1 - weight * entropy of its group): (B,) fp32 -> (B,) fp32; NaN stays NaN.

    SEED-GRPO's linear scale has a weight above 0 and learns more from groups that agree. A weight
    below 0 learns more from groups that differ.
    """
    return (adv.double() * (1 - weight * found.entropy)).float()
