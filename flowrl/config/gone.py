"""Settings that were removed, and that a config.yaml of an earlier run may still name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from flowrl.runtime.yaml_text import PARSER

SINCE = "2026-11-26"  # the day from which on the settings below are gone
# SECTION.SETTING, or reward.NAME.SETTING -> [its default, what to do now]; with its default a run
# goes on without it, with equal numbers
GONE: dict[str, list[Any]] = yaml.load(
    Path(__file__).with_name("gone.yaml").read_text(encoding="utf-8"), PARSER
)
REWARDS = ("reward.", "reward.ensemble.members.")  # below them stand labels of rewards


def without_gone(tree: Any, *, whatever: bool = False) -> Any:
    """Return a config without removed settings; a value that is no config is returned as it is.

    ValueError where one had another value than its default; whatever: any value is dropped.
    """
    return _without(tree, "", "", whatever)


def _without(tree: Any, owner: str, where: str, whatever: bool) -> Any:
    """owner, where: what stands before a key of the tree in GONE, and in the config."""
    if not isinstance(tree, dict):
        return tree
    out = {}
    for key, value in tree.items():
        default, instead = GONE.get(f"{owner}{key}", (None, None))
        if instead is None:
            out[key] = _without(value, _owner(tree, key, owner), f"{where}{key}.", whatever)
        elif value != default and not whatever:
            raise ValueError(
                f"{where}{key}={str(value).lower()} is a setting that is gone since {SINCE}; leave"
                f" it out: {instead}"
            )
    return out


def _owner(tree: dict[Any, Any], key: Any, owner: str) -> str:
    """What stands before the keys of tree[key] in GONE: a reward's is called by its name."""
    if owner in REWARDS:
        entry = tree[key]
        return f"reward.{entry.get('name', key) if isinstance(entry, dict) else key}."
    inner = str(key).removesuffix("_settings")  # as judge_settings, those of the reward `judge`
    return f"{owner}{key}." if inner == key else f"reward.{tree.get(inner, inner)}."
