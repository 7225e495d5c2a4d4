"""Tiny random pipelines of many classes of diffusers: one Case a configuration, ten to twenty-five
lines each, a file for each kind of pipeline.

`cases()` collects what the files of this folder register. scripts/bench/pipelines.py runs all of
them.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zoo.case import Case


def cases() -> dict[str, Case]:
    """Every case by name, in the order of files and of lines."""
    out: dict[str, Case] = {}
    for info in pkgutil.iter_modules(__path__):
        out |= getattr(importlib.import_module(f"zoo.{info.name}"), "CASES", {})
    return out
