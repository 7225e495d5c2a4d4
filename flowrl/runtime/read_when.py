"""Under which other settings a setting is read, declared on its field:

    knee: Annotated[int, read_when("algorithm.window.schedule", "exp_decay")] = Field(13, ...)

Conditions name settings by their dotted keys and join with & and |. On a section they hold for all
of its settings. Start-up warns of what was set in vain, and docs/configuration.md shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What must hold of other settings."""

    keys: tuple[str, ...]  # of the settings that it looks at
    holds: Callable[[Mapping[str, object]], bool]  # of dotted key -> value
    words: str  # end the sentence "it is read with ..."

    def __and__(self, other: Condition) -> Condition:
        return Condition(
            keys=(*self.keys, *other.keys),
            holds=lambda settings: self.holds(settings) and other.holds(settings),
            words=f"{self.words} and {other.words}",
        )

    def __or__(self, other: Condition) -> Condition:
        return Condition(
            keys=(*self.keys, *other.keys),
            holds=lambda settings: self.holds(settings) or other.holds(settings),
            words=f"{self.words}, or with {other.words}",
        )


def read_when(key: str, *values: object) -> Condition:
    """The setting has one of these values.

    >>> condition = read_when("draw.mode", "refill", "balance")
    >>> condition.words, condition.holds({"draw.mode": "once"})
    ('draw.mode=refill or balance', False)
    """
    *others, last = map(as_yaml, values)
    first = f"{', '.join(others)} or " if others else ""
    return Condition(
        keys=(key,),
        holds=lambda settings: settings[key] in values,
        words=f"{key}={first}{last}",
    )


def read_above(key: str, bound: float) -> Condition:
    """The setting is a number above the bound."""

    def holds(settings: Mapping[str, object]) -> bool:
        value = settings[key]
        assert isinstance(value, int | float), f"{key} is not a number"
        return value > bound

    return Condition(keys=(key,), holds=holds, words=f"{key} above {bound}")


def read_with(key: str) -> Condition:
    """The setting has a value, whichever."""
    return Condition(
        keys=(key,),
        holds=lambda settings: settings[key] is not None,
        words=f"a value of {key}",
    )


def conditions(
    schema: type[BaseModel], prefix: str = "", outer: tuple[Condition, ...] = ()
) -> Iterator[tuple[str, tuple[Condition, ...]]]:
    """(dotted key, what must hold for it to be read) of every leaf of a schema, in its order.

    The conditions of a section come before those of its settings.
    """
    for name, field in schema.model_fields.items():
        declared = (*outer, *(m for m in field.metadata if isinstance(m, Condition)))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from conditions(field.annotation, f"{prefix}{name}.", declared)
        else:
            yield f"{prefix}{name}", declared


def as_yaml(value: object) -> str:
    """A value as the command line takes it: None -> null, True -> true."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
