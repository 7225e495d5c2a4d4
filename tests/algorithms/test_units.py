"""Sums and softmax within the units of a loss, and the ramp of an old policy's decay."""

import pytest
import torch

from flowrl.algorithms.common import base, forward


def test_sums_and_softmax_are_within_units():
    value, unit = torch.tensor([1.0, 2, 3, 4, 5]), torch.tensor([7, 3, 7, 3, 3])
    total, count, place = base.sums(value, unit)
    assert (total.tolist(), count.tolist(), place.tolist()) == ([11, 4], [3, 2], [1, 0, 1, 0, 0])
    soft = forward.softmax(value, unit)
    assert torch.allclose(soft[unit == 3], value[unit == 3].softmax(0))
    assert torch.allclose(soft[unit == 7], value[unit == 7].softmax(0))


def test_softmax_of_a_unit_far_below_another_is_still_one():
    soft = forward.softmax(torch.tensor([500.0, 499.0, -500.0, -501.0]), torch.tensor([0, 0, 1, 1]))
    assert torch.allclose(soft, torch.tensor([1.0, 0.0]).softmax(0).repeat(2))


def test_a_decay_ramps_from_its_start_to_its_end():
    assert [forward.ramp(n, 0.25, 0.005, 0.999) for n in (0, 10, 1000)] == pytest.approx(
        [0.25, 0.3, 0.999]
    )
    assert [forward.ramp(n, 0.5, 0.1, 1.0, after=3) for n in (2, 3, 4)] == pytest.approx(
        [0.0, 0.5, 0.6]
    )
