"""`flowrl init` writes a config that flowrl reads, and asks again where an answer is wrong."""

import os
import pty

import pytest
import small

from flowrl.config.load import load_config

CASES = {  # options -> settings of the config that is written
    "": {"model.source": "package:flowrl.shapes/weights", "iterations": 50, "batch.group": 16},
    "--reward jpeg": {"reward": ["jpeg"], "batch.group": 8, "data.eval": "shapes:eval"},
    "--model sdxl": {"reward": ["pickscore"], "data.eval": "everyday:eval"},
    "--model sdxl --memory 24gb": {"model.quantize": "nf4", "train.precision": "bf16"},
    "--model sdxl --reward clip": {"reward": ["clip"], "sampler.steps": 20, "iterations": 100},
    "--model sd3.5-medium --prompts mine.txt": {"data.train": "mine.txt", "data.eval": None},
    "--model owner/name --reward mine.py:red --prompts hf:a/b --memory 80gb": {
        "model.source": "owner/name",
        "reward": ["red"],
        "data.train": "hf:a/b",
    },
}
MISTAKES = {
    "--model sdxll": 'unknown model "sdxll"; did you mean "sdxl"?',
    "--reward pickscor": 'unknown reward "pickscor"; did you mean "pickscore"',
    "--prompts ours.txt": "there is no file ours.txt; name one",
    "--memory 48gb": 'unknown memory "48gb"; did you mean "80gb" or "40gb"',
    "a.yml": "a.yml exists; give another name",
    "a.txt": '"a.txt" should end in .yaml, as a.yaml does',
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("a red fox\n")
    (tmp_path / "a.yml").write_text("")
    (tmp_path / "mine.py").write_text(
        "import flowrl\n\n\n@flowrl.reward\ndef red(media, prompts, context=None):\n"
        "    return media.mean((1, 2, 3))\n"
    )


@pytest.mark.parametrize("words", CASES)
def test_answers_as_options_make_a_config_that_reads(words):
    done = small.invoke("init", "run.yaml", "--yes", *words.split())
    assert done.exit_code == 0, done.output
    assert done.stderr == "Next:\n  flowrl train run.yaml --dry-run\n  flowrl train run.yaml\n"
    cfg = load_config("run.yaml").model_dump(mode="json")
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
    assert printed.count("Model: ") == 2 and 'did you mean "shapes-sd3"' in printed
    assert load_config("run.yaml") == load_config("quickstart", ["reward.shapes.weight=1"])


def test_the_config_trains(monkeypatch):
    small.invoke("init", "run.yaml", "--yes", "--reward", "jpeg")
    changes = [
        word for word in small.words("run") if not word.startswith(("algorithm=", "reward="))
    ]
    done = small.invoke("train", "run.yaml", *changes, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "algorithm  nft, reward 1 x jpeg" in done.output and not os.path.exists("run")
