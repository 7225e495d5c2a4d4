"""Edits of stickers: what should change is told from what should not, and sources are pictures."""

import json
from dataclasses import replace

import pytest
import torch

from flowrl import rewards
from flowrl.data import conditions
from flowrl.data.media import from_pil
from flowrl.data.prompts import load_prompts, meta_rows
from flowrl.scenes import edits
from flowrl.scenes.stickers.scenes import render
from flowrl.scenes.stickers.world import EDITS as WORLD
from flowrl.scenes.world import Placed, Scene
from flowrl.shapes.scenes import Object
from flowrl.shapes.scenes import render as render_shapes
from flowrl.types import MediaContext

REWARD = rewards.load("stickers_edit")
EDITS = [
    "replace the cat with a taco",
    "remove the cat",
    "make the background blue",
    "move the cat left",
    "move the cat down",
]
CAT, DOG = Placed("cat", 20.0, 20.0, 20), Placed("dog", 46.0, 46.0, 22)
SOURCE = Scene((CAT, DOG), "pink")


def parts(result, instruction, source=SOURCE):
    """Named parts of a verdict on a result; both pictures are scenes or tensors."""
    shown = [p if isinstance(p, torch.Tensor) else render(p)[None] for p in (source, result)]
    found = REWARD.parts(shown[1], [instruction], MediaContext(source=shown[0]))
    return {name: values.item() for name, values in found.items()}


@pytest.mark.parametrize("instruction", EDITS)
def test_an_edit_is_right_and_its_source_and_other_pictures_score_zero(instruction):
    source, target = WORLD.pair(instruction, 0)
    whole = {"partial": 1.0, "strict": 1.0, "changed": 1.0, "kept": 1.0}
    assert parts(target, instruction, source) == whole
    copy = parts(source, instruction, source)
    assert copy["changed"] == copy["partial"] == copy["strict"] == 0 and copy["kept"] > 0
    others = [torch.ones(1, 3, 64, 64), torch.rand(1, 3, 64, 64), WORLD.pair(instruction, 1)[1]]
    others.append(render_shapes([Object("circle", "red", 20, 20, 10)])[None])
    for other in others:
        assert parts(other, instruction, source)["partial"] == 0


MOVED = replace(CAT, x=32.0)
TACO = replace(CAT, name="taco")
VERDICTS = [  # instruction, objects of the result, its background, changed, kept by hand
    ("replace the cat with a taco", (TACO, DOG), "blue", 1, 0),
    ("replace the cat with a taco", (DOG,), "pink", 0.5, 1),
    ("replace the cat with a taco", (TACO,), "pink", 1, 0),
    ("replace the cat with a taco", (replace(TACO, y=48.0), DOG), "pink", 0.5, 0.5),
    ("remove the cat", (DOG, replace(CAT, name="fox")), "pink", 1, 0.5),
    ("remove the cat", (replace(DOG, x=40.0),), "pink", 1, 0),
    ("make the background blue", (CAT, DOG), "green", 0, 1),
    ("make the background blue", (CAT,), "blue", 1, 0.5),
    ("move the cat right", (MOVED, DOG), "pink", 1, 1),
    ("move the cat right", (replace(CAT, x=25.0), DOG), "pink", 0, 1),
    ("move the cat right", (replace(MOVED, size=26), DOG), "pink", 0, 1),
    ("move the cat down", (MOVED, DOG), "pink", 0, 1),
    ("move the cat right", (DOG,), "pink", 0, 1),
    ("move the cat right", (MOVED, DOG, replace(CAT, y=50.0, size=18)), "pink", 0, 1 / 3),
]


@pytest.mark.parametrize(("instruction", "objects", "background", "changed", "kept"), VERDICTS)
def test_what_should_stay_is_counted_apart_from_what_should_change(
    instruction, objects, background, changed, kept
):
    found = parts(Scene(objects, background), instruction)
    assert (found["changed"], found["kept"]) == pytest.approx((changed, kept))
    assert found["partial"] == pytest.approx(changed * kept)
    assert found["strict"] == float(changed == kept == 1)


def test_prompts_bring_their_sources_as_conditions():
    train, held_out = (load_prompts(f"stickers_edit:{part}") for part in ("train", "eval"))
    asked = [
        {r["combination"] for r in rows if r["task"] != "background"} for rows in (train, held_out)
    ]
    assert not asked[0] & asked[1] and {row["task"] for row in held_out} == set(edits.SHARES)
    conditions.check_alike(train + held_out)
    assert conditions.has_source(train + held_out)
    sources = {row["image"].tobytes() for row in train}
    assert not sources & {row["image"].tobytes() for row in held_out}
    some = train[::8]
    media = torch.cat([from_pil(row["image"]) for row in some])
    texts, context = meta_rows(some, list(range(len(some))), media)
    assert bool((REWARD(media, texts, context) == 0).all())


def test_a_prompt_file_with_pictures_does_the_same(tmp_path):
    source, target = WORLD.pair(EDITS[0], 0)
    row = {"prompt": EDITS[0], "image": "source.png"}
    WORLD.picture(source).save(tmp_path / "source.png")
    (tmp_path / "edits.jsonl").write_text(json.dumps(row) + "\n")
    media = torch.stack([render(target), render(source)])
    texts, context = meta_rows(load_prompts(str(tmp_path / "edits.jsonl")), [0, 0], media)
    assert REWARD(media, texts, context).tolist() == [1, 0]


def test_bad_input_is_refused_in_a_sentence():
    with pytest.raises(
        ValueError, match='"remove the fox" is about one fox, and its source shows 0'
    ):
        parts(SOURCE, "remove the fox")
    twice = Scene((CAT, replace(DOG, name="cat")))
    with pytest.raises(ValueError, match="its source shows 2; give a picture with exactly one"):
        parts(twice, "remove the cat", twice)
    shapes = render_shapes([Object("circle", "red", 20, 20, 10)])[None]
    with pytest.raises(ValueError, match="has a source that is no picture of the stickers world"):
        parts(SOURCE, "remove the cat", shapes)
    with pytest.raises(ValueError, match="source"):
        REWARD(render(SOURCE)[None], ["remove the cat"], MediaContext())
    with pytest.raises(
        ValueError, match='the stickers world has no word "kar"; did you mean "car"'
    ):
        WORLD.pair("remove the kar", 0)
    assert "no edit" in (REWARD.complaint({"prompt": "a cat"}) or "")
