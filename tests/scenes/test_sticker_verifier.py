"""The verifier of stickers reads every render, refuses spoilt ones, and scores what is right."""

import random

import pytest
import torch
import torch.nn.functional as F

from flowrl import rewards
from flowrl.data.prompts import load_prompts
from flowrl.scenes.grammar import Picture, Thing, read
from flowrl.scenes.stickers import prompts, verify
from flowrl.scenes.stickers.prompts import WORLD, scene
from flowrl.scenes.stickers.scenes import (
    BACKGROUNDS,
    OBJECTS,
    SIZES,
    render,
)
from flowrl.scenes.world import Placed, Scene
from flowrl.shapes.scenes import Object
from flowrl.shapes.scenes import render as render_shapes


def drawn(count, seed=0):
    """(sentence, scene, picture) of random prompts."""
    rows = random.Random(seed).sample(prompts.all_prompts(), count)
    scenes = [scene(row["prompt"], seed) for row in rows]
    asked = [read(row["prompt"], WORLD, Picture) for row in rows]
    return asked, scenes, torch.stack([render(s) for s in scenes])


def test_every_render_is_read_exactly():
    asked, scenes, pictures = drawn(120)
    for sentence, truth, found in zip(asked, scenes, verify.detect(pictures), strict=True):
        assert verify.strict(found, sentence) and found.background == truth.background
        places = {(o.name, o.x, o.y, o.size) for o in truth.objects}
        assert {(o.name, o.x, o.y, o.size) for o in found.objects} == places


@pytest.mark.parametrize("background", ["white", "yellow"])
def test_every_object_is_told_from_every_other_at_the_smallest_and_largest_size(background):
    for size in (SIZES[0], SIZES[-1]):
        scenes = [Scene((Placed(n, 30.0, 33.0, size),), background) for n in OBJECTS]
        found = verify.detect(torch.stack([render(s) for s in scenes]))
        assert [[(o.name, o.size) for o in f.objects] for f in found] == [
            [(name, size)] for name in OBJECTS
        ]


SYMMETRIC = ("cat", "frog", "panda", "robot")  # almost their own mirror images


def alone():
    """Names, pictures and backgrounds of one object each."""
    names = [name for name in OBJECTS if name not in SYMMETRIC]
    scenes = [
        Scene((Placed(name, 32.0, 32.0, 18 + i % 11),), list(BACKGROUNDS)[i % 6])
        for i, name in enumerate(names)
    ]
    pictures = torch.stack([render(s) for s in scenes])
    colors = torch.tensor([BACKGROUNDS[s.background] for s in scenes])[:, :, None, None]
    return names, pictures, colors.expand_as(pictures)


def half(pictures, colors):
    return torch.cat([pictures[..., :32], colors[..., 32:]], -1)


SPOILT = {
    "blurred": lambda p, c: F.avg_pool2d(p, 3, 1, 1, count_include_pad=False),
    "pale": lambda p, c: c + 0.6 * (p - c),
    "halved": half,
    "mirrored": lambda p, c: p.flip(-1),
    # the other object covers a part of this one, on the same background
    "merged": lambda p, c: torch.where(
        (p.roll(9, -1) - c).abs().amax(1, keepdim=True) > 0.02, p.roll(9, -1), p
    ),
    "noisy": lambda p, c: (
        p + 0.15 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_picture_is_refused(how):
    names, pictures, colors = alone()
    spoilt = SPOILT[how](pictures, colors)
    accepted = [
        name
        for name, found in zip(names, verify.detect(spoilt), strict=True)
        if verify.strict(found, Picture((Thing(name),)))
    ]
    assert not accepted


def test_a_little_noise_and_a_larger_picture_are_read():
    asked, _, pictures = drawn(40, seed=1)
    noise = torch.randn(pictures.shape, generator=torch.Generator().manual_seed(0))
    larger = F.interpolate(pictures, scale_factor=2, mode="nearest")
    for some in (pictures + 0.03 * noise, larger):
        assert all(map(verify.strict, verify.detect(some), asked))


def test_an_extra_speck_or_another_background_is_not_strictly_right():
    picture = render(Scene((Placed("cat", 20.0, 20.0, 20),)))
    asked = Picture((Thing("cat"),))
    speck = picture.clone()
    speck[:, 50:53, 50:53] = 0
    grey = picture.where(picture.amin(0) < 0.99, torch.tensor(0.5))
    first, second, third = verify.detect(torch.stack([picture, speck, grey]))
    assert verify.strict(first, asked) and first.background == "white"
    assert not verify.strict(second, asked) and verify.partial(second, asked) == 1
    assert not verify.strict(third, asked) and third.background is None


TERMS = [  # prompt, what is there, score by hand
    ("two tacos", "two tacos", 1.0),
    ("two tacos", "a taco", 0.5),
    ("two tacos", "three tacos", 0.5),
    ("two tacos", "four tacos", 0.0),
    ("a cat left of a pizza", "a cat right of a pizza", 2 / 3),
    ("a cat left of a pizza", "a cat", 1 / 3),
    ("a cat and a pizza", "a pizza below a cat", 1.0),
    ("a cat on a blue background", "a cat", 0.5),
    ("a cat on a blue background", "a dog on a blue background", 0.5),
]


@pytest.mark.parametrize(("prompt", "shown", "score"), TERMS)
def test_partial_credit_is_the_mean_of_the_terms(prompt, shown, score):
    reward = rewards.load("stickers", reading="partial")
    media = render(scene(shown, 3))[None]
    assert reward(media, [prompt]).item() == pytest.approx(score)
    strict = rewards.load("stickers", reading="strict")
    assert strict(media, [prompt]).item() == float(score == 1.0)


def test_prompts_are_split_by_combination_and_their_scenes_are_functions_of_the_seed():
    train, held_out = (load_prompts(f"stickers:{part}") for part in ("train", "eval"))
    keys = [{(row["task"], row["combination"]) for row in rows} for rows in (train, held_out)]
    assert not keys[0] & keys[1] and {row["task"] for row in held_out} == set(prompts.SHARES)
    assert scene("two tacos", 5) == scene("two tacos", 5) != scene("two tacos", 6)


def test_bad_input_is_refused_in_a_sentence():
    reward = rewards.load("stickers")
    assert "has no word" in (reward.complaint({"prompt": "a red circle"}) or "")
    assert reward.complaint({"prompt": "an octopus"}) is None
    circle = render_shapes([Object("circle", "red", 20, 20, 10)])[None]  # of another world
    assert reward(circle, ["an apple"]).item() == 0
    with pytest.raises(
        ValueError, match=r"reads square pictures \(B, 3, S, S\), not \(1, 3, 64, 32"
    ):
        reward(torch.ones(1, 3, 64, 32), ["an octopus"])
