"""The window of SDE steps moves over training (MixGRPO, arXiv:2507.21802): where it lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from flowrl.samplers import keys
from flowrl.samplers.common.checks import check_counts

KNEE = 13  # step at which exp_decay sets in, as in the paper
Schedule = Literal["progressive", "random", "geometric", "decay", "exp_decay", "frozen"]


def window_start(
    schedule: Schedule,
    iteration: int,
    *,
    steps: int,
    size: int,
    low: int = 0,
    high: int | None = None,
    every: int = 25,
    stride: int = 1,
    rate: float = 0.1,
    seed: int = 0,
) -> int:
    """Return the first step of the window at an iteration: a pure function, so that nothing is
    saved.

    The window of `size` steps stays inside [low, high); high None: steps - 1, the last step is ODE.
    progressive: the window moves on by `stride` every `every` iterations and returns to `low` at
    the end. decay: the same, but it stays max(1, int(every (1 - l/M) + l/M)) iterations at position
    l, M = steps - 2. exp_decay: it stays ceil(every exp(-rate max(l - KNEE, 0))). random: uniform
    at each iteration (Flow-GRPO-Fast). geometric: see geometric_place. frozen: always low.
    """
    high = steps - 1 if high is None else high
    check_window(steps, size, low, high)
    check_counts(every=every, stride=stride)
    if schedule == "frozen":
        return low
    if schedule in ("random", "geometric"):
        u = float(keys.uniform(keys.key("window", seed, iteration)))
        places = high - size - low + 1
        return low + (int(u * places) if schedule == "random" else geometric_place(u, places, rate))
    end = max(steps - 2, 1)  # M counts the schedule's steps, whatever range the window has
    stays: dict[str, Callable[[int], int]] = {
        "progressive": lambda l: every,
        "decay": lambda l: max(1, int(every * (1 - l / end) + l / end)),
        "exp_decay": lambda l: math.ceil(every * math.exp(-rate * max(l - KNEE, 0))),
    }
    if schedule not in stays:
        raise ValueError(
            f'window schedule "{schedule}" is unknown; choose progressive, random, geometric,'
            " decay, exp_decay or frozen"
        )
    return position_at(iteration, range(low, high - size + 1, stride), stays[schedule])


def check_window(steps: int, size: int, low: int, high: int) -> None:
    """ValueError unless a window of `size` steps fits into [low, high) before the last step."""
    if steps < 2:
        raise ValueError(
            f"a window needs at least 2 steps, of which the last stays ODE; sampler.steps={steps}"
        )
    if high > steps - 1:
        raise ValueError(
            f"a window cannot end at window.high={high} of {steps} steps: the last stays ODE;"
            f" choose at most {steps - 1}"
        )
    if not 0 <= low < high:
        raise ValueError(
            f"a window cannot start at window.low={low} and end at {high}; choose low in"
            f" 0..{high - 1}"
        )
    if not 1 <= size <= high - low:
        raise ValueError(
            f"a window of {size} steps does not fit into steps {low}..{high - 1} of {steps} (the"
            f" last stays ODE); choose size in 1..{high - low}, or a wider range"
        )


def geometric_place(u: float, places: int, rate: float) -> int:
    """Map u in [0, 1) to place i of n, which has probability (1-r) r^i / (1 - r^n), r = rate.

    A small rate prefers early places (TreeGRPO, arXiv:2512.08153: 0.5).
    """
    if not 0 < rate < 1:
        raise ValueError(
            f"rate={rate} of a geometric window must lie between 0 and 1 (TreeGRPO: 0.5); rate=1"
            " would be schedule random"
        )
    place = int(math.log1p(-u * (1 - rate**places)) / math.log(rate))
    return min(place, places - 1)  # rounding of the logarithms may reach `places`


def position_at(iteration: int, positions: range, stay: Callable[[int], int]) -> int:
    """Return the window's position when it stays stay(l) iterations at each l, again and again."""
    stays = [stay(position) for position in positions]
    left = iteration % sum(stays)
    for position, iterations in zip(positions, stays, strict=True):
        if left < iterations:
            return position
        left -= iterations
    raise AssertionError("unreachable: left < sum(stays)")
