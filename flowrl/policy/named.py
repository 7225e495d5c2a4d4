"""Models by names that configs/model does not hold: a factory in a user's file, or an entry point
of an installed package; and the hints that a user's own pipeline may need."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flowrl.policy.replay import hints
from flowrl.runtime import registry

GROUP = "flowrl.models"


def made(name: str) -> Any:
    """Return what "path/to/file.py:factory" or an entry point of the group flowrl.models gives: a
    pipeline, a Policy, or the name of a folder or hub id. Any other name is returned as it is.

    A factory is called without arguments. A failure -> ValueError.
    """
    what = f'model "{name}"'
    if not registry.is_outside(GROUP, name):
        return name
    found = registry.outside(GROUP, name, what="model")
    if isinstance(found, str | Path):
        return str(found)
    if not callable(found):
        raise ValueError(f"{what} is a {type(found).__name__}; it should be a factory or a name")
    # random numbers of the factory must not change the first values of adapters
    with torch.random.fork_rng():
        return registry.called(found, what=what)


def hints_of(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return arguments of hints.register, given as a mapping or as the place of one,
    "path/to/file.py:NAME". Wrong ones -> ValueError."""
    what = "model.hints"
    if isinstance(given, str):
        what = f'model.hints "{given}"'
        if not registry.is_place(given):
            raise ValueError(
                f"{what} should be path/to/file.py:NAME, or a mapping such as {{guidance: norm}}"
            )
        given = registry.member(given, what=what, suits=lambda value: isinstance(value, Mapping))
    if not isinstance(given, Mapping | None):
        raise ValueError(f"{what} is a {type(given).__name__}; it should be a mapping")
    known = [key for key in inspect.signature(hints.register).parameters if key != "pipeline"]
    for key in given or ():
        if key not in known:
            raise ValueError(
                f'{what}: unknown hint "{key}"{registry.did_you_mean(str(key), known)}'
            )
    return dict(given or {})


def declare(pipe: Any, given: Mapping[str, Any]) -> None:
    """Register hints for a pipeline's class."""
    if given:
        hints.register(type(pipe).__name__, **given)
