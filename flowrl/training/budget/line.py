"""Straight lines: a quantity that is known at two sizes is known at every size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

Record = TypeVar("Record")


def at(low: Any, high: Any, share: float) -> Any:
    """Return the number `share` of the way from low to high, which may lie beyond both; for dicts,
    the numbers key by key."""
    if isinstance(high, dict):
        return {key: at(low.get(key, 0.0), high.get(key, 0.0), share) for key in low | high}
    return low + share * (high - low)


def on_line(low: Record, high: Record, share: float, *names: str) -> Record:
    """Return the record `high`, with its fields `names` on the lines through low and high."""
    line = {name: at(getattr(low, name), getattr(high, name), share) for name in names}
    return replace(high, **line)  # type: ignore[type-var]
