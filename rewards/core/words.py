"""Rewards as words of a command line: jpeg, jpeg=0.5, jpeg.quality=80, my/file.py:red."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


def parse_words(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Words of the command line as `load_set` takes them: NAME, NAME=WEIGHT and NAME.SETTING=VALUE,
    of which each adds to NAME.

    >>> parse_words(["jpeg", "jpeg.quality=80", "clip=0.5"])
    {'jpeg': {'weight': 1.0, 'quality': 80}, 'clip': {'weight': 0.5}}

    NAME may be "file.py:function", whose label is the function's name. A word of another form, or a
    weight or setting given twice -> ValueError.
    """
    out: dict[str, dict[str, Any]] = {}
    said: set[tuple[str, str]] = set()
    for word in words:
        left, equals, value = word.partition("=")
        file, colon, rest = left.rpartition(":") if ".py:" in left else ("", "", left)
        label, _, key = rest.partition(".")
        given = {(label, key)} | (
            {(label, "weight")} if equals and not key else set()
        )  # NAME=0.5 is NAME.weight=0.5
        if said & given:
            raise ValueError(
                f'reward "{word}": "{left}" is given twice; give each reward one weight, and each'
                " setting one value"
            )
        if held := next(
            (k for name, k in said if name == label and key and k and _within(k, key)), None
        ):
            raise ValueError(
                f'reward "{word}": "{label}.{held}" is given too, and one holds the other; give one'
                " of the two"
            )
        said |= given
        entry = out.setdefault(
            label, {"weight": 1.0} | ({"name": f"{file}:{label}"} if colon else {})
        )
        try:
            if key and equals:
                _put(entry, key.split("."), yaml.safe_load(value))
            elif equals:
                entry["weight"] = float(value)
        except (ValueError, yaml.YAMLError):
            equals = ""
        if not label or (key or "=" in word) and not equals:
            raise ValueError(
                f'reward "{word}" should be NAME, NAME=WEIGHT such as jpeg=0.5, or'
                " NAME.SETTING=VALUE such as jpeg.quality=80"
            )
    return out


def _within(a: str, b: str) -> bool:
    """Whether one of two settings is a part of the other, as top.left of top."""
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def _put(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """tree[k1][k2]... = value; a key that holds no mapping -> ValueError."""
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{key} is one value")
    tree[keys[-1]] = value
