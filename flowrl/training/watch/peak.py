"""Find the peak of a noisy curve, and whether the curve lies significantly below it now.

The curve is the mean of a held-out reward in each iteration. It is smoothed by a running mean over
`smooth` iterations, and the peak is the highest such mean. The noise of one iteration, its standard
deviation s, is estimated from the curve: s^2 is half the mean square of the differences between
neighbours (von Neumann 1941), in which a slow rise or fall hardly counts, while prompts, samples
and training all do. Two running means that share no iteration then differ by chance with a standard
error of s * sqrt(2 / smooth); those L < smooth iterations apart share the rest and differ by
s * sqrt(2 L) / smooth.

The peak was chosen for being high, so that a curve that only jitters lies below its own peak, too.
How often that raises a false alarm is measured in tests/training/test_peak.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Curve = Sequence[tuple[int, float]]  # (iteration, from 1; value) in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The newest running mean of a curve, and the highest one."""

    now: float  # newest running mean
    best: float  # highest running mean
    iteration: float  # middle of the window with the highest mean
    error: float  # standard error of best - now; 0 if now is the peak

    @property
    def weights(self) -> float:
        """Number of the checkpoint that sampled there: iteration i follows i - 1 updates."""
        return self.iteration - 1

    def below(self, errors: float) -> bool:
        """Whether the curve lies more than `errors` standard errors below its peak."""
        return self.best - self.now > errors * self.error


def noise(values: Sequence[float] | np.ndarray) -> float:
    """Estimate the standard deviation of one value about a slow course; 0 for fewer than two."""
    return float(np.sqrt(np.square(np.diff(values)).mean() / 2)) if len(values) > 1 else 0.0


def find_peak(curve: Curve, *, smooth: int, since: int = 0) -> Peak | None:
    """Find the peak among the running means of iterations after `since`; None if there are fewer
    than `smooth` of these."""
    table = np.array(curve, dtype=np.float64).reshape(-1, 2)
    numbers, values = table[table[:, 0] > since].T
    if len(values) < smooth:
        return None
    means = sliding_window_view(values, smooth).mean(1)
    top = int(means.argmax())  # argmax takes the first of equal ones
    apart = min(len(means) - 1 - top, smooth)
    return Peak(
        now=float(means[-1]),
        best=float(means[top]),
        iteration=float(numbers[top : top + smooth].mean()),
        error=noise(table[:, 1]) * math.sqrt(2 * apart) / smooth,
    )
