"""A number that may change with the iteration: linear between stated points, constant outside."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class WeightSchedule:
    """A weight or threshold over a run; a plain number is a single point."""

    points: tuple[tuple[int, float], ...]  # (iteration from 0, value), ascending

    def at(self, iteration: int | None) -> float:
        """Value in an iteration; None: after the last point.

        >>> WeightSchedule(((0, 1.0), (100, 0.2))).at(50)
        0.6
        """
        (first, value), last = self.points[0], self.points[-1][1]
        if iteration is None:
            return last
        if iteration <= first:
            return value
        for (start, low), (end, high) in pairwise(self.points):
            if iteration <= end:
                return low + (high - low) * (iteration - start) / (end - start)
        return last

    @property
    def values(self) -> list[float]:
        """Values at its points: no other value is lower or higher than all of them."""
        return [value for _, value in self.points]

    @property
    def stated(self) -> float | dict[int, float]:
        """The number as a config states it."""
        return self.points[0][1] if len(self.points) == 1 else dict(self.points)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; true and false are no numbers."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def parse_schedule(value: Any) -> WeightSchedule | None:
    """Read a number, or a mapping iteration -> number, such as {0: 1, 100: 0.2}; None: neither.

    Keys may be texts of digits, as JSON has them.
    """
    if is_number(value):
        return WeightSchedule(((0, float(value)),))
    if not isinstance(value, Mapping) or not value or not all(map(is_number, value.values())):
        return None
    points = {_iteration(key): float(number) for key, number in value.items()}
    if None in points or len(points) < len(value):
        return None
    ordered = sorted((key, number) for key, number in points.items() if key is not None)
    constant = len(set(points.values())) == 1
    return WeightSchedule(tuple(ordered[:1] if constant else ordered))


def _iteration(key: Any) -> int | None:
    """A whole number from 0 on, from a key of a mapping."""
    digits = str(key)
    return int(digits) if digits.isascii() and digits.isdigit() else None
