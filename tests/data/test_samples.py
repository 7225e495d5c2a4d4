"""Which prompt an image file is judged by: a list's, or its folder's own."""

import json
from pathlib import Path

import pytest
import small
import torch

from flowrl.cli.main import app  # noqa: F401  imported before a test changes folders
from flowrl.data.media import save
from flowrl.data.samples import collect


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def noise(name, seed=0, height=16, width=16):
    return save(torch.rand(3, height, width, generator=torch.Generator().manual_seed(seed)), name)


def listing(name, *entries):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return name


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_prompts_come_from_a_list_by_path_or_bare_name_and_an_image_may_have_several():
    noise("imgs/a.png"), noise("imgs/b.png"), noise("imgs/.hidden.png")
    listing(
        "lists/p.jsonl",
        {"file": "../imgs/a.png", "prompt": "one", "k": 1},
        {"file": "b.png", "prompt": "two", "total": 5.0},
        {"file": "b.png", "prompt": "three"},
    )
    found = collect([Path("imgs")], prompts=Path("lists/p.jsonl"))
    assert [(s.path.name, s.prompt, s.meta) for s in found] == [
        ("a.png", "one", {"k": 1}),
        ("b.png", "two", {}),
        ("b.png", "three", {}),
    ]


def test_a_folders_own_list_is_read_in_its_order_and_file_name_is_file():
    noise("imgs/a.png"), noise("imgs/sub/b.png")
    listing(
        "imgs/metadata.jsonl",
        {"file_name": "sub/b.png", "prompt": "two"},
        {"file_name": "a.png", "prompt": "one"},
    )
    assert [(s.path, s.prompt) for s in collect([Path("imgs")])] == [
        (Path("imgs/sub/b.png"), "two"),
        (Path("imgs/a.png"), "one"),
    ]


def test_a_file_that_a_folders_own_list_names_in_vain_is_left_out():
    noise("imgs/a.png")
    listing(
        "imgs/scores.jsonl", {"file": "a.png", "prompt": "x"}, {"file": "gone.png", "prompt": "x"}
    )
    result = small.invoke("score", "imgs", "--reward", "jpeg")
    assert result.exit_code == 1
    assert "imgs/gone.png cannot be read: it does not exist" in result.stderr
