"""The pictures of runs in README and on the pages of models."""

import before_after
import pytest
import torch
from PIL import Image

from flowrl.data.prompts import load_prompts


def test_pairs_are_the_first_that_training_fixed_and_the_first_that_it_did_not():
    before = [False, True, *[False] * 10]
    after = [True, True, False, *[True] * 6, False, False, True]
    texts = list("abcdefghijkl")
    assert before_after.chosen(before, after, texts) == [0, 3, 4, 5, 6, 7, 2, 9]
    # a text is shown once: place 4 has that of place 3, and 9 that of place 2
    texts[4], texts[9] = "d", "c"
    assert before_after.chosen(before, after, texts) == [0, 3, 5, 6, 7, 8, 2, 10]
    assert before_after.chosen([False] * 8, [True] * 8, texts[:8]) is None


@pytest.mark.parametrize(
    ("source", "shape", "frames"),
    [
        ("shapes:eval", (3, 64, 64), 1),
        ("shapes_edit:eval", (3, 64, 64), 1),
        ("shapes_motion:eval", (9, 3, 64, 64), 9),
    ],
)
def test_a_page_shows_pictures_edits_with_their_sources_and_videos_frame_by_frame(
    source, shape, frames
):
    rows = load_prompts(source)[:10]
    both = [(torch.full((10, *shape), value), [value > 0.5] * 10) for value in (0.0, 1.0)]
    pages = before_after.sheets(both, [*range(8)], rows)
    assert len(pages) == frames and all(isinstance(page, Image.Image) for page in pages)
    wide = before_after.sheets(both, [*range(8)], load_prompts("shapes:eval")[:10])[0].width
    assert (pages[0].width > wide) == (source == "shapes_edit:eval")
    colours = {colour for _, colour in pages[0].getcolors(1 << 24)}
    assert {before_after.grids.ACCEPTED, before_after.grids.REFUSED} <= colours
