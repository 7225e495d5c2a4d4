"""Is it better, and by how much: bootstrap intervals of means, ratios and paired differences over
prompts, and Student's interval over seeds.

Images of one prompt are not independent: with `groups` whole prompts are resampled (the cluster
bootstrap; Davison & Hinkley 1997, ch. 2-3), and the interval then speaks about new prompts, not
only about new seeds. Percentile intervals are a little narrow when units are few: with 60 clusters
a 95% interval covered the truth in 93.5% of 8,000 trials. It imports no other module of flowrl.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ENOUGH = 10  # least clusters of a p-value: all resamples of fewer often agree, and seem certain
BLOCK = 2_000_000  # most drawn clusters in memory at a time: 16 MB

Resample = Callable[[np.ndarray], np.ndarray]
"""(C, K) sums of each cluster -> (R, K) sums over the clusters that each resample drew.

Every call draws the same clusters, so ratios and differences of its results are paired.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its two-sided interval."""

    mean: float  # mean of all values
    ci: tuple[float, float] | None  # (low, high) ends of the interval; None: one cluster
    n: int  # number of values


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """mean(after - before) over pairs that share prompt and seed."""

    difference: float  # mean of after - before
    ci: tuple[float, float] | None  # (low, high) ends of the interval; None: one cluster
    p: float | None  # two-sided bootstrap p-value of "no difference"; see `p_value`
    n: int  # number of pairs
    clusters: int  # number of independent units: prompts if groups were given, else pairs


def paired_bootstrap(
    before,
    after,
    *,
    groups: Sequence | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Paired:
    """Percentile bootstrap of the mean difference after - before.

    before, after: (n,) numbers (array, tensor or list), one pair a row. groups: (n,) prompt of each
    pair; None: pairs are independent.
    """
    before, after = _values("before", before), _values("after", after)
    if before.shape != after.shape:
        raise ValueError(
            f"{len(before)} values before but {len(after)} after; a paired comparison needs the"
            " same prompts and seeds"
        )
    change = after - before
    drawn, clusters = _resampled_means(change, groups, resamples, seed)
    ci = percentile_interval(drawn, clusters, level)
    mean, p = float(change.mean()), p_value(drawn, clusters)
    return Paired(difference=mean, ci=ci, p=p, n=len(change), clusters=clusters)


def paired_over_runs(before, after, *, groups: Sequence | None = None, **options: Any) -> Paired:
    """`paired_bootstrap` of the means over runs: it speaks about these runs on other prompts.

    before, after: (R, n) numbers of R runs, NaN where a value is missing. Pairs that lack a value
    in some run are left out; none is left -> ValueError.
    """
    before, after = (np.stack([_array(run) for run in side]) for side in (before, after))
    whole = np.isfinite(before + after).all(0)
    kept = None if groups is None else [group for group, w in zip(groups, whole, strict=True) if w]
    means = (side[:, whole].mean(0) for side in (before, after))
    return paired_bootstrap(*means, groups=kept, **options)


def student(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Mean of two values or more, one a seed, and Student's interval: it speaks about a run with
    another seed."""
    mean, n = statistics.fmean(values), len(values)
    half = student_quantile(n - 1, level) * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean=mean, ci=(mean - half, mean + half), n=n)


@functools.cache
def student_quantile(freedom: int, level: float = 0.95) -> float:
    """The t >= 0 with probability `level` of |T| <= t, for a whole number of degrees of freedom
    (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    low, high, odd = 0.0, math.pi / 2, freedom % 2
    for _ in range(60):  # halves the interval of the angle atan(t / sqrt(freedom))
        angle, total = (low + high) / 2, 0.0
        term = math.cos(angle) if odd else 1.0
        for k in range(odd, freedom - 1, 2):
            total += term
            term *= math.cos(angle) ** 2 * (k + 1) / (k + 2)
        inside = math.sin(angle) * total
        inside = 2 / math.pi * (angle + inside) if odd else inside
        low, high = (angle, high) if inside < level else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def mean_interval(
    values,
    *,
    groups: Sequence | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of the mean of values (n,); groups: (n,), as in `paired_bootstrap`."""
    values = _values("values", values)
    drawn, clusters = _resampled_means(values, groups, resamples, seed)
    ci = percentile_interval(drawn, clusters, level)
    return Interval(mean=float(values.mean()), ci=ci, n=len(values))


# ---------------------------------------------------------------------------
# the bootstrap: draw clusters, take the ratio of sums, read interval and p-value


def by_place(clusters: int, *, resamples: int, seed: int) -> Resample:
    """Draw as many clusters as there are, with replacement; nothing large stays in memory."""
    rows = max(1, BLOCK // clusters)

    def sums(table: np.ndarray) -> np.ndarray:
        rng, out = np.random.default_rng(seed), np.empty((resamples, table.shape[1]))
        for start in range(0, resamples, rows):
            part = out[start : start + rows]
            places = rng.integers(0, clusters, (len(part), clusters))
            for k, column in enumerate(table.T):
                part[:, k] = column[places].sum(1)
        return out

    return sums


def by_stratum(strata: Sequence[str], *, resamples: int, seed: int) -> Resample:
    """Draw clusters within their strata, whose sizes stay; strata: (C,), one for each cluster.

    Strata of a single cluster would never vary; they are drawn together. The weights of the
    clusters stay in memory, for statistics of many columns.
    """
    size = Counter(strata)
    members: dict[str | None, list[int]] = defaultdict(list)
    for cluster, stratum in enumerate(strata):
        members[stratum if size[stratum] > 1 else None].append(cluster)
    rng, weights = np.random.default_rng(seed), np.empty((resamples, len(strata)))
    for rows in members.values():
        equal = np.full(len(rows), 1 / len(rows))
        weights[:, rows] = rng.multinomial(len(rows), equal, size=resamples)
    return lambda table: weights @ table


def everything(table: np.ndarray) -> np.ndarray:
    """A `Resample` of one row, which holds every cluster once: the sample itself."""
    return np.ones((1, len(table))) @ table


def ratio(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Divide total by count; NaN where nothing was counted."""
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0)


def percentile_interval(
    drawn: np.ndarray, clusters: int, level: float = 0.95
) -> tuple[float, float] | None:
    """Return the middle `level` of resampled statistics (R,), without those that are NaN; None of
    one cluster, whose resamples are all alike."""
    if not 0 < level < 1:
        raise ValueError(
            f"level={level}: a confidence level lies between 0 and 1, for example 0.95"
        )
    if clusters < 2:
        return None
    low, high = np.nanquantile(drawn, [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)


def p_value(drawn: np.ndarray, clusters: int) -> float | None:
    """Two-sided p of "no difference" from resampled differences (R,), at least 2 / (R + 1); None
    of fewer clusters than ENOUGH."""
    if clusters < ENOUGH:
        return None
    tail = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    return min(1.0, 2 * (tail + 1) / (len(drawn) + 1))


def _resampled_means(
    values: np.ndarray, groups: Sequence | None, resamples: int, seed: int
) -> tuple[np.ndarray, int]:
    """Draw whole clusters -> the means of these samples (resamples,), and how many clusters there
    are."""
    place = np.arange(len(values)) if groups is None else _places(groups, len(values))
    table = np.stack([np.bincount(place, weights=values), np.bincount(place)], 1)
    total, count = by_place(len(table), resamples=resamples, seed=seed)(table).T
    return ratio(total, count), len(table)


def _places(groups: Sequence, count: int) -> np.ndarray:
    """Number the groups, and return the number of each value's group, (n,)."""
    labels = _array(groups)
    if labels.shape != (count,):
        raise ValueError(
            f"groups has shape {labels.shape} for {count} values; give the prompt of each value"
        )
    return np.unique(labels, return_inverse=True)[1]


def _array(values) -> np.ndarray:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def _values(name: str, values) -> np.ndarray:
    values = _array(values).astype(np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"{name} has shape {values.shape}; give one number a sample, at least one")
    if bad := int((~np.isfinite(values)).sum()):
        raise ValueError(
            f"{bad} of {len(values)} values of {name} are NaN or inf; leave failed samples out of"
            " both sides"
        )
    return values
