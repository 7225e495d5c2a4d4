"""Tiny random pipelines of many classes of diffusers: one Case a configuration, ten to twenty-five
lines each, a file for each kind of pipeline.

`cases()` collects what the files of this folder register. scripts/bench/pipelines.py runs all of
them.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.case import Case


def cases() -> dict[str, Case]:
    """Every case by name, in the order of files and of lines."""
    out: dict[str, Case] = {}
    for info in pkgutil.iter_modules(__path__):
        out |= getattr(importlib.import_module(f"zoo.{info.name}"), "CASES", {})
    own = {name: partial(made, case.make) for name, case in out.items()}
    return {name: dataclasses.replace(case, make=own[name]) for name, case in out.items()}


def made(make: Callable[[], Any]) -> Any:
    """What `make` makes; a test is skipped where the installed diffusers is too old for it."""
    try:
        return make()
    except AttributeError as error:
        if not str(error).startswith("module diffusers"):
            raise
        import diffusers
        import pytest

        pytest.skip(f"diffusers {diffusers.__version__}: {error}")
