"""Drawings of media that are no pictures."""

import pytest
import torch
from PIL import Image

from flowrl.report import grids, plots


def ink(image, box=None):
    """Pixels that are neither paper nor frame."""
    pixels = torch.tensor(list((image.crop(box) if box else image).getdata()))
    return int((pixels.amax(1) - pixels.amin(1) > 40).sum())


def test_a_path_is_drawn_where_it_goes_and_up_is_up():
    time = torch.linspace(0, 1, 9)
    rising = torch.stack([time, time], 1)[None]
    (drawn,) = plots.drawings(rising, 60)
    assert drawn.size == (60, 60)
    assert ink(drawn, (30, 0, 60, 30)) > 20 and ink(drawn, (0, 30, 30, 60)) > 20
    assert ink(drawn, (2, 2, 25, 25)) == 0 == ink(drawn, (35, 35, 58, 58))


def test_all_are_on_one_scale_so_a_smaller_path_is_smaller():
    time = torch.linspace(0, 1, 9)
    path = torch.stack([time, time], 1)
    large, small = plots.drawings(torch.stack([path, path / 4]), 60)
    assert ink(small) < ink(large) / 2
    pair = grids.before_after(path[None], path[None] / 4, ["p"], cell=60)
    assert isinstance(pair, Image.Image)


def test_a_motion_has_a_curve_for_each_joint():
    level = torch.tensor([0.0, 1.0, 2.0]).expand(1, 8, 3)
    (drawn,) = plots.drawings(level, 60)
    rows = [y for y in range(60) if ink(drawn, (10, y, 50, y + 1)) > 20]
    begins = [y for y in rows if y - 1 not in rows]
    assert len(begins) == 3  # three flat lines, apart


def test_values_that_are_not_finite_are_left_out():
    media = torch.full((2, 5, 2), torch.nan)
    media[1] = torch.rand(5, 2)
    empty, drawn = plots.drawings(media, 40)
    assert ink(empty) == 0 < ink(drawn)


@pytest.mark.parametrize(
    ("shape", "known"),
    [
        ((2, 5, 2), True),
        ((2, 24, 66), True),
        ((2, 3, 8, 8), True),
        ((2, 4, 3, 8, 8), True),
        ((2, 7), False),
        ((2, 1, 3), False),
        ((2, 4, 5, 6), False),
        ((0, 5, 2), False),
        ((0,), False),
    ],
)
def test_what_a_grid_can_show(shape, known):
    assert grids.drawable(torch.zeros(shape)) == known
