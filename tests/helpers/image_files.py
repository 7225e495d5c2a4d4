"""Image files and lists of them, in an empty working folder."""

import json
from pathlib import Path

import pytest
import torch

from flowrl.data.media import save


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def noise(name, seed=0, height=16, width=16):
    """Write an image of random pixels -> its path."""
    return save(torch.rand(3, height, width, generator=torch.Generator().manual_seed(seed)), name)


def listing(name, *entries):
    """Write a .jsonl list, an entry a line -> its path."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return name


def lines(path):
    """The entries of a .jsonl list."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
