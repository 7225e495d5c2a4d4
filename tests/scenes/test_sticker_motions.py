"""Motions of stickers: what a generator draws is right, and what is wrong scores so."""

import pytest
import torch

from flowrl import rewards
from flowrl.data.prompts import load_prompts
from flowrl.scenes import motions
from flowrl.scenes.grammar import MOTIONS, Motion, Thing
from flowrl.scenes.stickers.scenes import render
from flowrl.scenes.stickers.world import MOTIONS as WORLD
from flowrl.scenes.world import Placed, Scene, truth

REWARD = rewards.load("stickers_motion")
FOX = Motion(Thing("fox"), "moves right")


def video(prompt, seed=0, number=6):
    return torch.stack([render(s) for s in WORLD.frames(prompt, seed, number)])[None]


def parts(media, prompt):
    return {name: values.item() for name, values in REWARD.parts(media, [prompt]).items()}


def judged(motion, *frames):
    """The verdict on scenes, of which each is a list of (x, size) of foxes."""
    scenes = [Scene(tuple(Placed("fox", x, 32.0, s) for x, s in row)) for row in frames]
    return motions.verdict([truth(scene) for scene in scenes], motion)


@pytest.mark.parametrize("verb", MOTIONS)
def test_a_motion_is_read_from_its_video_and_from_none_that_is_still_or_reversed(verb):
    prompt = f"a fox {verb}"
    media = video(prompt)
    assert parts(media, prompt)["strict"] == 1 == REWARD(media, [prompt]).item()
    first, last = media[:, :1].expand_as(media), media[:, -1:].expand_as(media)
    for wrong in (media.flip(1), first, last, torch.ones_like(media), torch.rand(media.shape)):
        assert REWARD(wrong, [prompt]).item() == 0


def test_two_objects_move_together():
    media = video("two tacos move right on a pink background", seed=2)
    assert parts(media, "two tacos move right on a pink background")["strict"] == 1
    assert parts(media, "two tacos move right on a blue background")["persistence"] == 0
    assert parts(media, "two tacos move right")["strict"] == 1
    assert parts(media, "a taco moves right")["number"] == 0
    assert parts(media, "two tacos move down")["direction"] == 0


def test_direction_is_the_way_over_its_length_and_less_where_it_is_short_or_a_jump():
    """Three steps of 4 px to the right and one of 2 px back are 10 of 14. Of the 8 px that count in
    full, 4 px are a half, and so is one jump of 20 px. A size steps back by a pixel for nothing,
    and by two for one; 2 px of growth are two thirds."""
    places = [(20.0, 20)], [(24.0, 20)], [(28.0, 20)], [(32.0, 20)], [(30.0, 20)]
    back = judged(FOX, *places)
    assert back["direction"] == pytest.approx(10 / 14) and back["strict"] == 0
    assert judged(FOX, *places[:4])["strict"] == 1
    assert judged(FOX, places[0], places[0], places[1])["direction"] == pytest.approx(1 / 2)
    assert judged(FOX, places[0], places[0], [(40.0, 20)])["direction"] == pytest.approx(1 / 2)
    grows = Motion(Thing("fox"), "grows")
    sizes = [(20.0, 20)], [(20.0, 21)], [(20.0, 22)], [(20.0, 24)]
    assert judged(grows, *sizes[:3])["direction"] == pytest.approx(2 / 3)
    assert judged(grows, *sizes)["strict"] == 1
    for px, direction in ((1, 1), (2, 4 / 6 * 2 / 3)):  # 2 px count in full of 3
        stepped = (*sizes[:1], sizes[2], [(20.0, 22 - px)], sizes[3])
        assert judged(grows, *stepped)["direction"] == pytest.approx(direction)
    flickers = sizes[0], sizes[1], sizes[0], sizes[1]
    assert judged(grows, *flickers)["direction"] == pytest.approx(1 / 3)


def test_an_object_that_becomes_another_or_is_lost_costs_its_share_of_frames():
    """3 of 6 frames are those of a cat; 2 of 6 are empty."""
    fox, cat = video("a fox moves left"), video("a cat moves left")
    turned = parts(torch.cat([fox[:, :3], cat[:, 3:]], 1), "a fox moves left")
    assert turned["persistence"] == pytest.approx(3 / 6) and turned["strict"] == 0
    lost = fox.clone()
    lost[:, 2:4] = 1
    assert parts(lost, "a fox moves left")["number"] == pytest.approx(4 / 6)


def test_objects_appear_once_and_together():
    """One of two foxes alone is a wrong number in 1 of 3 frames."""
    two, one = [(15.0, 20), (45.0, 20)], [(15.0, 20)]
    appear = Motion(Thing("fox", 2), "appears")
    assert judged(appear, [], two, two)["partial"] == 1
    assert judged(appear, [], one, two)["number"] == pytest.approx(2 / 3)
    assert judged(appear, [], two, [], two)["direction"] == 0
    assert judged(Motion(Thing("fox", 2), "disappears"), two, [], [])["strict"] == 1


def test_bad_input_is_refused_in_a_sentence():
    white = torch.ones(1, 4, 3, 64, 64)
    with pytest.raises(ValueError, match="takes at least 3 frames, and the video has 1"):
        REWARD(white[:, :1], ["a fox moves left"])
    with pytest.raises(ValueError, match="takes at least 3 frames, not 2"):
        WORLD.frames("a fox moves left", 0, 2)
    with pytest.raises(
        ValueError, match=r"reads square pictures \(B, 3, S, S\), not \(4, 3, 64, 4"
    ):
        REWARD(white[..., :48], ["a fox moves left"])
    with pytest.raises(ValueError, match='"a fox jumps" is no motion of the stickers world'):
        WORLD.frames("a fox jumps", 0)
    assert "no motion" in (REWARD.complaint({"prompt": "a fox left of a cat"}) or "")


def test_motions_are_lists_of_prompts():
    train, held_out = (load_prompts(f"stickers_motion:{part}") for part in ("train", "eval"))
    keys = [{row["combination"] for row in rows} for rows in (train, held_out)]
    assert not keys[0] & keys[1] and {row["task"] for row in held_out} == set(MOTIONS)
    assert all(REWARD.complaint(row) is None for row in train)
    scenes = WORLD.frames(train[0]["prompt"], 3)
    assert len(scenes) == 9 and scenes == WORLD.frames(train[0]["prompt"], 3)
