"""Tests that `make long` runs and `make test` leaves out: siblings of one that stays."""

import pytest

mark = pytest.mark.long


def but(names, long):
    """names for `parametrize`, of which these are long."""
    assert set(long) < set(names)
    return [pytest.param(name, marks=mark) if name in long else name for name in names]
