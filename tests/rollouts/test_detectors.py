"""Detectors of a hacked reward, on planted media."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from flowrl.rewards import load_set
from flowrl.rollouts.detectors import Detectors, diversity, features
from flowrl.rollouts.scorer import Scorer
from flowrl.runtime.ledger import Ledger
from flowrl.samplers import keys
from flowrl.training.watch.drift import base_of, drift
from flowrl.types import PromptBatch

SIDE = 64
TWO = torch.tensor([0, 0, 1, 1])
ALL = ("sharpness", "saturation", "tiling", "diversity", "drift")


def noise(count, name="media"):
    """Pictures of independent pixels, in [0, 1]."""
    found = keys.gaussian(keys.key(torch.arange(count), name), (3, SIDE, SIDE))
    return (0.5 + 0.2 * found).clamp(0, 1)


def read(media, *names, group=TWO):
    return Detectors(names)(media, group)


def test_a_blurred_picture_is_less_sharp_and_a_grey_one_less_saturated():
    media = noise(4)
    blurred = F.avg_pool2d(media, 5, 1, padding=2)
    grey = media.mean(1, keepdim=True).expand_as(media)
    assert (read(blurred, "sharpness")["sharpness"] < read(media, "sharpness")["sharpness"]).all()
    assert read(media, "saturation")["saturation"].min() > 0.2
    assert torch.equal(read(grey, "saturation")["saturation"], torch.zeros(4))


def test_tiled_media_tile():
    tile = noise(4)[:, :, :16, :16]
    tiled = tile.repeat(1, 1, SIDE // 16, SIDE // 16)
    assert read(tiled, "tiling")["tiling"].min() > 0.9
    assert read(noise(4), "tiling")["tiling"].max() < 0.5


def test_diversity_is_the_mean_distance_within_groups():
    """Black, white and black in one group: white is 1 from both, black 0 and 1 from the others. A
    group of equal pictures has none, and one alone no number."""
    flat = torch.tensor([0.0, 1.0, 0.0, 0.3, 0.3, 0.9])[:, None, None, None]
    found = diversity(flat.expand(-1, 3, SIDE, SIDE), torch.tensor([7, 7, 7, 2, 2, 9]))
    assert found[:5].tolist() == pytest.approx([0.5, 1, 0.5, 0, 0]) and found[5].isnan()


def test_features_are_colours_and_contrasts_of_cells():
    """A picture whose upper left quarter is half black, half red: four cells, mean 1/2 and standard
    deviation 1/2 of red, and none of the others."""
    media = torch.zeros(1, 3, 8, 8)
    media[0, 0, :4, :4:2] = 1
    found = features(media).view(2, 3, 4, 4)
    expected = torch.zeros(4, 4)
    expected[:2, :2] = 0.5
    assert torch.allclose(found[0, 0], expected) and torch.allclose(found[1, 0], expected)
    assert not found[:, 1:].any()


def test_drift_is_the_distance_of_means_in_standard_deviations():
    """One feature, -1 and 1 in each of two groups: variance 1, means of groups equal, so that
    chance explains nothing. Moved by 3 it has drifted by 3 (but for half a level of 255)."""
    values = torch.tensor([[-1.0], [1.0], [-1.0], [1.0]])
    base = base_of(values, TWO)
    assert base == {"mean": [0.0], "variance": [1.0], "chance": [0.0]}
    assert drift(values, TWO, base) == 0
    assert drift(values + 3, TWO, base) == pytest.approx(3, rel=1e-4)


def test_drift_leaves_out_what_other_prompts_explain():
    """Groups whose means jitter: other prompts of the same kind drift little, where without the
    correction the means of eight groups would differ by about sqrt(2 / 8) = 0.5."""

    def sampled(name):
        centres = keys.gaussian(keys.key(torch.arange(8), name), (40,))
        return centres.repeat_interleave(4, 0)

    group = torch.arange(8).repeat_interleave(4)
    base = base_of(sampled("first"), group)
    assert drift(sampled("second"), group, base) < 0.3
    assert drift(sampled("second") + 1, group, base) > 0.8


def test_drift_and_diversity_of_what_failed():
    values = torch.tensor([[math.nan], [1.0]])
    assert base_of(values[:1], TWO[:1]) == {} and drift(values, TWO[:2], {}) == 0
    media = noise(4)
    media[0, 0, 0, 0] = math.nan
    found = read(media, *ALL)
    assert all(bool(value[0].isnan().all()) for value in found.values())
    # the other member of the group is alone now
    assert found["diversity"][1].isnan() and found["diversity"][2:].isfinite().all()
    assert torch.equal(
        found["sharpness"][1:], read(media[1:], "sharpness", group=TWO[1:])["sharpness"]
    )


def test_videos_are_means_over_frames():
    media = noise(8).view(4, 2, 3, SIDE, SIDE)
    found = read(media, *ALL)
    frames = read(media.flatten(0, 1), *ALL, group=TWO.repeat_interleave(2))
    for name in ("sharpness", "saturation", "drift"):
        own = frames[name].view(4, 2, *frames[name].shape[1:]).mean(1)
        assert torch.allclose(found[name], own, atol=1e-6)
    assert found["diversity"].shape == (4,)


def test_media_that_are_no_pictures_are_refused():
    with pytest.raises(ValueError, match=r"drift read pictures or videos.*\(5, 2\)"):
        read(torch.zeros(4, 5, 2), "drift")


@pytest.mark.parametrize("chunk", [3, 16])
def test_the_scorer_shows_detectors_whole_groups_in_order(chunk):
    """Chunks that cut groups change nothing."""
    media, group = noise(8), torch.arange(2).repeat_interleave(4)
    rewards = replace(load_set({"jpeg": 1.0}), detectors=Detectors(ALL))
    batch = PromptBatch(text=["a", "b"], ids=torch.arange(2), meta=[{}, {}])
    scorer = Scorer(rewards, Ledger(torch.device("cpu")))
    for rows in torch.arange(8).split(chunk):
        scorer.add(media[rows], batch, group[rows])
    scorer.finish_groups()
    found, whole = scorer.scores().seen, Detectors(ALL)(media, group)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
