"""Edits and motions of coloured shapes: what is drawn is right, and what is wrong is refused."""

import logging
from dataclasses import replace

import pytest
import torch

from flowrl import rewards
from flowrl.data.prompts import load_prompts
from flowrl.scenes.grammar import MOTIONS as VERBS
from flowrl.scenes.shapes import EDITS, MOTIONS, SHAPES, detect, render
from flowrl.scenes.stickers.scenes import BACKGROUNDS
from flowrl.scenes.world import Placed, Scene, truth
from flowrl.shapes import verify
from flowrl.shapes.scenes import COLORS
from flowrl.types import MediaContext

EDIT, MOTION = rewards.load("shapes_edit"), rewards.load("shapes_motion")
CIRCLE, SQUARE = Placed("red circle", 16.0, 16.0, 16), Placed("blue square", 44.0, 46.0, 14)


def drawn(*scenes):
    return torch.stack([render(scene) for scene in scenes])


def edited(source, result, instruction):
    found = EDIT.parts(drawn(result), [instruction], MediaContext(source=drawn(source)))
    return {name: values.item() for name, values in found.items()}


def test_a_scene_is_found_as_it_was_drawn():
    scene = Scene((CIRCLE, SQUARE, Placed("black triangle", 47.0, 14.0, 18)))
    (found,) = detect(drawn(scene))
    assert found.background == "white" and found.known()
    places = sorted((o.name, o.x, o.y, o.size) for o in found.objects)
    assert places == [
        (o.name, pytest.approx(o.x, abs=1), pytest.approx(o.y, abs=1), pytest.approx(o.size, abs=1))
        for o in sorted(truth(scene).objects, key=lambda o: o.name)
    ]


def test_what_is_pale_is_not_gone_and_a_grey_ground_is_no_white_one():
    """0.4 of the ink is below what counts as an object."""
    both, alone = drawn(Scene((CIRCLE, SQUARE)), Scene((SQUARE,)))
    assert not detect(torch.lerp(alone, both, 0.4)[None])[0].known()
    assert not detect(0.7 * alone[None])[0].known() and detect(alone[None])[0].known()


@pytest.mark.parametrize(
    ("instruction", "result", "changed", "kept"),
    [
        ("replace the red circle with a green triangle", "green triangle", 1, 1),
        ("replace the red circle with a blue circle", "blue circle", 1, 1),
        ("replace the red circle with a blue circle", "red circle", 0, 1 / 2),
        ("replace the red circle with a blue circle", "black circle", 1 / 2, 1 / 2),
        ("remove the red circle", None, 1, 1),
        ("remove the red circle", "red circle", 0, 1 / 2),
        ("move the red circle down", (0, 12), 1, 1),
        ("move the red circle right", (12, 0), 1, 1),
        ("move the red circle right", (0, 12), 0, 1),
    ],
)
def test_edits_are_judged_by_what_changed_and_what_did_not(instruction, result, changed, kept):
    own = ()
    if isinstance(result, str):
        own = (replace(CIRCLE, name=result),)
    elif result:
        own = (replace(CIRCLE, x=CIRCLE.x + result[0], y=CIRCLE.y + result[1]),)
    found = edited(Scene((CIRCLE, SQUARE)), Scene((*own, SQUARE)), instruction)
    assert (found["changed"], found["kept"]) == (changed, kept)
    assert found["partial"] == changed * kept and found["strict"] == (changed == kept == 1)


def test_listed_edits_are_right_as_drawn_and_a_copy_scores_zero():
    rows = EDITS.all_prompts()[::40]
    for number, row in enumerate(rows):
        source, target = EDITS.pair(row["prompt"], number)
        assert edited(source, target, row["prompt"])["strict"] == 1
        assert edited(source, source, row["prompt"])["partial"] == 0
    train, held_out = (load_prompts(f"shapes_edit:{part}") for part in ("train", "eval"))
    asked = [{row["combination"] for row in rows} for rows in (train, held_out)]
    assert not asked[0] & asked[1] and all(row["image"].size == (64, 64) for row in held_out)
    assert {row["task"] for row in held_out} == {"replace", "remove", "move"}


@pytest.mark.parametrize("verb", VERBS)
def test_a_motion_is_right_as_drawn_and_a_still_or_reversed_one_is_not(verb):
    media = drawn(*MOTIONS.frames(f"a red circle {verb}", 0, 6))[None]
    right = MOTION.parts(media, [f"a red circle {verb}"])
    assert right["strict"].item() == 1 == MOTION(media, [f"a red circle {verb}"]).item()
    for wrong in (media.flip(1), media[:, :1].expand_as(media)):
        assert MOTION(wrong, [f"a red circle {verb}"]).item() == 0
    other = MOTION.parts(media, [f"a red square {verb}"])
    assert other["persistence"] < 1 and other["strict"] == 0


def rounded(x, y):
    """A red square of 16 px whose corners are so round that it is a little more a circle."""
    place = torch.arange(64) + 0.5
    u, v = (place - x) / 8, (place[:, None] - y) / 8
    red = torch.tensor(COLORS["red"])[:, None, None]
    return torch.where(u.abs() ** 3 + v.abs() ** 3 <= 1, red, 1.0)


def test_a_margin_says_by_how_much_an_outline_is_a_shape():
    for number, shape in enumerate(verify.SHAPES):
        picture = render(Scene((Placed(f"red {shape}", 30.0, 30.0, 16),)))
        ((found,),) = verify.detect(picture[None])
        others = found.margins[:number] + found.margins[number + 1 :]
        assert found.shape == shape and found.margins[number] > 0.05 and max(others) < -0.05
    ((between,),) = verify.detect(rounded(30.0, 30.0)[None])
    circle, square, triangle = between.margins
    assert 0 < circle < verify.SLACK and square == pytest.approx(-circle) and triangle < -0.2
    oblong = torch.ones(1, 3, 64, 64)
    oblong[:, 1:, 20:31, 10:26] = 0  # 11 x 16 px of red
    ((found,),) = verify.detect(oblong)
    assert found.shape is None and found.like == ("square",)
    assert found.margins[1] == pytest.approx(11 / 16 - verify.SQUARENESS)


def test_an_outline_between_two_shapes_counts_where_most_frames_are_clear():
    """3 of 9 frames may show nearly a square, 4 may not, and a circle is none."""
    centers = [(12.0 + 5 * i, 30.0) for i in range(9)]
    (between,) = detect(rounded(*centers[0])[None])[0].objects
    assert (between.name, set(between.like)) == ("red circle", {"red circle", "red square"})
    clear = drawn(*[Scene((Placed("red square", *at, 16),)) for at in centers])
    for count in (3, 4):
        video = clear.clone()
        video[2 : 2 + count] = torch.stack([rounded(*at) for at in centers[2 : 2 + count]])
        read = MOTION.parts(video[None], ["a red square moves right"])
        assert read["strict"].item() == (count == 3)
        assert read["persistence"].item() == pytest.approx(1 if count == 3 else 5 / 9)
    clear[4] = render(Scene((Placed("red circle", *centers[4], 16),)))
    read = MOTION.parts(clear[None], ["a red square moves right"])
    assert read["strict"].item() == 0 and read["persistence"].item() == pytest.approx(8 / 9)


def test_bad_input_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match='the shapes world has no word "pink"'):
        EDITS.pair("remove the pink circle", 0)
    with pytest.raises(ValueError, match="is no motion of the shapes world; write it like"):
        MOTIONS.frames("a red circle jumps", 0)
    with pytest.raises(ValueError, match="its source shows 0; give a picture with exactly one"):
        edited(Scene((SQUARE,)), Scene(()), "remove the red circle")
    grey = MediaContext(source=0.7 * drawn(Scene((CIRCLE, SQUARE))))
    with pytest.raises(ValueError, match="a source that is no picture of the shapes world"):
        EDIT.parts(drawn(Scene(())), ["remove the red circle"], grey)
    assert "no edit" in (EDIT.complaint({"prompt": "a red circle left of a blue square"}) or "")
    assert SHAPES.language.backgrounds == ()


PLAIN = torch.tensor([*BACKGROUNDS.values()])


@pytest.mark.parametrize(
    ("name", "own", "context"),
    [
        ("shapes", "a red circle", MediaContext(meta=load_prompts("shapes:eval")[:1] * 3)),
        ("shapes_motion", "a red circle moves left", None),
        (
            "shapes_edit",
            "remove the red circle",
            MediaContext(source=drawn(*3 * [Scene((CIRCLE,))])),
        ),
        ("stickers", "a cat", None),
        ("stickers_motion", "a cat moves left", None),
    ],
)
def test_pictures_of_other_scenes_are_named_once(name, own, context, caplog):
    """Noise is no background; paper is, and so is a scene in which little of it is left."""
    photos = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    paper = torch.ones(3, 3, 64, 64)
    paper[0, :, :, :30] = torch.rand(3, 64, 30)
    if name.startswith("stickers"):
        paper = PLAIN[1:4, :, None, None].expand(-1, -1, 64, 64)
    mixed = torch.cat([photos[:2], paper[:1]])
    reward = rewards.load(name)
    caplog.set_level(logging.WARNING, logger="flowrl")
    for media, said in ((paper, 0), (mixed, 1), (photos, 1)):
        shown = media[:, None].expand(-1, 9, -1, -1, -1) if "motion" in name else media
        scores = reward(shown, [own] * 3, context)
        assert media is not photos or not scores.any()
        assert len(caplog.messages) == said
    assert caplog.messages == [
        f'reward "{name}": 2 of 3 samples are not from its small world, since most of their pixels'
        " show none of its backgrounds; it can judge no others"
    ]
