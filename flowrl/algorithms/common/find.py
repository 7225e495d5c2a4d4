"""The class behind an algorithm's name: a module of flowrl/algorithms, "path/to/file.py:Class", or
an entry point in the group flowrl.algorithms."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from flowrl.algorithms.common.base import Algorithm, Options
from flowrl.runtime import registry

OWN = ("plan", "columns", "score", "loss", "fit")  # methods that a subclass must define


def algorithm_class(name: str) -> type[Algorithm]:
    """The class behind a name; ValueError for an unknown, broken or incomplete one."""
    found = registry.plugin(
        "flowrl.algorithms", name, "ALGORITHM", what="algorithm", suits=is_algorithm
    )
    return checked(found, f'algorithm "{name}"')


def is_algorithm(value: Any) -> bool:
    """Whether a value is a subclass of Algorithm."""
    return isinstance(value, type) and issubclass(value, Algorithm)


def checked(found: Any, what: str) -> type[Algorithm]:
    """Return the class if it defines all that it must; else raise ValueError, which begins with
    `what`."""
    if not is_algorithm(found):
        said = getattr(found, "__name__", repr(found))
        raise ValueError(f"{what}: {said} is not a subclass of flowrl.algorithms.Algorithm")
    cls: type[Algorithm] = found
    if not (isinstance(cls.Config, type) and issubclass(cls.Config, Options)):
        raise ValueError(
            f"{what}: the Config of {cls.__name__} is not a subclass of"
            " flowrl.algorithms.Options, a pydantic model"
        )
    if left := [method for method in OWN if getattr(cls, method) is getattr(Algorithm, method)]:
        raise ValueError(
            f"{what}: {cls.__name__} does not define {', '.join(left)}; a subclass of"
            " TransitionMethod or ForwardMethod needs only loss"
        )
    hooks = {name for base in cls.__mro__[1:] for name in vars(base) if name[0] != "_"}
    codes = [value.__code__ for value in vars(cls).values() if hasattr(value, "__code__")]
    called = {name for code in codes for name in code.co_names}
    for name in vars(cls).keys() - hooks - called:
        if near := get_close_matches(name, hooks, n=1, cutoff=0.8):
            raise ValueError(
                f"{what}: nothing reads {cls.__name__}.{name}; call it {near[0]}, or, if it is"
                " something else, a name that is less alike"
            )
    return cls
