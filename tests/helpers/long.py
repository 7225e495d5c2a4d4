"""Tests that `make long` runs and `make test` leaves out: siblings of one that stays."""

from pathlib import Path

import pytest

mark = pytest.mark.long
LISTED = frozenset((Path(__file__).parents[1] / "long.txt").read_text().splitlines())


def mark_listed(items):
    """Mark what long.txt names, which scripts/long_tests.py writes."""
    for item in items:
        if item.nodeid in LISTED:
            item.add_marker("long")
            item.add_marker("listed")


def but(names, long):
    """names for `parametrize`, of which these are long."""
    assert set(long) < set(names)
    return [pytest.param(name, marks=mark) if name in long else name for name in names]
