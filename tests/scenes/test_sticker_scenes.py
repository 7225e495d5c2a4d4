"""The stickers world: its sprites are whole, the renderer draws what it says, and scenes are laid
out as they should be."""

from itertools import combinations
from pathlib import Path

import pytest
import torch

from flowrl.scenes.grammar import RELATIONS
from flowrl.scenes.stickers import scenes
from flowrl.scenes.stickers.scenes import BACKGROUNDS, OBJECTS, SIZES, render, sprites
from flowrl.scenes.world import GAP, MARGIN, PIXELS, Placed, Scene, place


def test_every_object_has_a_picture_of_its_own_that_fills_its_tile():
    """A tile's longer side goes from edge to edge, so at least one pair of opposite edges is
    touched."""
    sheet = sprites(56)
    assert sheet.shape == (len(OBJECTS), 4, 56, 56)
    alpha = sheet[:, 3]
    wide = (alpha[:, :, 0].amax(1) > 0) & (alpha[:, :, -1].amax(1) > 0)
    high = (alpha[:, 0].amax(1) > 0) & (alpha[:, -1].amax(1) > 0)
    assert bool((wide | high).all())
    apart = torch.cdist(sheet.flatten(1), sheet.flatten(1)) / 56
    assert apart.fill_diagonal_(9).min() > 0.3


@pytest.mark.parametrize("size", [18, 23, 28])
def test_a_smaller_sprite_holds_the_mean_colour_of_the_larger_one(size):
    """Downsampling by area keeps the mean: the rows of its matrix sum to 1, its columns to
    size / 56."""
    means = sprites(size).mean((2, 3))
    torch.testing.assert_close(means, sprites(56).mean((2, 3)), atol=1e-5, rtol=0)


def test_a_sticker_is_drawn_over_the_background_at_its_place_and_nowhere_else():
    sprite = sprites(20)[OBJECTS.index("taco")]
    picture = render(Scene((Placed("taco", 30.0, 21.0, 20),), "blue"))
    blue = torch.tensor(BACKGROUNDS["blue"])[:, None, None]
    seen = picture[:, 11:31, 20:40]
    torch.testing.assert_close(seen, blue * (1 - sprite[3]) + sprite[:3], atol=1e-6, rtol=0)
    seen.copy_(blue.expand_as(seen))
    assert torch.equal(picture, blue.expand(3, PIXELS, PIXELS))


def test_a_sticker_that_leaves_the_picture_is_cut_off():
    whole = render(Scene((Placed("fox", 32.0, 32.0, 24),)))
    cut = render(Scene((Placed("fox", 2.0, 60.0, 24),)))
    assert torch.equal(cut[:, 48:, :14], whole[:, 20:36, 30:44])
    assert bool((cut[:, :, 14:] == 1).all())


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_objects_of_a_scene_lie_inside_and_do_not_touch(count):
    generator = torch.Generator().manual_seed(count)
    sizes = set()
    for _ in range(100):
        placed = place(OBJECTS[:count], SIZES, generator)
        assert [o.name for o in placed] == list(OBJECTS[:count])
        sizes |= {o.size for o in placed}
        for o in placed:
            x, y = o.corner
            assert x >= MARGIN and y >= MARGIN and max(x, y) + o.size <= PIXELS - MARGIN
            assert o.x == x + o.size / 2 and o.y == y + o.size / 2
        for a, b in combinations(placed, 2):
            assert max(abs(a.x - b.x), abs(a.y - b.y)) >= GAP + (a.size + b.size) / 2
    assert sizes == set(range(18, {2: 27, 3: 25, 4: 23}.get(count, SIZES[-1] + 1)))


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_relation_holds_between_the_first_two_within_45_degrees(relation):
    generator = torch.Generator().manual_seed(0)
    dx, dy = RELATIONS[relation]
    for _ in range(50):
        a, b = place(("cat", "pizza"), SIZES, generator, relation)
        along = (a.x - b.x) * dx + (a.y - b.y) * dy
        assert along > abs((a.x - b.x) * dy) + abs((a.y - b.y) * dx)


def test_the_same_seed_draws_the_same_scene():
    one, other = (place(("cat", "dog"), SIZES, torch.Generator().manual_seed(7)) for _ in range(2))
    assert one == other


def test_the_notice_names_the_licence_the_source_and_every_picture():
    text = Path(scenes.__file__).with_name("NOTICE").read_text()
    assert "Apache License, Version 2.0" in text and "@iconify-json/noto 1.2.9" in text
    lines = [line.split() for line in text.splitlines() if " U+" in line]
    assert [name for name, _ in lines] == list(OBJECTS)
    assert not any("1F1E6" <= code[2:] <= "1F1FF" for _, code in lines)  # no flag
    assert scenes.SHEET.stat().st_size <= 200_000
