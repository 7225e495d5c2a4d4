"""Which pairs train_preference.py holds out: prompts that say the same stay on one side."""

import json

import pytest
import train_preference
from PIL import Image

from flowrl.shapes import prompts


def listing(folder, *lines):
    Image.new("RGB", (4, 4)).save(folder / "x.png")
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps({"a": "x.png", "b": "x.png", "ink": 1, **line}) + "\n" for line in lines)
    )
    return folder / "pairs.jsonl"


def test_prompts_of_one_combination_are_held_out_together(tmp_path):
    """Both word orders of 300 prompts of the world; by their texts alone a good part of them would
    be torn apart."""
    world = [p for p in prompts.all_prompts() if p["task"] == "color_attr"][:300]
    pairs = train_preference.read(
        listing(tmp_path, *({key: p[key] for key in ("prompt", "combination")} for p in world))
    )
    assert pairs.aspects == ["ink"] and pairs.prompts == [p["prompt"] for p in world]
    test = {subject for subject in pairs.subjects if train_preference.held_out(subject, 0.2)}
    assert 0 < len(test) < len(set(pairs.subjects)) < len(set(pairs.prompts))
    of_text = {
        side: {
            p["combination"] for p in world if train_preference.held_out(p["prompt"], 0.2) == side
        }
        for side in (True, False)
    }
    torn = of_text[True] & of_text[False]  # what a hash of the text would have shown in training
    assert len(torn) > 20


def test_a_pair_without_a_combination_is_held_out_by_its_prompt(tmp_path):
    pairs = train_preference.read(
        listing(
            tmp_path,
            {"prompt": "a"},
            {"prompt": "b", "combination": None},
            {"prompt": "c", "combination": "a"},
        )
    )
    assert pairs.subjects == ["a", "b", "a"]


def test_a_combination_that_is_no_text_is_named(tmp_path):
    said = r"line 2: combination=\['a', 'b'\] is not a text; give all prompts that say the same"
    with pytest.raises(ValueError, match=said):
        train_preference.read(
            listing(tmp_path, {"prompt": "a"}, {"prompt": "b", "combination": ["a", "b"]})
        )


def test_the_script_writes_the_combination_beside_each_pair_of_shapes(tmp_path, monkeypatch):
    drawn = train_preference.torch.rand(6, 3, 64, 64)
    monkeypatch.setattr(train_preference.flowrl, "load_policy", lambda name: name)
    monkeypatch.setattr(
        train_preference.flowrl, "generate", lambda policy, texts, **settings: drawn[: len(texts)]
    )
    train_preference.main(["shapes", "--work", str(tmp_path), "--prompts", "3"])
    found = train_preference.read(tmp_path / "pairs.jsonl")
    assert found.subjects == [prompts.find(text)["combination"] for text in found.prompts]
    assert len(found.subjects) == 3 * 15
    assert found.aspects == ["alignment", "vivid"]
