"""Paths as people write them: ~, variables of the environment, \\ of Windows, misspelt names."""

from __future__ import annotations

import difflib
import os
import re
import unicodedata
from collections.abc import Callable
from importlib import resources
from pathlib import Path

VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
MOST = 10_000  # most names of a folder that are compared: a folder may hold millions
# difference between two names -> function whose result is equal for both
ALIKE: dict[str, Callable[[str], str]] = {
    "how its letters are encoded": lambda name: unicodedata.normalize("NFC", name),
    "case": str.casefold,
    "spaces": lambda name: "".join(name.split()),
    "its ending": lambda name: name.rpartition(".")[0] or name,
    "case and its ending": lambda name: (name.rpartition(".")[0] or name).casefold(),
}


def expanded(path: str) -> str:
    """Write out ~ and $NAME or ${NAME} of the environment in a path, unless a file has just this
    name; a variable that is not set -> ValueError."""
    out = os.path.expanduser(path)
    if "$" in out and not os.path.lexists(out):
        out = os.path.expanduser(os.path.expandvars(path))
        if left := VARIABLE.search(out):
            raise ValueError(
                f"{path} names the variable {left[0]} of the environment, which is not set; set it,"
                " or write the path out"
            )
    return out


def packaged(name: str) -> str:
    """Return the folder that "package:module/folder" names, of an installed package; any other name
    is returned as it is."""
    if not name.startswith("package:"):
        return name
    package, _, inside = name.removeprefix("package:").partition("/")
    return str(resources.files(package) / inside)


def located(path: str | Path, folder: str | Path = "") -> Path:
    """Return the file that a path, relative to a folder, names: `expanded`, and with / for \\ if
    only that file exists."""
    found = Path(folder, expanded(str(path)))
    if "\\" in str(path) and not found.exists():
        other = Path(folder, expanded(str(path).replace("\\", "/")))
        return other if other.exists() else found
    return found


def relative(path: Path, folder: Path) -> str:
    """Write a path as it leads from a folder, with / on every system; links are followed."""
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def nearby(path: str | Path) -> str:
    """Say how a path that does not exist differs from one that does, to end a sentence; "" if no
    path is near."""
    path = given = Path(path)
    while path.parent != path and not path.parent.exists():
        path = path.parent
    if not path.parent.is_dir() or path.exists():
        return ""
    name, names = path.name, sorted(os.listdir(path.parent))[:MOST]
    for what, shared in ALIKE.items():
        if like := [other for other in names if shared(other) == shared(name)]:
            return f'; {path.parent} has "{like[0]}", which differs from "{name}" in {what}'
    if like := difflib.get_close_matches(name, names, 1, cutoff=0.75):
        return f'; the nearest name in {path.parent} is "{like[0]}"'
    return "" if path == given else f"; there is no folder {path}"
