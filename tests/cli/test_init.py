"""`flowrl init` writes a config that flowrl reads, and asks again where an answer is wrong."""

import os
import pty
import re
from pathlib import Path

import pytest
import small
import yaml

from flowrl.config.load import load_config

QUICKSTART = load_config("quickstart")
CASES = {  # options -> settings of the config that is written
    "": {
        "model.source": "package:flowrl.shapes/weights",
        "iterations": QUICKSTART.iterations,
        "batch.group": QUICKSTART.batch.group,
    },
    "--reward jpeg": {"reward": ["jpeg"], "batch.group": 8, "data.eval": "shapes:eval"},
    "--model sdxl": {"reward": ["pickscore"], "data.eval": "everyday:eval"},
    "--memory 24gb": {"model.quantize": "none", "model.offload": "none"},
    # the recipe holds the weights whole on 24 GB, and another reward does as well
    "--model sdxl --memory 24gb": {"model.quantize": "none", "iterations": 60},
    "--model sdxl --memory 4090 --reward clip": {"model.quantize": "none", "iterations": 100},
    "--model flux.1-dev --memory rtx3090": {"model.quantize": "nf4"},
    "--model flux.1-dev --memory 24gb": {"model.quantize": "nf4", "train.precision": "bf16"},
    "--model flux.1-dev --memory l40s": {"model.quantize": "int8"},
    "--model flux.1-dev --memory h200": {"model.quantize": "none"},
    "--model sdxl --reward clip": {"reward": ["clip"], "sampler.steps": 20, "iterations": 100},
    "--model sd3.5-medium --prompts mine.txt": {"data.train": "mine.txt", "data.eval": None},
    "--model owner/name --reward mine.py:red --prompts hf:a/b --memory 80gb": {
        "model.source": "owner/name",
        "reward": ["red"],
        "data.train": "hf:a/b",
    },
}
MISTAKES = {
    "--model sdxll": 'unknown model "sdxll"; did you mean "sdxl"',
    "--reward pickscor": 'unknown reward "pickscor"; did you mean "pickscore"',
    "--model SDXL": 'unknown model "SDXL"; did you mean "sdxl"',
    "--model pony.safetensors": "from_single_file(",
    "--model ./weights/sdxl": 'model "./weights/sdxl" does not exist; there is no folder we',
    "--prompts ours.txt": "prompt file ours.txt does not exist",
    "--prompts captions": "a folder; make one file: cat captions/*.txt > prompts.txt",
    "--memory 48gb": 'unknown memory "48gb"; did you mean "80gb" or "40gb"',
    "a.yml": "a.yml exists; give another name",
    "a.txt": '"a.txt" should end in .yaml, as a.yaml does',
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("a red fox\n")
    (tmp_path / "a.yml").write_text("")
    (tmp_path / "pony.safetensors").write_text("")
    (tmp_path / "captions").mkdir()
    (tmp_path / "mine.py").write_text(
        "import flowrl\n\n\n@flowrl.reward\ndef red(media, prompts, context=None):\n"
        "    return media.mean((1, 2, 3))\n"
    )


@pytest.mark.parametrize("words", CASES)
def test_answers_as_options_make_a_config_that_reads(words):
    done = small.invoke("init", "run.yaml", "--yes", *words.split())
    assert done.exit_code == 0, done.output
    cfg = load_config("run.yaml").model_dump(mode="json")
    none = "No held-out prompts: no evaluation; data.eval=FILE names some.\n"
    expected = "Next:\n  flowrl train run.yaml --dry-run\n  flowrl train run.yaml\n"
    assert done.stderr == none * (cfg["data"]["eval"] is None) + expected
    for key, value in CASES[words].items():
        found = cfg
        for part in key.split("."):
            found = found[part]
        assert ([*found] if key == "reward" else found) == value, key
    assert small.invoke("show", "run.yaml").exit_code == 0


@pytest.mark.parametrize("words", MISTAKES)
def test_a_wrong_answer_is_refused_and_nothing_is_written(words):
    done = small.invoke("init", "--yes", *words.split())
    assert done.exit_code == 2 and MISTAKES[words] in done.stderr, done.output
    assert not os.path.exists("run.yaml") and not os.path.exists("a.txt")


def test_a_wrong_reward_is_one_sentence():
    done = small.invoke("init", "--yes", "--model", "sdxl", "--reward", "pickscor")
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_memory_is_written_where_the_card_needs_it_and_the_recipe_is_in_comments():
    for model, card, written in (
        ("sdxl", "24gb", False),
        ("flux.1-dev", "24gb", False),  # the recipe has it
        ("flux.1-dev", "40gb", True),
    ):
        file = f"{model}-{card}.yaml"
        small.invoke("init", file, "--yes", "--model", model, "--memory", card)
        text = Path(file).read_text()
        assert ("/memory" in text) == written
        comments = [line[2:] for line in text.splitlines() if re.match(r"# [a-z]+: ", line)]
        told = yaml.safe_load("\n".join(comments))
        assert [*told] == ["iterations", "batch", "optimizer", "train", "model"]
        Path(file).write_text(f"{text}\n" + "\n".join(comments))
        assert load_config(file) == load_config(model, [f"memory={card}"] * written)


def test_without_a_terminal_a_question_is_refused():
    done = small.invoke("init", "--model", "sdxl")
    assert done.exit_code == 2 and "give --reward, or --yes" in done.stderr


def test_on_a_terminal_a_wrong_answer_is_asked_again():
    """The answers: no model of this name, this one, the default three times."""
    own, other = pty.openpty()
    os.write(own, b"shapes-sd4\nshapes-sd3\n\n\n\n")
    done = small.start("init", "run.yaml", stdin=other)
    printed = done.communicate(timeout=60)[1]
    assert done.returncode == 0, printed
    assert printed.count("Model: ") == 2 and "did you mean" in printed
    assert load_config("run.yaml") == load_config("quickstart", ["reward.shapes.weight=1"])


def test_the_config_trains(monkeypatch):
    small.invoke("init", "run.yaml", "--yes", "--reward", "jpeg")
    changes = [
        word for word in small.words("run") if not word.startswith(("algorithm=", "reward="))
    ]
    done = small.invoke("train", "run.yaml", *changes, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "algorithm  nft, reward 1 x jpeg" in done.output and not os.path.exists("run")
