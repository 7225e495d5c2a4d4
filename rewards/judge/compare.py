"""Members of a group are compared two at a time: comparators, their pairs, win rates.

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

from flowrl.rewards.core.failures import RewardBug
from flowrl.rewards.core.score import take
from flowrl.runtime.copies import own
from flowrl.types import MediaContext

Groups = Mapping[int, list[int]]  # group -> rows of its members


class Comparator(Protocol):
    """An object that says which of two media fits a prompt better.

    A reward with this method is asked for pairs, not for scores.
    """

    def compare(
        self, media_a: Tensor, media_b: Tensor, prompts: list[str], context: MediaContext | None
    ) -> Tensor:
        """The probability that a is better, (n,) fp32; 0.5: a tie, NaN: comparing failed.

        media_a, media_b: (n, 3, H, W) or (n, F, 3, H, W) fp32 in [0, 1]. prompts, context: those of
        a, and of b, too, because the members of a group share their prompt.
        """
        ...


class Pointwise:
    """A comparator made of scores: 1, 0.5 or 0 by the sign of their difference d.

    With a temperature it is sigmoid(d / temperature).
    """

    def __init__(self, reward: Any, *, temperature: float = 0.0):
        """temperature: 0 gives 1, 0.5 or 0."""
        self.reward, self.temperature = reward, temperature

    def prefer(self, a: Tensor, b: Tensor) -> Tensor:
        """Scores (n,) and (n,) -> (n,) probability that a is better.

        NaN where either is NaN or inf, as a failed sample's score may be.
        """
        gap = a - b
        sure = (gap / self.temperature).sigmoid() if self.temperature else (gap > 0).to(gap.dtype)
        answer = torch.where(gap == 0, 0.5, sure)
        return answer.masked_fill(~gap.isfinite(), torch.nan)

    def compare(
        self, media_a: Tensor, media_b: Tensor, prompts: list[str], context: MediaContext | None
    ) -> Tensor:
        scores_a = self.reward(media_a, prompts, context)
        return self.prefer(scores_a, self.reward(media_b, prompts, context))


def from_pointwise(reward: Any, *, temperature: float = 0.0) -> Pointwise:
    """The comparator that prefers the higher score.

    reward: a Reward, or any function (media, prompts, context) -> (B,).
    """
    return Pointwise(reward, temperature=temperature)


def groups_of(prompts: list[str], context: MediaContext | None, *, reward: str) -> Groups:
    """Rows of each group; a group with two prompts -> ValueError.

    A group of which only one member is left has no pairs.
    """
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
    """Why samples without a companion have no score, for `Reward.problem`; None: all have one."""
    single = [group for group, rows in groups.items() if len(rows) == 1]
    if not single:
        return None
    return (
        f"group {single[0]} has one member to compare; sample at least two a prompt and score them"
        " together (batch.group=2 or more)"
    )


def pairs_of(groups: Groups, *, opponents: int | None = None) -> Tensor:
    """Every pair of each group's members, G (G - 1) / 2 of them -> (n, 2) int64 rows.

    opponents: about how many pairs each member of a larger group gets, at least one; a hash of
    (group, i, j) chooses them, with i and j the members' places in the group.
    """
    out: list[tuple[int, int]] = []
    for group, rows in groups.items():
        places = list(itertools.combinations(range(len(rows)), 2))
        if opponents is not None and opponents < len(rows) - 1:
            places = _some(places, group, -(-len(rows) * opponents // 2))
        out += [(rows[i], rows[j]) for i, j in places]
    return torch.tensor(out, dtype=torch.int64).reshape(-1, 2)


def _some(places: list[tuple[int, int]], group: int, count: int) -> list[tuple[int, int]]:
    """Choose `count` pairs in hashed order, each time one whose members have met the fewest so far,
    so that nobody is left out.
    """

    def hashed(pair: tuple[int, int]) -> bytes:
        return hashlib.blake2b(f"{group},{pair[0]},{pair[1]}".encode()).digest()

    places = sorted(places, key=hashed)
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
    """Ask the judge -> (n,) fp32 probability that the first of a pair is better; NaN: it failed.

    pairs: (n, 2) rows. A pointwise judge scores every sample once. swap: ask both ways and average;
    a pair that failed one way has failed. chunk: most pairs in one call.
    """
    if not len(pairs):
        return torch.zeros(0)
    if isinstance(judge, Pointwise):
        scores = judge.reward(media, prompts, context)
        return judge.prefer(*scores[pairs.to(scores.device)].unbind(1))

    def answer(first: Tensor, second: Tensor) -> Tensor:
        rows = None if context is None else own(take(context, first))
        a, b = media[first.to(media.device)], media[second.to(media.device)]
        return _checked(judge, judge.compare(a, b, [prompts[row] for row in first], rows), len(a))

    # With swap, pairs are asked both ways: many judges prefer the picture that they see first.
    answers = []
    for first, second in (part.unbind(1) for part in pairs.split(chunk)):
        one_way = answer(first, second)
        answers.append((one_way + 1 - answer(second, first)) / 2 if swap else one_way)
    return torch.cat(answers)


def _checked(judge: Comparator, answer: Any, count: int) -> Tensor:
    """Check the answer of a judge for `count` pairs; anything but probabilities -> RewardBug."""
    if not isinstance(answer, Tensor):
        got = type(answer).__name__
    elif answer.shape != (count,) or answer.dtype != torch.float32:
        got = f"{answer.dtype} of shape {tuple(answer.shape)}"
    elif ((answer < 0) | (answer > 1)).any():
        got = f"values from {float(answer.min()):.3g} to {float(answer.max()):.3g}"
    else:
        return answer
    raise RewardBug(
        f"{type(judge).__name__}.compare returned {got}; expected float32 probabilities of shape"
        f" ({count},)"
    )


def win_rates(pairs: Tensor, answers: Tensor, size: int) -> Tensor:
    """Mean win probability of each of `size` samples over its pairs -> (size,) fp32.

    The second of a pair wins with 1 - p. Failed pairs (NaN) count for nobody; a sample without any
    other pair is NaN.
    """
    first, second = pairs.to(answers.device).unbind(1)
    known = ~answers.isnan()
    wins = torch.zeros(size, device=answers.device)
    met = wins.index_add(0, first, known.float()).index_add(0, second, known.float())
    wins = wins.index_add(0, first, answers.nan_to_num(0.0))
    wins = wins.index_add(0, second, (1 - answers).nan_to_num(0.0))
    return wins / met
