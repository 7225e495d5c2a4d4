"""Statistics of evaluation suites: scores by category with intervals that resample prompts,
best-of-N, diversity, contamination.

Every score is a ratio of two sums over prompts: of values, and of their number. A bootstrap
resample (Davison & Hinkley 1997, ch. 2-3) weighs whole prompts, the same for all settings, so a
difference between two settings is paired. Prompts are drawn within strata (a benchmark's tasks),
because their sizes are part of the benchmark. Imports nothing of ours.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Rule = Literal["mean", "category_mean"]
RESAMPLES = 2000
LEVEL = 0.95
GRAM = 8  # words in a row that count as copied
NEAR = (
    4,
    5,
)  # Jaccard index of two prompts' words from which they are near duplicates, as a fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """cluster: (P,) place of each prompt's cluster; weights: (R, C) how often each resample drew
    each cluster."""

    cluster: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """total, count: (C, K) sums and numbers of values by cluster and by category."""

    names: list[str]
    total: np.ndarray
    count: np.ndarray

    def only(self, name: str) -> Cells:
        k = self.names.index(name)
        return Cells(names=[name], total=self.total[:, k : k + 1], count=self.count[:, k : k + 1])

    def merged(self, into: Callable[[str], str]) -> Cells:
        """Categories that `into` gives one name are pooled."""
        names = list(dict.fromkeys(map(into, self.names)))
        member = np.array([[float(into(old) == new) for new in names] for old in self.names])
        return Cells(names=names, total=self.total @ member, count=self.count @ member)


def design(
    texts: Sequence[str], strata: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> Design:
    """Resamples of prompts: equal texts of a stratum are one cluster, and each stratum keeps its
    number of clusters.

    Strata of one cluster would never vary; they are drawn together.
    """
    pairs = list(zip(strata, texts, strict=True))
    place = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
    size = Counter(stratum for stratum, _ in place)
    drawn: dict[str | None, list[int]] = defaultdict(list)
    for (stratum, _), i in place.items():
        drawn[stratum if size[stratum] > 1 else None].append(i)
    rng, weights = np.random.default_rng(seed), np.empty((resamples, len(place)))
    for rows in drawn.values():
        weights[:, rows] = rng.multinomial(
            len(rows), np.full(len(rows), 1 / len(rows)), size=resamples
        )
    return Design(cluster=np.array([place[pair] for pair in pairs]), weights=weights)


def cells(
    columns: Mapping[str, np.ndarray],
    chosen: Design,
    questions: Mapping[str, np.ndarray] | None = None,
) -> Cells:
    """columns: category -> (P, n) values, NaN where a prompt has none; questions: category -> (P,)
    how many each value is the mean of."""
    clusters = chosen.weights.shape[1]
    total, count = np.zeros((clusters, len(columns))), np.zeros((clusters, len(columns)))
    for k, (name, values) in enumerate(columns.items()):
        size = np.ones(len(values)) if questions is None else questions[name]
        np.add.at(total[:, k], chosen.cluster, size * np.nansum(values, 1))
        np.add.at(count[:, k], chosen.cluster, size * np.isfinite(values).sum(1))
    return Cells(names=list(columns), total=total, count=count)


def statistic(data: Cells, weights: np.ndarray, rule: Rule) -> np.ndarray:
    """(R,) scores of weighted clusters. mean: over all values. category_mean: mean of the
    categories' means (GenEval, UniGenBench)."""
    total, count = weights @ data.total, weights @ data.count
    if rule == "mean":
        return _ratio(total.sum(1), count.sum(1))
    means = _ratio(total, count)
    return (
        means.mean(1) if len(means) == 1 else _nanmean(means)
    )  # a resample may have missed a category, the benchmark itself must not


def score(data: Cells, chosen: Design, rule: Rule = "mean", scale: float = 1.0) -> dict[str, Any]:
    """{"mean", "ci" (95%; None where fewer than two prompts speak), "n" values, "prompts"}; mean
    None where nothing is known."""
    n, prompts = int(round(data.count.sum())), int((data.count.sum(1) > 0).sum())
    mean = statistic(data, np.ones((1, len(data.total))), rule)[0]
    ci = (
        _interval(scale * statistic(data, chosen.weights, rule))
        if prompts > 1 and math.isfinite(mean)
        else None
    )
    return {
        "mean": scale * float(mean) if math.isfinite(mean) else None,
        "ci": ci,
        "n": n,
        "prompts": prompts,
    }


def difference(
    before: Cells, after: Cells, chosen: Design, rule: Rule = "mean", scale: float = 1.0
) -> dict[str, Any] | None:
    """after - before, both on the same resamples: {"difference", "ci", "p" (two-sided, of "no
    difference"), "n", "prompts"}."""
    ones = np.ones((1, len(before.total)))
    value = (statistic(after, ones, rule) - statistic(before, ones, rule))[0]
    prompts = int((before.count.sum(1) > 0).sum())
    if not math.isfinite(value):
        return None
    out: dict[str, Any] = {
        "difference": scale * float(value),
        "ci": None,
        "p": None,
        "n": int(round(before.count.sum())),
        "prompts": prompts,
    }
    if prompts > 1:
        drawn = statistic(after, chosen.weights, rule) - statistic(before, chosen.weights, rule)
        tail = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
        out["ci"], out["p"] = _interval(scale * drawn), min(1.0, 2 * (tail + 1) / (len(drawn) + 1))
    return out


def common(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same values, those left out that are missing in either."""
    missing = np.isnan(before) | np.isnan(after)
    return np.where(missing, np.nan, before), np.where(missing, np.nan, after)


def _ratio(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0)


def _nanmean(rows: np.ndarray) -> np.ndarray:
    known = np.isfinite(rows)
    return _ratio(np.where(known, rows, 0.0).sum(1), known.sum(1))


def _interval(drawn: np.ndarray) -> list[float]:
    return [float(q) for q in np.nanquantile(drawn, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])]


# ---------------------------------------------------------------------------
# best of N


def best_of(values: np.ndarray, most: int, read: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the best of N images of a prompt by `values` (P, n) is expected to show, N = 1..most, in
    each of `read`: (P, n) -> (P, most).

    The mean over all subsets of size N of what their largest member shows: with values[1] <= ... <=
    values[n], sum_i C(i-1, N-1) / C(n, N) read[i]. Unbiased for N fresh images, as pass@k (Chen et
    al. 2021, arXiv:2107.03374, eq. 1) is for the best of k answers that are right or wrong. Equal
    values share their places. NaN where fewer than `most` values of a prompt are known, or what is
    read is not.
    """
    out = {name: np.full((len(values), most), np.nan) for name in read}
    for p, own in enumerate(values):
        known = own[np.isfinite(own)]
        if len(known) >= most:
            by_place, order = _order_weights(len(known), most), np.sort(known)
            weights = np.stack([by_place[order == value].mean(0) for value in known])  # (images, N)
            for name, column in read.items():
                out[name][p] = column[p][np.isfinite(own)] @ weights
    return out


def _order_weights(n: int, most: int) -> np.ndarray:
    """(n, most): the share of subsets of size N whose largest member is the i-th of n."""
    return np.array(
        [
            [math.comb(i, size - 1) / math.comb(n, size) for size in range(1, most + 1)]
            for i in range(n)
        ]
    )


# ---------------------------------------------------------------------------
# contamination


def contamination(training: Iterable[str], suite: Iterable[str]) -> dict[str, Any]:
    """How much of a suite was trained on: of its different prompts, how many are training prompts,
    and how many come close.

    exact: equal after normalisation (words alone, lower case, Unicode NFKC). near: not equal, but
    the sets of words have a Jaccard index of at least 0.8, whatever their order. shared_8_grams:
    eight words in a row occur in a training prompt too. examples: [kind, prompt].
    """
    seen = {words(text) for text in training}
    texts = {words(text): text for text in suite}
    copied = {gram for own in seen for gram in grams(own)}
    exact = [own for own in texts if own in seen]
    rest = [own for own in texts if own not in seen]
    near = [
        own
        for own, close in zip(
            rest,
            near_duplicates([set(own) for own in seen], [set(own) for own in rest]),
            strict=True,
        )
        if close
    ]
    shared = [own for own in texts if not copied.isdisjoint(grams(own))]
    named = (("exact", exact), ("near", near), ("shared_8_grams", shared))
    examples = [[kind, texts[own]] for kind, members in named for own in members[:3]]
    return {
        "training": len(seen),
        "suite": len(texts),
        **{kind: len(members) for kind, members in named},
        "examples": examples,
    }


def words(text: str) -> tuple[str, ...]:
    """
    >>> words("A  red circle, left-of 2 Ｂlue squares!")
    ('a', 'red', 'circle', 'left', 'of', '2', 'blue', 'squares')
    """
    return tuple(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def grams(own: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    return (own[i : i + GRAM] for i in range(len(own) - GRAM + 1))


def near_duplicates(training: Sequence[set[str]], suite: Sequence[set[str]]) -> list[bool]:
    """Whether a set of the suite has a Jaccard index of at least 4/5 with any training set.

    Such sets share one of their rarest words: the first |A| - ceil(4/5 |A|) + 1 of each in a common
    order (prefix filtering, Chaudhuri et al. 2006), so few pairs are compared.
    """
    frequency = Counter(word for own in training for word in own)
    a, b = NEAR

    def rarest(own: set[str]) -> list[str]:
        needed = -(-a * len(own) // b)  # shared words, rounded up
        return sorted(own, key=lambda word: (frequency[word], word))[: len(own) - needed + 1]

    index: dict[str, list[set[str]]] = defaultdict(list)
    for own in training:
        for word in rarest(own):
            index[word].append(own)
    return [
        any(
            b * len(own & other) >= a * len(own | other)
            for word in rarest(own)
            for other in index[word]
        )
        for own in suite
    ]
