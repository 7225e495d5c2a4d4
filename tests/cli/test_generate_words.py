"""What `flowrl generate` says of its words before it works: nothing is loaded where they decide."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import small
import torch

from flowrl.cli import generate
from flowrl.config.build import lora_of
from flowrl.config.load import load_config
from flowrl.policy import load_policy
from flowrl.rollouts.inference import gallery
from flowrl.scenes.shapes import EDITS
from flowrl.training.build import warn

FILES = ["0.png", "made.png"]


class Loaded(Exception):
    """The words were accepted: a model would be loaded now."""


@pytest.fixture
def unloaded(monkeypatch):
    def refuse(*_):
        raise Loaded

    monkeypatch.setattr(generate, "_load", refuse)


def said(*words):
    result = small.invoke("generate", *words)
    return result, " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a", "red", "circle"], '3 prompts of one word each; for one prompt write "a red circle"'),
        (["The", "moon"], '2 prompts of one word each; for one prompt write "The moon"'),
        (["a red circle", "--reward", "jpeg"], "--reward chooses among samples, and one is made"),
        (["a red circle", "--rlg", "2"], "--rlg compares the LoRA with the base model"),
        (["a red circle", "-o", "a.tiff"], 'the suffix is ".tiff"'),
        (["a red circle", "--lora", "owner/name"], "there is no owner/name; give a finished run's"),
    ],
)
def test_words_that_are_hardly_meant_are_refused(words, sentence, monkeypatch):
    monkeypatch.setattr("flowrl.policy.load_policy", pytest.fail)
    result, text = said("shapes-sd3", *words)
    assert result.exit_code == 2 and sentence in text


@pytest.mark.parametrize(
    ("model", "words", "sentence"),
    [
        ("shapes-sd3", ["red", "circle"], 'for one prompt write "red circle"'),
        ("shapes-sd3", ["a green dragon"], "never saw these words: dragon; all that it knows are"),
        ("sd1.5", ["a green dragon"], ""),
        ("shapes-sd3", ["a red circle above a Blue square."], ""),
        ("shapes-sd3", ["circle", "two blue squares"], ""),
        ("shapes-sd3", ["circle"], ""),
        ("shapes-edit", ["remove the red circle"], ""),
        ("shapes-edit", ["a red circle grows"], "never saw these words: grows; all that it knows"),
        ("shapes-wan", ["two red circles move left"], ""),
        ("shapes-wan", ["a red circle above a blue square"], "never saw these words: above;"),
    ],
)
def test_words_that_may_be_meant_are_said_and_taken(unloaded, model, words, sentence):
    result, text = said(model, *words)
    assert isinstance(result.exception, Loaded)
    assert sentence in text if sentence else text == ""


@pytest.mark.parametrize(
    ("name", "saved"), [("a.mp4", "a.png"), ("a.gif", "a.png"), ("a.png", ""), ("a.npy", "")]
)
def test_a_suffix_that_does_not_suit_is_said_before_anything_is_sampled(
    monkeypatch, tmp_path, name, saved
):
    def sample(*_, **__):
        raise Loaded

    small.load_once(monkeypatch)
    monkeypatch.setattr(gallery, "generate", sample)
    result, text = said("shapes-sd3", "a red circle", "-o", tmp_path / name)
    assert isinstance(result.exception, Loaded)
    said_so = f" WARNING {name} does not suit what is made; it is saved as {saved}"
    assert text.endswith(said_so) if saved else not text


def test_an_edit_model_is_loaded_with_the_picture_of_its_prompt_and_what_it_makes_is_scored(
    monkeypatch, tmp_path
):
    """Next is never a command that lacks the source."""
    monkeypatch.chdir(tmp_path)
    before, _ = EDITS.pair("remove the red circle", 0)
    EDITS.picture(before).save("0.png")
    line = {"prompt": "remove the red circle", "image": "0.png"}
    Path("one.jsonl").write_text(json.dumps(line))
    result, text = said("shapes-edit", "one.jsonl", "--steps", "1", "-o", "made.png")
    assert result.exit_code == 0 and "the same with --reward shapes_edit -o FOLDER/" in text
    EDITS.picture(before).resize((32, 32)).save("small.png")
    two = [line, line | {"image": "small.png"}]
    Path("two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in two))
    result, text = said("shapes-edit", "two.jsonl", "--steps", "1", "-o", "two/")
    sizes = "image has 32 x 32 pixels, and that of the first prompt 64 x 64 pixels"
    assert result.exit_code == 2 and f"{sizes}; give this pipeline pictures of one" in text
    own = (line["prompt"], "--steps", "1", "-o", "own.png")
    result, text = said("shapes-edit", *own, "--pipeline", "image=0.png")
    assert result.exit_code == 0 and text == "own.png"
    result, text = said("shapes-edit", *own)
    assert result.exit_code == 2 and "InstructPix2PixPipeline needs image: a column of the" in text
    assert "(generate: --pipeline NAME=VALUE)" in text and "ValueError" not in text
    Path("all.jsonl").write_text("".join(json.dumps(line | {"file": f}) + "\n" for f in FILES))
    words = ("score", *FILES, "--prompts", "all.jsonl", "--reward", "shapes_edit", "--json", "-")
    scores = [row["total"] for row in json.loads(small.invoke(*words).stdout)]
    assert len(scores) == 2 and scores[0] == 0  # a copy of the source
    result = small.invoke("score", "0.png", "--prompt", line["prompt"], "--reward", "shapes_edit")
    assert result.exit_code == 2 and 'names in its column "image"' in result.output


@pytest.mark.long
def test_a_reward_that_cannot_score_says_why(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    EDITS.picture(EDITS.pair("remove the red circle", 0)[1]).save("0.png")
    Path("one.jsonl").write_text('{"prompt": "remove the red circle", "image": "0.png"}')
    for words in (["-o", "made.png", "--best-of", "2"], ["-o", "made/"]):
        words = ["one.jsonl", "--steps", "1", "--reward", "shapes_edit", *words]
        result, text = said("shapes-edit", *words)
        assert result.exit_code == 0 and "WARNING not scored: shapes_edit: ValueError: " in text
        assert "is about one red circle, and its source shows 0" in text


def test_a_run_warns_of_words_that_its_embedded_model_never_saw(caplog):
    """Other models are not known."""
    nothing = SimpleNamespace(say_cut=list, unread=lambda *_: [])
    for model, warned in (("shapes-wan", True), ("sd1.5", False)):
        caplog.clear()
        cfg = load_config(None, [f"model={model}", "data=shapes_motion", "reward=jpeg"])
        warn(cfg, nothing, [], [{"prompt": "a taco moves left"}])
        assert ("never saw these words: taco; all" in caplog.text) is warned


def test_a_lora_to_generate_with_and_one_to_start_from_are_named_alike(tmp_path):
    """The run, its exported folder, or the file."""
    policy = load_policy("shapes-sd3", lora={"rank": 2, "alpha": 2})
    policy.save_lora(tmp_path / "run" / "lora")
    (file,) = (tmp_path / "run" / "lora").glob("*.safetensors")
    for place in (tmp_path / "run", tmp_path / "run" / "lora", file):
        cfg = load_config(None, [f"train.init_lora={place}"])
        assert cfg.train.init_lora == str(file if place == file else tmp_path / "run" / "lora")
        policy.load_lora(cfg.train.init_lora)
        made = load_policy("shapes-sd3", **lora_of(place)[1])
        own, other = policy.state(), made.state()
        assert own.keys() == other.keys() and all(torch.equal(own[k], other[k]) for k in own)
