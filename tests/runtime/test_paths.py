"""Paths as people write them: ~, variables, backslashes, and names that are nearly right."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flowrl.cli.main import app
from flowrl.config.load import load_config
from flowrl.data import media
from flowrl.data.conditions import load
from flowrl.data.prompts import load_prompts
from flowrl.data.samples import collect
from flowrl.data.scored_dataset import load as load_scored
from flowrl.rewards.core.weights import path_of
from flowrl.runtime.paths import expanded, located, nearby


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PICS", str(tmp_path / "pics"))
    monkeypatch.delenv("NOWHERE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pics").mkdir()
    media.save(torch.rand(3, 8, 8), tmp_path / "pics" / "a b.png")
    return tmp_path


def test_home_and_variables_are_written_out(home):
    assert expanded("~/x") == str(home / "x") and expanded("$PICS/a") == str(home / "pics/a")
    assert expanded("${PICS}/a") == str(home / "pics/a") and expanded("a~b") == "a~b"
    (home / "$5.png").touch()
    assert expanded("$5.png") == "$5.png"  # a file of this name
    with pytest.raises(ValueError, match=r"names the variable \$NOWHERE .* not set; set it"):
        expanded("$NOWHERE/x")


def test_settings_that_are_paths_are_written_out(home):
    words = ["output=~/runs", "data.train=$PICS/p.txt", "train.init_lora=$PICS/lora"]
    cfg = load_config(None, ["reward=jpeg", "algorithm=nft", "model=~/pics", *words])
    assert cfg.output == str(home / "runs") and cfg.data.train == str(home / "pics/p.txt")
    assert cfg.train.init_lora == str(home / "pics/lora") and cfg.model.source == str(home / "pics")
    with pytest.raises(ValueError, match=r"output: \$NOWHERE/x names the variable"):
        load_config(None, ["reward=jpeg", "algorithm=nft", "output=$NOWHERE/x"])


def test_options_of_commands_are_written_out(home):
    words = ["score", "$PICS", "--reward", "jpeg", "--prompt", "a", "--output=~/out"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert (home / "out" / "scores.jsonl").is_file()
    result = CliRunner().invoke(app, [*words[:-1], "--output=$NOWHERE/out"])
    assert result.exit_code == 2 and "NOWHERE" in result.stderr


@pytest.mark.parametrize("folder", ["pics/", "pics\\", "~/pics/", "$PICS/"])
def test_files_of_a_list_lie_relative_to_it(home, monkeypatch, folder):
    named = dict.fromkeys(["image", "file", "reference"], f"{folder}a b.png")
    (home / "list.jsonl").write_text(json.dumps({"prompt": "p", "total": 1, **named}))
    monkeypatch.chdir("/")
    picture, where = home / "pics" / "a b.png", home / "list.jsonl"
    (entry,) = load_prompts(str(where))
    assert Path(entry["image"]) == Path(entry["reference"]) == picture
    assert load("image", entry["image"]).size == (8, 8)
    (sample,) = collect([picture], prompts=where)
    assert sample.prompt == "p" and load_scored(where).paths == [picture]


def test_a_list_that_came_with_a_folder_names_nothing_outside_of_it(home):
    line = {"prompt": "p", "file": "$HOME/x.png", "total": 1}
    (home / "pics" / "scores.jsonl").write_text(json.dumps(line))
    with pytest.raises(ValueError, match=r"\$HOME/x.png, which does not exist"):
        load_scored(home / "pics")


@pytest.mark.parametrize(
    ("there", "asked", "said"),
    [
        ("A.png", "a.png", "differs from .a.png. in case"),
        ("a.jpg", "a.png", "in its ending"),
        ("my cat.png", "mycat.png", "in spaces"),
        ("a.png ", "a.png", "in spaces"),
        ("Cat.JPEG", "cat.png", "in case and its ending"),
        ("cafe\u0301.png", "caf\u00e9.png", "in how its letters are encoded"),
        ("prompts.txt", "promts.txt", "the nearest name in .* is .prompts.txt"),
        ("Data", "data/deep/a.png", "has .Data., which differs from .data. in case"),
        ("other", "none/deep/a.png", "there is no folder .*none"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(tmp_path, there, asked, said):
    (tmp_path / there).mkdir()
    assert re.search(said, nearby(tmp_path / asked)), nearby(tmp_path / asked)


def test_readers_say_what_is_near(home):
    near = "differs from .* in (case|its ending|spaces)"
    for read in (
        lambda: load_prompts(str(home / "Pics" / "p.txt")),
        lambda: collect([home / "pics" / "a b.jpg"], prompt="p"),
        lambda: path_of("./pics/ab.png", reward="clip"),
        lambda: media.read_image(home / "pics" / "A b.png"),
        lambda: load_scored(home / "Pics"),
    ):
        with pytest.raises(ValueError, match=near):
            read()
    assert nearby(home / "pics") == "" and located("pics\\a b.png") == Path("pics/a b.png")
