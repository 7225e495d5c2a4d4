"""Comparing the members of a group two at a time: what a comparator is, which pairs it is asked,
and what its answers add up to.

A judge that reads the first picture more kindly than the second is asked both ways (`swap`): p =
(p(a, b) + 1 - p(b, a)) / 2 is free of any bias b that adds to both answers.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from flowrl.rewards.core.reward import RewardBug
from flowrl.rewards.core.score import take
from flowrl.types import MediaContext

Groups = Mapping[int, list[int]]  # group -> rows of its members


class Comparator(Protocol):
    """Anything that says which of two media fits a prompt better; a reward with this method is
    asked for pairs, not for scores."""

    def compare(
        self, media_a: Tensor, media_b: Tensor, prompts: list[str], context: MediaContext | None
    ) -> Tensor:
        """(n, 3, H, W) or (n, F, 3, H, W) twice, fp32 in [0, 1] -> (n,) fp32 probability that a is
        better; 0.5: a tie, NaN: it failed.

        prompts, context: those of a, which are b's too: the members of a group share their prompt.
        """
        ...


class Pointwise:
    """A comparator made of scores: 1, 0.5 or 0 by their difference d; with a temperature sigmoid(d
    / temperature)."""

    def __init__(self, reward: Any, *, margin: float = 0.0, temperature: float = 0.0):
        """margin: differences up to this are ties. temperature: 0 decides hard."""
        self.reward, self.margin, self.temperature = reward, margin, temperature

    def prefer(self, a: Tensor, b: Tensor) -> Tensor:
        """Scores (n,) and (n,) -> (n,) probability that a is better; NaN where either is NaN or
        inf, as a failed sample's score may be."""
        gap = a - b
        sure = (gap / self.temperature).sigmoid() if self.temperature else (gap > 0).to(gap.dtype)
        return torch.where(gap.abs() <= self.margin, 0.5, sure).masked_fill(
            ~gap.isfinite(), torch.nan
        )

    def compare(
        self, media_a: Tensor, media_b: Tensor, prompts: list[str], context: MediaContext | None
    ) -> Tensor:
        return self.prefer(
            self.reward(media_a, prompts, context), self.reward(media_b, prompts, context)
        )


def from_pointwise(reward: Any, *, margin: float = 0.0, temperature: float = 0.0) -> Pointwise:
    """The comparator that prefers the higher score of a reward, or of any function (media, prompts,
    context) -> (B,)."""
    return Pointwise(reward, margin=margin, temperature=temperature)


def groups_of(prompts: list[str], context: MediaContext | None, *, reward: str) -> Groups:
    """Rows of each group. A group with two prompts -> ValueError; one member alone, the others
    lost, is a group without pairs."""
    if context is None or context.group is None:
        raise ValueError(
            f"reward {reward} compares the members of a group: give MediaContext(group=...), a"
            " number a sample"
        )
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(context.group.tolist()):
        groups.setdefault(group, []).append(row)
    for group, rows in groups.items():
        if other := {prompts[row] for row in rows} - {prompts[rows[0]]}:
            raise ValueError(
                f'group {group} holds two prompts, "{prompts[rows[0]]}" and "{other.pop()}";'
                f" {reward} compares media of one"
            )
    return groups


def alone(groups: Groups) -> str | None:
    """Why samples without a companion have no score, as `Reward.problem` says it; None: there are
    none."""
    single = [group for group, rows in groups.items() if len(rows) == 1]
    if not single:
        return None
    return (
        f"group {single[0]} has one member to compare; sample at least two a prompt and score them"
        " together (batch.group=2 or more)"
    )


def pairs_of(groups: Groups, *, opponents: int | None = None) -> Tensor:
    """Every pair of each group's members, G (G - 1) / 2 of them -> (n, 2) int64 rows.

    opponents: about so many pairs for each member, never none, where a group has more; which ones
    is a hash of (group, i, j), i and j the members' places in the group.
    """
    out: list[tuple[int, int]] = []
    for group, rows in groups.items():
        places = list(itertools.combinations(range(len(rows)), 2))
        if opponents is not None and opponents < len(rows) - 1:
            places = _some(places, group, -(-len(rows) * opponents // 2))
        out += [(rows[i], rows[j]) for i, j in places]
    return torch.tensor(out, dtype=torch.int64).reshape(-1, 2)


def _some(places: list[tuple[int, int]], group: int, count: int) -> list[tuple[int, int]]:
    """`count` pairs in hashed order, each time one whose members have met the fewest so far: nobody
    is left out."""
    places = sorted(
        places, key=lambda pair: hashlib.blake2b(f"{group},{pair[0]},{pair[1]}".encode()).digest()
    )
    met: Counter[int] = Counter()
    kept = []
    for _ in range(count):
        pair = min(places, key=lambda pair: met[pair[0]] + met[pair[1]])
        places.remove(pair)
        met.update(pair)
        kept.append(pair)
    return sorted(kept)


def ask(
    judge: Any,
    media: Tensor,
    prompts: list[str],
    context: MediaContext | None,
    pairs: Tensor,
    *,
    swap: bool = False,
    chunk: int = 32,
) -> Tensor:
    """The judge's answers for pairs (n, 2) of rows -> (n,) fp32 probability that the first is
    better, NaN where it failed.

    A pointwise judge scores every sample once. swap: ask both ways and average; a pair that failed
    one way has failed. chunk: most pairs in one call.
    """
    if not len(pairs):
        return torch.zeros(0)
    if isinstance(judge, Pointwise):
        scores = judge.reward(media, prompts, context)
        return judge.prefer(*scores[pairs.to(scores.device)].unbind(1))
    answers = []
    for first, second in (part.unbind(1) for part in pairs.split(chunk)):
        answer = _compare(judge, media, prompts, context, first, second)
        if swap:
            answer = (answer + 1 - _compare(judge, media, prompts, context, second, first)) / 2
        answers.append(answer)
    return torch.cat(answers)


def _compare(
    judge: Any,
    media: Tensor,
    prompts: list[str],
    context: MediaContext | None,
    a: Tensor,
    b: Tensor,
) -> Tensor:
    """One call of the judge, held to its contract."""
    rows = None if context is None else take(context, a)
    out = judge.compare(
        media[a.to(media.device)], media[b.to(media.device)], [prompts[row] for row in a], rows
    )
    fits = isinstance(out, Tensor) and out.shape == (len(a),) and out.dtype == torch.float32
    if not fits or bool(((out < 0) | (out > 1)).any()):
        got = (
            f"{out.dtype} of shape {tuple(out.shape)}"
            if isinstance(out, Tensor)
            else type(out).__name__
        )
        got = f"values from {float(out.min()):.3g} to {float(out.max()):.3g}" if fits else got
        raise RewardBug(
            f"{type(judge).__name__}.compare returned {got}; expected float32 probabilities of"
            f" shape ({len(a)},)"
        )
    return out


def win_rates(pairs: Tensor, answers: Tensor, size: int) -> Tensor:
    """Mean win probability of each of `size` samples over its pairs -> (size,) fp32; the second of
    a pair wins with 1 - p.

    Failed pairs (NaN) count for nobody; a sample without any other pair is NaN.
    """
    first, second = pairs.to(answers.device).unbind(1)
    known = ~answers.isnan()
    wins = torch.zeros(size, device=answers.device)
    met = wins.index_add(0, first, known.float()).index_add(0, second, known.float())
    wins = wins.index_add(0, first, answers.nan_to_num(0.0)).index_add(
        0, second, (1 - answers).nan_to_num(0.0)
    )
    return wins / met
