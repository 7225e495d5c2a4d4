"""A thousand prompts of many kinds, of our own making: people, animals, things, food, vehicles and
places in many styles, lights and numbers, relations between two, and texts to be written.

scripts/embedded/everyday.py joins them from hand-written parts. meta["task"] is photo, style,
count, relation, text or scene; meta["pairs"] lists each subject with the words about it, and no
pair of a held-out prompt is one of a training prompt; meta["text"] is the text that should be read.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def train_prompts() -> list[dict[str, Any]]:
    """The 800 training prompts, tasks mixed."""
    return _of("train")


def eval_prompts() -> list[dict[str, Any]]:
    """The 200 held-out prompts, tasks mixed, so that the first n are a sample of all."""
    return _of("eval")


def _of(split: str) -> list[dict[str, Any]]:
    text = (files("flowrl.data") / "everyday.jsonl").read_text(encoding="utf-8")
    rows = map(json.loads, text.splitlines())
    return [{k: v for k, v in row.items() if k != "split"} for row in rows if row["split"] == split]
