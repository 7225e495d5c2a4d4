"""The file is the registration: a plugin is a module in a package, found by its name.

`choices("flowrl.rewards")` lists a package's modules without importing them (its own packages are
shared, not plugins); `find` imports one, and an unknown name is answered with the nearest valid
ones.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType


def choices(package: str) -> list[str]:
    """Names of the plugins of a package, sorted."""
    path = importlib.import_module(package).__path__
    return sorted(m.name for m in pkgutil.iter_modules(path) if not m.ispkg)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """'; did you mean "a" or "b"?' or, with nothing near, '; choose from ...' among at most 60."""
    valid = sorted(valid)
    near = difflib.get_close_matches(name, valid, n=3, cutoff=0.5)
    if near:
        return "; did you mean " + " or ".join(f'"{n}"' for n in near) + "?"
    return "; choose from " + ", ".join(valid) if 0 < len(valid) <= 60 else ""


def find(package: str, name: str, *, what: str) -> ModuleType:
    """Import plugin `name` of `package`.

    Unknown, or its import fails -> ValueError with the nearest valid names, or the reason.
    """
    valid = choices(package)
    if name not in valid:
        raise ValueError(f'unknown {what} "{name}"{did_you_mean(name, valid)}')
    try:
        return importlib.import_module(f"{package}.{name}")
    except Exception as error:  # whatever a file does when it is imported
        raise ValueError(
            f'{what} "{name}": its file cannot be imported: {type(error).__name__}: {error}'
        ) from error
