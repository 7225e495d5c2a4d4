"""Motions and edits of stickers: what a generator draws is right, and what is wrong scores so."""

import pytest
import torch

from flowrl import rewards
from flowrl.data.prompts import load_prompts
from flowrl.scenes.grammar import MOTIONS
from flowrl.scenes.stickers import edits, motions
from flowrl.scenes.stickers.scenes import render
from flowrl.types import MediaContext

MOTION, EDIT = rewards.load("stickers_motion"), rewards.load("stickers_edit")


def video(prompt, seed=0, number=6):
    return torch.stack([render(s) for s in motions.frames(prompt, seed, number)])[None]


def parts(reward, media, prompt, source=None):
    context = None if source is None else MediaContext(source=source)
    return {k: v.item() for k, v in reward.parts(media, [prompt], context).items()}


@pytest.mark.parametrize("verb", MOTIONS)
def test_every_motion_is_read_from_its_video_and_not_from_a_still_or_from_one_reversed(verb):
    prompt = f"a fox {verb}"
    media = video(prompt)
    assert parts(MOTION, media, prompt)["strict"] == 1 == MOTION(media, [prompt]).item()
    for wrong in (media.flip(1), media[:, -1:].expand_as(media), media[:, :1].expand_as(media)):
        assert parts(MOTION, wrong, prompt) | {"partial": 0, "strict": 0} == parts(
            MOTION, wrong, prompt
        )


def test_two_objects_move_together():
    media = video("two tacos move right on a pink background", seed=2)
    assert parts(MOTION, media, "two tacos move right on a pink background")["strict"] == 1
    assert parts(MOTION, media, "two tacos move right on a blue background")["persistence"] == 0
    assert parts(MOTION, media, "a taco moves right")["number"] == 0
    assert parts(MOTION, media, "two tacos move down")["direction"] == 0


def test_an_object_that_becomes_another_or_is_lost_costs_its_share_of_frames():
    """3 of 6 frames are those of a cat; 2 of 6 are empty."""
    fox, cat = video("a fox moves left"), video("a cat moves left")
    turned = parts(MOTION, torch.cat([fox[:, :3], cat[:, 3:]], 1), "a fox moves left")
    assert turned["persistence"] == pytest.approx(3 / 6) and turned["strict"] == 0
    lost = fox.clone()
    lost[:, 2:4] = 1
    assert parts(MOTION, lost, "a fox moves left")["number"] == pytest.approx(4 / 6)


def edited(instruction, seed=0):
    return [render(s)[None] for s in edits.pair(instruction, seed)]


EDITS = [
    "replace the cat with a taco",
    "remove the cat",
    "make the background blue",
    "move the cat left",
    "move the cat down",
]


@pytest.mark.parametrize("instruction", EDITS)
def test_an_edit_is_right_and_a_copy_of_its_source_scores_zero(instruction):
    source, target = edited(instruction)
    whole = {"partial": 1.0, "strict": 1.0, "changed": 1.0, "kept": 1.0}
    assert parts(EDIT, target, instruction, source) == whole
    copy = parts(EDIT, source, instruction, source)
    assert copy["changed"] == copy["partial"] == copy["strict"] == 0
    assert EDIT(source, [instruction], MediaContext(source=source)).item() == 0


@pytest.mark.parametrize("instruction", EDITS)
def test_an_empty_picture_keeps_nothing(instruction):
    source, _ = edited(instruction)
    assert parts(EDIT, torch.ones_like(source), instruction, source)["partial"] == 0


def test_what_should_stay_is_counted_apart_from_what_should_change():
    """Replaced, but on another background: changed 1, kept 0; gone without a new object: a half."""
    source, target = edited("replace the cat with a taco")
    _, removed = edits.pair("replace the cat with a taco", 0)
    blue = "blue" if removed.background != "blue" else "pink"
    from dataclasses import replace

    other = render(replace(removed, background=blue))[None]
    said = parts(EDIT, other, "replace the cat with a taco", source)
    assert (said["changed"], said["kept"], said["partial"]) == (1, 0, 0)
    gone = render(replace(removed, objects=removed.objects[1:]))[None]
    said = parts(EDIT, gone, "replace the cat with a taco", source)
    assert (said["changed"], said["kept"], said["strict"]) == (0.5, 1, 0)


def test_bad_input_is_refused_in_a_sentence():
    still = torch.ones(1, 1, 3, 64, 64)
    with pytest.raises(ValueError, match="at least 2 frames, and this video has 1"):
        MOTION(still, ["a fox moves left"])
    with pytest.raises(ValueError, match=r"reads square pictures \(B, 3, S, S\)"):
        MOTION(torch.ones(1, 4, 3, 64, 48), ["a fox moves left"])
    with pytest.raises(ValueError, match='"a fox jumps" is no motion of the stickers world'):
        motions.frames("a fox jumps", 0)
    white = torch.ones(1, 3, 64, 64)
    with pytest.raises(
        ValueError, match='"remove the cat" is about one cat, and its source shows 0'
    ):
        EDIT(white, ["remove the cat"], MediaContext(source=white))
    with pytest.raises(ValueError, match="source"):
        EDIT(white, ["remove the cat"], MediaContext())
    assert "no edit" in (EDIT.complaint({"prompt": "a cat"}) or "")


def test_motions_are_a_list_of_prompts():
    train, held_out = (load_prompts(f"stickers_motion:{part}") for part in ("train", "eval"))
    keys = [{row["combination"] for row in rows} for rows in (train, held_out)]
    assert keys[0] and keys[1] and not keys[0] & keys[1]
    assert MOTION.complaint(train[0]) is None and EDIT.complaint(edits.train_prompts()[0]) is None
