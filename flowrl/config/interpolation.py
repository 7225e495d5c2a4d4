"""${key} in configs, bounded before it is resolved: forty values that each name the one before
twice stand for more text than any memory holds."""

from __future__ import annotations

import re
from typing import Any

MOST = 1_000_000  # characters that a value has, with everything that it names written out
A_VALUE = 20  # characters that a value counts as beside its own
NAMED = re.compile(r"\$\{([^${}]*)\}")
NESTED = re.compile(r"\$\{[^}:]*\$\{")  # a name that is itself named; ${oc.env:A,${b}} is not
KEYS = re.compile(r"[^.\[\]]+")
Path = tuple[str, ...]


def check_size(tree: Any) -> None:
    """ValueError where a value of the unresolved tree stands for too much."""
    Sizes(tree).of(())


class Sizes:
    """Characters that each value of a tree stands for."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.known: dict[Path, int] = {}

    def of(self, path: Path) -> int:
        """A value that is not there counts as nothing, as does one that stands for itself:
        resolving says so."""
        if path not in self.known:
            self.known[path] = 0
            self.known[path] = self._measured(path)
        return self.known[path]

    def _measured(self, path: Path) -> int:
        value = self._value(path)
        children: list[Path] = []
        if isinstance(value, dict):
            children = [(*path, str(key)) for key in value]
        elif isinstance(value, list):
            children = [(*path, str(i)) for i in range(len(value))]
        elif isinstance(value, str):
            if NESTED.search(value):
                raise ValueError(f"{'.'.join(path)}: ${{...}} inside ${{...}} is not understood")
            children = [named(key, path) for key in NAMED.findall(value)]
        size = A_VALUE + len(value) if isinstance(value, str) else A_VALUE
        for child in children:
            size += self.of(child)
            if size > MOST:
                raise ValueError(
                    f"{'.'.join(path) or 'the config'}: written out, what it names with ${{...}}"
                    f" has more than {MOST:,} characters, which no config needs"
                )
        return size

    def _value(self, path: Path) -> Any:
        value = self.tree
        for key in path:
            if isinstance(value, dict):
                value = value.get(key, value.get(int(key)) if key.isdigit() else None)
            elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
        return value


def named(key: str, path: Path) -> Path:
    """The path that ${key} means in the value at path: one dot in front stands for the mapping that
    holds it, each further one for the next outer."""
    outer = len(key) - len(key.lstrip("."))
    start = path[:-outer] if outer else ()
    return (*start, *KEYS.findall(key))
