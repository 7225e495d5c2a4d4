"""YAML that nobody checked yet, bounded before it is read: its size, its depth, and what it becomes
once each alias stands for a copy (nine lines of aliases can stand for a billion values)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

LARGEST = 1_000_000  # bytes of a file
DEEPEST = 50  # lists and mappings inside one another
MOST = 1_000_000  # characters that all values have together, aliases written out
A_VALUE = 20  # characters that a value counts as beside its own
PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class TooMuch(ValueError):
    """YAML that is larger than any settings are."""


def read(path: Path) -> str:
    """The text of a YAML file that can be read without harm; TooMuch, OSError, UnicodeDecodeError
    or YAMLError if not."""
    if path.exists() and not path.is_file():
        raise TooMuch("it is not a file")
    with path.open("rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise TooMuch(f"it has more than {LARGEST:,} bytes, which no config needs")
    text = data.decode("utf-8")
    check(text)
    return text


def load(text: str) -> Any:
    """Plain values of a short YAML text, such as an option's; TooMuch or YAMLError if it cannot be
    read."""
    check(text)
    return yaml.safe_load(text)


def check(text: str) -> None:
    """TooMuch if the text holds too much or too deep; YAMLError if it is not YAML."""
    open_ = [_Holder(None)]
    whole: dict[str, _Holder] = {}  # anchor -> what its aliases stand for
    for event in yaml.parse(text, Loader=PARSER):
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append(_Holder(event.anchor))
            _bound(len(open_) - 1, open_[-1].size)
        elif isinstance(event, yaml.ScalarEvent):
            _add(open_, _Holder(event.anchor, A_VALUE + len(event.value)), whole)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in whole:
                raise TooMuch(f"the alias *{event.anchor} stands for itself, or for nothing above")
            found = whole[event.anchor]
            _add(open_, _Holder(None, found.size, found.depth), whole)
        elif isinstance(event, yaml.CollectionEndEvent):
            _add(open_, open_.pop(), whole)


class _Holder:
    """A value, or a list or mapping as far as it was read."""

    def __init__(self, anchor: str | None, size: int = A_VALUE, depth: int = 0) -> None:
        self.anchor, self.size, self.depth = anchor, size, depth


def _add(open_: list[_Holder], value: _Holder, whole: dict[str, _Holder]) -> None:
    """Count a value that is complete in the list or mapping that holds it."""
    if value.anchor is not None:
        whole[value.anchor] = value
    holder = open_[-1]
    holder.size += value.size
    holder.depth = max(holder.depth, value.depth + 1)
    _bound(holder.depth + len(open_) - 2, holder.size)


def _bound(depth: int, size: int) -> None:
    if depth > DEEPEST:
        raise TooMuch(f"it nests more than {DEEPEST} lists and mappings")
    if size > MOST:
        raise TooMuch(f"with its aliases written out it holds more than {MOST:,} characters")
