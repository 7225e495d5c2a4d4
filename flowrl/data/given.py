"""Prompts that come from Python: a list of a script's, or a callable in a user's file."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flowrl.data.entries import check_entry
from flowrl.runtime import registry


def records(given: Any, what: str = "prompts") -> list[dict[str, Any]]:
    """Turn texts, or records {"prompt": text, **meta}, into records; paths in them begin at the
    present folder. None, or anything else -> ValueError that begins with `what`."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ValueError(
            f"{what} should be a list of texts or of records"
            f' {{"prompt": text, **meta}}, not a {type(given).__name__}'
        )
    found = []
    for i, entry in enumerate(given):
        record = {"prompt": entry} if isinstance(entry, str) else entry
        own = dict(record) if isinstance(record, Mapping) else record
        found.append(check_entry(own, f"{what}[{i}]", Path()))
    if not found:
        raise ValueError(f"{what} is empty; it needs one prompt or more")
    return found


@functools.cache
def of_place(place: str) -> list[dict[str, Any]]:
    """Prompts of "path/to/file.py:NAME": a function without arguments that returns them, or the
    list itself; it is called once in a process. A failure -> ValueError."""
    what = f'data "{place}"'
    found = registry.member(place, what=what)
    if callable(found):
        found = registry.called(found, what=what)
    return records(found, f"{what}: what it gives")
