"""The methods that ship, by what they train: tokens of masked generators, or flows."""

from __future__ import annotations

from functools import cache

from flowrl.config import build
from flowrl.config.compose import options
from flowrl.config.load import load_config


@cache
def unmasks(name: str) -> bool:
    """Whether the method of a file of configs/algorithm trains tokens, as its config says."""
    return build.make_algorithm(load_config(None, [f"algorithm={name}"])).unmasks


def on_tokens() -> list[str]:
    """Names of the files of configs/algorithm whose methods train tokens, sorted."""
    return [name for name in options("algorithm") if unmasks(name)]


def on_flows() -> list[str]:
    """Names of the other files, sorted."""
    return [name for name in options("algorithm") if not unmasks(name)]
