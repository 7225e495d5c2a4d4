"""The tiny CLIP of the shapes world: stock open_clip loads it, it tells close prompts apart, and
its training script does what it says."""

import importlib.util
import json
import sys
from pathlib import Path

import open_clip
import pytest
import small
import torch
from safetensors.torch import load_file

from flowrl import rewards
from flowrl.shapes import clip, prompts
from flowrl.shapes.scenes import Object, render

SCRIPTS = Path(__file__).parents[2] / "scripts" / "embedded"
# where python scripts/embedded/train_shapes_clip.py finds its neighbour
sys.path.append(str(SCRIPTS))
SPEC = importlib.util.spec_from_file_location("train_shapes_clip", SCRIPTS / "train_shapes_clip.py")
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)

EVERY = prompts.all_prompts()
# Of each task, how often the true prompt is nearer than all its near misses; of each kind of near
# miss, how often it is nearer than one of them. Measured on 200 scenes a task: 1.0, 1.0, 0.90, 1.0,
# 0.68, 1.0; 1.0, 1.0, 0.98, 0.90, 0.94.
FLOORS = {
    "single_object": 0.95,
    "two_object": 0.95,
    "counting": 0.75,
    "colors": 0.95,
    "position": 0.45,
    "color_attr": 0.95,
    "colour": 0.98,
    "shape": 0.98,
    "count": 0.93,
    "relation": 0.8,
    "swap": 0.85,
}


@pytest.fixture(scope="module")
def judge():
    return script.Judge(clip.FOLDER)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return script.Scenes(240, 1, tmp_path_factory.mktemp("scenes"))


def names(found):
    return {kind: [p["prompt"] for p in wrong] for kind, wrong in found.items() if wrong}


# ---------------------------------------------------------------------------
# close prompts


def test_near_misses_of_a_counted_prompt_by_hand():
    assert names(clip.near_misses(prompts.find("three red circles"))) == {
        "colour": [f"three {c} circles" for c in ("green", "blue", "yellow", "purple", "black")],
        "shape": ["three red squares", "three red triangles"],
        "count": ["a red circle", "two red circles", "four red circles"],
    }


def test_near_misses_of_a_relation_by_hand():
    found = names(clip.near_misses(prompts.find("a red circle left of a blue square")))
    assert set(found["relation"]) == {
        f"a red circle {r} a blue square" for r in ("right of", "above", "below")
    }
    assert found["swap"] == ["a blue circle left of a red square"]
    first = {f"a red {shape} left of a blue square" for shape in ("square", "triangle")}
    second = {f"a red circle left of a blue {shape}" for shape in ("circle", "triangle")}
    assert set(found["shape"]) == first | second
    assert len(found["colour"]) == 8 and "a green circle left of a blue square" in found["colour"]


def test_swapped_colours_are_no_near_miss_where_they_say_the_same():
    assert "swap" not in names(clip.near_misses(prompts.find("a red circle and a blue circle")))
    assert names(clip.near_misses(prompts.find("a red circle above a blue circle")))["swap"] == [
        "a blue circle above a red circle"
    ]


def test_no_near_miss_but_a_relation_is_ever_true_of_a_picture_of_its_prompt():
    g = torch.Generator().manual_seed(0)
    for prompt in EVERY[::7]:
        true = {p["prompt"] for p in clip.truths(prompts.scene(prompt, g))}
        assert prompt["prompt"] in true
        found = clip.near_misses(prompt)
        assert not true & {p["prompt"] for kind in found if kind != "relation" for p in found[kind]}
        assert any(found.values())


def test_truths_of_a_scene_by_hand():
    """A red circle up and left of a blue square, nearer to level than to upright: offset 30 by 10,
    12 px wide both."""
    scene = [Object("circle", "red", 15, 25, 6), Object("square", "blue", 45, 35, 6)]
    assert {p["prompt"] for p in clip.truths(scene)} == {
        "a circle and a square",
        "a square and a circle",
        "a red circle and a blue square",
        "a blue square and a red circle",
        "a red circle left of a blue square",
        "a blue square right of a red circle",
    }
    assert [p["prompt"] for p in clip.truths(scene[:1] * 1)] == ["a red circle", "a circle"]


# ---------------------------------------------------------------------------
# training


def test_training_sees_no_held_out_combination(scenes):
    assert not any(prompts.held_out(EVERY[n]) for n in scenes.pool)
    near = (n for kinds in scenes.near_misses.values() for kind in kinds for n in kind)
    assert not any(prompts.held_out(EVERY[n]) for n in near)


def test_every_picture_of_a_batch_shows_its_own_prompt_and_the_table_knows_the_others_it_shows(
    scenes,
):
    x, numbers, true = scenes.batch(8, torch.Generator().manual_seed(0))
    assert (*x.shape, *numbers.shape, *true.shape) == (32, 3, 64, 64, 32, 32, 32)
    assert bool(true.diagonal().all())
    same = numbers[:, None] == numbers[None]
    assert bool(true[same].all()) and bool((~true).any())


def test_worn_pictures_keep_their_range_and_stay_close(scenes):
    x = scenes.images[:64].float() / 255
    worn = script.worn(x, torch.Generator().manual_seed(0))
    assert worn.shape == x.shape and worn.min() >= 0 and worn.max() <= 1
    shown = [script.verify.detect(part) for part in (x, worn)]
    kinds = [[[(o.shape, o.color) for o in objects] for objects in part] for part in shown]
    kept = sum(a == b for a, b in zip(*kinds, strict=True))
    assert not torch.equal(worn, x) and kept / 64 > 0.4


def test_contrast_by_hand_and_without_negatives_that_are_true():
    """Orthogonal pairs, scale 2: each row is log(1 + e^-2); if each text is true of both pictures,
    nothing is left to tell apart."""
    pair, scale, own = torch.eye(2), torch.tensor(2.0), torch.eye(2).bool()
    right, wrong = (script.contrast(pair, x, scale, own).item() for x in (pair, pair.flip(0)))
    assert (right, wrong) == pytest.approx((0.126928, 2.126928), abs=1e-6)
    assert script.contrast(pair, pair, scale, torch.ones(2, 2).bool()).item() == 0.0


def test_roc_area_by_hand():
    value, positive = torch.tensor([0.9, 0.4, 0.5, 0.4]), torch.tensor([True, True, False, False])
    assert script.roc_area(value, positive) == (1 + 1 + 0 + 0.5) / 4


def run(stage, folder, steps):
    words = ["--scenes=120", "--groups=2", "--save=1", f"--steps={steps}"]
    script.main([stage, *words, f"--work={folder}", f"--out={folder / 'out'}"])


def test_training_goes_on_where_it_stopped_and_its_export_is_a_stock_open_clip_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(script, "learning_rate", lambda step, steps, peak, warmup: peak)
    run("train", tmp_path / "whole", 3)
    run("train", tmp_path / "parts", 1)
    run("train", tmp_path / "parts", 3)
    whole, parts = (torch.load(tmp_path / name / "clip.pt")["model"] for name in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    run("export", tmp_path / "whole", 3)
    out = tmp_path / "whole" / "out"
    model = open_clip.create_model(f"local-dir:{out}", require_pretrained=True)
    for key, value in model.state_dict().items():
        assert torch.equal(value, whole[key].half().to(value.dtype)), key
    assert json.loads((out / "provenance.json").read_text())["steps"] == 3


# ---------------------------------------------------------------------------
# what ships


def test_the_embedded_weights_are_small_and_fill_every_key_of_the_stock_model():
    model, _, preprocess = open_clip.create_model_and_transforms(
        clip.SOURCE, require_pretrained=True
    )
    stored, loaded = load_file(clip.FOLDER / "open_clip_model.safetensors"), model.state_dict()
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(value.float(), loaded[key].float()) for key, value in stored.items())
    assert sum(f.stat().st_size for f in clip.FOLDER.rglob("*") if f.is_file()) < 3e6
    assert preprocess.transforms[0].size == 96


def test_the_tokenizer_spends_one_token_on_each_word_of_the_world():
    tokenizer = open_clip.get_tokenizer(clip.SOURCE)
    ids = tokenizer([p["prompt"] for p in EVERY])
    assert ids.shape == (len(EVERY), 16)
    end = ids.argmax(1)  # the end of the text has the highest number, where open_clip pools
    assert end.tolist() == [len(p["prompt"].split()) + 1 for p in EVERY]


def test_held_out_scenes_are_nearest_to_their_own_prompt(judge):
    """Measured on 200 scenes a task by `train_shapes_clip.py evaluate`; floors leave room for a
    sample of 30."""
    best, beaten = script.retrieval(judge, 30, seed=1)
    found = {name: sum(x) / len(x) for name, x in (best | beaten).items()}
    assert {name: value for name, value in found.items() if value < FLOORS[name]} == {}


def test_the_clip_reward_takes_it_by_its_path_and_prefers_the_true_prompt():
    reward = rewards.load("clip", model=clip.SOURCE)
    g = torch.Generator().manual_seed(3)
    chosen = [p for p in EVERY if p["task"] == "color_attr"][::9]
    pictures = torch.stack([render(prompts.scene(p, g)) for p in chosen])
    right = reward(pictures, [p["prompt"] for p in chosen])
    wrong = reward(pictures, [clip.near_misses(p)["colour"][0]["prompt"] for p in chosen])
    assert (right > wrong).float().mean() > 0.95
    steep = rewards.load("clip", model=clip.SOURCE, rounding=False)
    x = pictures[:2].requires_grad_()
    steep(x, [p["prompt"] for p in chosen[:2]]).sum().backward()
    assert bool((x.grad.abs().amax((1, 2, 3)) > 1e-5).all())


# --- training


@pytest.mark.parametrize(
    ("reward", "settings"), [("clip", {"reward__clip__preset": "shapes"}), ("preference", {})]
)
def test_a_run_trains_on_the_embedded_networks(tmp_path, reward, settings):
    """Two iterations without a hub: every sample has a score, and the weights move."""
    made = small.trainer(
        tmp_path / "run", reward=reward, iterations="2", data__eval="null", **settings
    )
    before = [weight.detach().clone() for weight in made.parts.weights.parameters.values()]
    found = [iteration.metrics for iteration in made]
    assert [metrics["reward/invalid"] for metrics in found] == [0, 0]
    assert all(metrics[f"reward/{reward}/std"] > 0 for metrics in found)
    after = made.parts.weights.parameters.values()
    assert not all(map(torch.equal, before, after))
