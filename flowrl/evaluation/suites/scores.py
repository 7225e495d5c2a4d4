"""Scores of evaluation suites: overall and by category, with intervals, and the best of N images.

Every score is a ratio of two sums over prompts: of values, and of their number. A resample (see
flowrl.runtime.statistics) weighs whole prompts, the same for all settings, so a difference between
two settings is paired. Prompts are drawn within strata (a benchmark's tasks), because their sizes
are part of the benchmark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flowrl.runtime.statistics import (
    Resample,
    by_stratum,
    everything,
    p_value,
    percentile_interval,
    ratio,
)

Rule = Literal["mean", "category_mean"]
RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """How prompts are resampled."""

    cluster: np.ndarray  # (P,) number of each prompt's cluster
    clusters: int  # C, number of clusters
    resample: Resample  # function that draws clusters


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Values summed up by cluster and by category."""

    names: list[str]  # (K,) names of the categories
    total: np.ndarray  # (C, K) sums of values
    count: np.ndarray  # (C, K) numbers of values

    def only(self, name: str) -> Cells:
        """One category alone."""
        k = self.names.index(name)
        return Cells(names=[name], total=self.total[:, k : k + 1], count=self.count[:, k : k + 1])

    def merged(self, into: Callable[[str], str]) -> Cells:
        """Pool the categories to which `into` gives one name."""
        names = list(dict.fromkeys(map(into, self.names)))
        member = np.array([[float(into(old) == new) for new in names] for old in self.names])
        return Cells(names=names, total=self.total @ member, count=self.count @ member)

    @property
    def values(self) -> int:
        """How many values there are."""
        return int(round(self.count.sum()))

    @property
    def prompts(self) -> int:
        """Clusters with a value."""
        return int((self.count.sum(1) > 0).sum())


def design(texts: Sequence[str], strata: Sequence[str]) -> Design:
    """Make equal texts of a stratum one cluster, which is drawn within the stratum."""
    pairs = list(zip(strata, texts, strict=True))
    place = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
    return Design(
        cluster=np.array([place[pair] for pair in pairs]),
        clusters=len(place),
        resample=by_stratum([stratum for stratum, _ in place], resamples=RESAMPLES, seed=0),
    )


def cells(
    columns: Mapping[str, np.ndarray],
    resampling: Design,
    questions: Mapping[str, np.ndarray] | None = None,
) -> Cells:
    """Sum up by cluster each category's values (P, n), NaN where a prompt has none.

    questions: category -> (P,), how many answers each value is the mean of.
    """
    total, count = np.zeros((2, resampling.clusters, len(columns)))
    for k, (name, values) in enumerate(columns.items()):
        size = np.ones(len(values)) if questions is None else questions[name]
        np.add.at(total[:, k], resampling.cluster, size * np.nansum(values, 1))
        np.add.at(count[:, k], resampling.cluster, size * np.isfinite(values).sum(1))
    return Cells(names=list(columns), total=total, count=count)


def statistic(data: Cells, resample: Resample, rule: Rule) -> np.ndarray:
    """The scores (R,) of resampled clusters.

    rule: mean, over all values; category_mean, of the categories' means (GenEval, UniGenBench).
    """
    total, count = resample(data.total), resample(data.count)
    if rule == "mean":
        return ratio(total.sum(1), count.sum(1))
    means = ratio(total, count)
    # a resample may lack a category, and is the mean of the others; the benchmark itself must not
    return means.mean(1) if len(means) == 1 else _nanmean(means)


def score(
    data: Cells, resampling: Design, rule: Rule = "mean", scale: float = 1.0
) -> dict[str, Any]:
    """Score values -> {"mean" (None where nothing is known), "ci" (95%; None where fewer than two
    prompts have values), "n" values, "prompts"}."""
    mean, ci = statistic(data, everything, rule)[0], None
    known = math.isfinite(mean)
    if known and data.prompts > 1:
        drawn = statistic(data, resampling.resample, rule)
        ci = percentile_interval(scale * drawn, data.prompts)
    scaled = scale * float(mean) if known else None
    return {"mean": scaled, "ci": ci and list(ci), "n": data.values, "prompts": data.prompts}


def difference(
    before: Cells, after: Cells, resampling: Design, rule: Rule = "mean", scale: float = 1.0
) -> dict[str, Any] | None:
    """Compare two sides on the same resamples -> {"difference" (after - before), "ci", "p"
    (two-sided, of "no difference"; see ENOUGH), "n", "prompts"}; None where a side is unknown."""
    value = (statistic(after, everything, rule) - statistic(before, everything, rule))[0]
    if not math.isfinite(value):
        return None
    ci, p = None, None
    if before.prompts > 1:
        first, second = (statistic(side, resampling.resample, rule) for side in (before, after))
        drawn = second - first
        ci, p = percentile_interval(scale * drawn, before.prompts), p_value(drawn, before.prompts)
    found = {"difference": scale * float(value), "ci": ci and list(ci), "p": p}
    return found | {"n": before.values, "prompts": before.prompts}


def common(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Leave out of both sides the values that are missing in either."""
    missing = np.isnan(before) | np.isnan(after)
    return np.where(missing, np.nan, before), np.where(missing, np.nan, after)


def _nanmean(rows: np.ndarray) -> np.ndarray:
    known = np.isfinite(rows)
    return ratio(np.where(known, rows, 0.0).sum(1), known.sum(1))


# ---------------------------------------------------------------------------
# best of N


def best_of(values: np.ndarray, most: int, read: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Estimate what the best of N images of a prompt by `values` shows, N = 1..most.

    values (P, n), and each of `read`: (P, n) -> (P, most). It is the mean over all subsets of size
    N of what their largest member shows: with values[1] <= ... <= values[n],
    sum_i C(i-1, N-1) / C(n, N) read[i]. Unbiased for N fresh images, as pass@k (Chen et al. 2021,
    arXiv:2107.03374, eq. 1) is for the best of k answers that are right or wrong. Equal values
    share their places. NaN where fewer than `most` values of a prompt are known, or where the
    column that is read has no value.
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
    sizes = range(1, most + 1)
    share = [[math.comb(i, size - 1) / math.comb(n, size) for size in sizes] for i in range(n)]
    return np.array(share)
