"""Finding a plugin by its name.

A name is one of three things. A module of a package of ours: the file is the registration, and
`choices("flowrl.rewards")` lists them without importing them (packages inside are shared, not
plugins). An entry point of an installed package, in a group of the same name as ours. Or
"path/to/file.py:NAME", an object that a user's file defines. The answer to an unknown name holds
the nearest valid ones.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from flowrl.runtime import excerpt
from flowrl.runtime.paths import located, nearby

LIVE = "live:"  # begins the name by which a config records an object that a script handed over


def shipped(package: str) -> list[str]:
    """Names of a package's own plugins, sorted."""
    known = sys.modules.get(package)  # find_spec imports the parent only, not the package itself
    spec = importlib.util.find_spec(package) if known is None else None
    path = spec.submodule_search_locations if spec else known.__path__
    return sorted(m.name for m in pkgutil.iter_modules(path) if not m.ispkg)


@functools.cache
def installed(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Entry points that installed packages have in a group ("flowrl.algorithms"), by name. They are
    looked for once in a process."""
    found = importlib.metadata.entry_points(group=group)
    return {entry.name: entry for entry in sorted(found, key=lambda e: e.name)}


def choices(package: str) -> list[str]:
    """Names of a package's plugins and of those installed beside them, sorted."""
    return sorted({*shipped(package), *installed(package)})


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return '; did you mean "a" or "b"?' of names that are about as near as the nearest or, with
    nothing near, '; choose from ...' of at most 60. Case does not count."""
    valid = sorted({*valid} - {name})
    folded = {entry.lower(): entry for entry in valid}
    near = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.5)
    likeness = [difflib.SequenceMatcher(None, one, name.lower()).ratio() for one in near]
    near = [one for one, own in zip(near, likeness, strict=True) if own > likeness[0] - 0.15]
    if near:
        return "; did you mean " + " or ".join(f'"{folded[n]}"' for n in near) + "?"
    return "; choose from " + ", ".join(valid) if 0 < len(valid) <= 60 else ""


def find(package: str, name: str, *, what: str) -> ModuleType:
    """Import the module `name` of `package`.

    Unknown, or its import fails -> ValueError with the nearest valid names, or the reason.
    """
    check_known(package, name, what=what)
    try:
        return importlib.import_module(f"{package}.{name}")
    except Exception as error:  # a file may raise anything when it is imported
        raise ValueError(
            f'{what} "{name}": its file cannot be imported: {type(error).__name__}: {error}'
        ) from error


def check_known(package: str, name: str, *, what: str) -> None:
    """ValueError with the nearest valid names if a name is neither ours nor outside."""
    if name not in shipped(package) and not is_outside(package, name):
        raise ValueError(f'unknown {what} "{name}"{did_you_mean(name, choices(package))}')


def plugin(
    package: str, name: str, attribute: str, *, what: str, suits: Callable[[Any], bool] = callable
) -> Any:
    """Load the object behind a name: `attribute` of a module (None if it has none), or the object
    that an entry point or a user's file gives. Our modules come first. ValueError: see `find`,
    `entry`, `member`."""
    if is_outside(package, name) and name not in shipped(package):
        found = outside(package, name, what=what, suits=suits)
    else:
        found = find(package, name, what=what)
    holds = isinstance(found, ModuleType) and not is_place(name)
    return getattr(found, attribute, None) if holds else found


def declared(package: str, name: str, plugin: str, attribute: str, *, what: str) -> Any:
    """Return what the class of a plugin states as an attribute, without importing what it computes
    with; None: it is not ours, and its package or file is to be loaded. ValueError: it is not
    known."""
    check_known(package, name, what=what)
    ours = name in shipped(package)
    return excerpt.declared(f"{package}.{name}", plugin, attribute) if ours else None


def is_outside(group: str, name: str) -> bool:
    """Whether the name stands for a file of the user's or an installed package."""
    return is_place(name) or name in installed(group)


def outside(group: str, name: str, *, what: str, suits: Callable[[Any], bool] = callable) -> Any:
    """Return the object that this file or package gives. ValueError: see `entry`, `member`."""
    if is_place(name):
        return member(name, what=f'{what} "{name}"', suits=suits)
    return entry(group, name, what=what)


def entry(group: str, name: str, *, what: str) -> Any:
    """Load the object of an entry point. If the import fails -> ValueError with the reason."""
    point = installed(group)[name]
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # a package may raise anything when it is imported
        owner = f" of the package {point.dist.name}" if point.dist else ""
        raise ValueError(
            f'{what} "{name}": the entry point {point.value}{owner} cannot be imported:'
            f" {type(error).__name__}: {error}"
        ) from error


# ---------------------------------------------------------------------- files of the user's


def is_place(name: object) -> bool:
    """Whether a name is "path/to/file.py:NAME"."""
    return isinstance(name, str) and ".py:" in name


def absolute(name: Any) -> Any:
    """Write out the whole path of a place, so that a run resumes from any folder; return other
    values as they are."""
    if not is_place(name):
        return name
    file, _, last = name.rpartition(":")
    return f"{located(file).resolve()}:{last}"


def label_of(name: str) -> str:
    """Return a plugin's name in logs: "my/file.py:red" and "live:red" -> "red"."""
    return name.rpartition(":")[2] if is_place(name) or is_live(name) else name


def member(place: str, *, what: str, suits: Callable[[Any], bool] = callable) -> Any:
    """Load the object that "path/to/file.py:NAME" names.

    what: the beginning of an error. suits: selects the file's own objects that the ValueError for
    an unknown name proposes. A file that is missing or cannot be imported -> ValueError, too.
    """
    file, _, name = place.rpartition(":")
    path = located(file).resolve()
    found = user_file(path, what=what)
    if name not in found:
        own = [key for key, value in found.items() if _is_own(value, found) and suits(value)]
        raise ValueError(f'{what}: {path.name} has no "{name}"{did_you_mean(name, own)}')
    return found[name]


def _is_own(value: Any, found: dict[str, Any]) -> bool:
    return getattr(value, "__module__", "") == found["__name__"]


def user_file(path: Path, *, what: str) -> dict[str, Any]:
    """Return the objects that a user's Python file defines, by name; it runs once in a process.

    Missing or broken -> ValueError.
    """
    if not path.is_file():
        raise ValueError(f"{what}: there is no file {path}{nearby(path)}")
    unique = f"flowrl_user_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if unique not in sys.modules:
        spec = importlib.util.spec_from_file_location(unique, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[unique] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        # a user's file may raise anything when it is imported
        except (Exception, SystemExit) as error:
            del sys.modules[unique]
            raise ValueError(
                f"{what}: {path} cannot be imported: {type(error).__name__}: {error}"
            ) from error
    return vars(sys.modules[unique])


def called(function: Callable[[], Any], *, what: str) -> Any:
    """Call a user's function, which takes no arguments. Any exception in it -> ValueError."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{what} is called without arguments: {error}") from error
    except ValueError:  # some builtins have no signature; the call below decides
        pass
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} failed: {type(error).__name__}: {error}") from error


# ---------------------------------------------------------------------- live objects


def live_name(given: object) -> str:
    """Make the name of an object without one, for a config: "live:FluxPipeline", "live:red"."""
    named = given if isinstance(given, type) else getattr(given, "__name__", None)
    label = named.__name__ if isinstance(named, type) else named or type(given).__name__
    return LIVE + str(label).strip("<>")


def is_live(name: object) -> bool:
    return isinstance(name, str) and name.startswith(LIVE)
