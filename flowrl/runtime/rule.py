"""Rules about settings: which do not go together, and which have no effect beside others.

A rule names the facts that it reads by dotted keys, and runs as soon as all of them are known
(flowrl/config/facts.py). The rules of the config's own sections are tables, flowrl/config/rules.py
and run_rules.py; the options of an algorithm, a user's own too, declare theirs as `rules`:

    class Options(Credit):
        top: int = 4
        rules: ClassVar = (
            Rule(
                ("algorithm.top", "batch.group"),
                "{0} of {1} trains every sample; lower it",
                when=lambda top, group: top >= group,
            ),
        )

The field of a setting declares the other settings beside which it is read:

    rate: Annotated[float, read_when("algorithm.window.schedule", "geometric")] = Field(0.1, ...)

Such conditions join with & and |. On a section they hold for all of its settings. Start-up warns of
settings that were given without effect, and docs/configuration shows the conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Rule:
    """A sentence about settings, and the condition under which it is said."""

    # dotted keys of facts, such as "train.shard", "algorithm.credit", "plan.leaves"
    reads: tuple[str, ...]
    # {0}, {1}: the facts in the form of the command line, train.shard=[denoiser]; {batch.group}:
    # the value of a fact. A function of the values makes the sentence; "": nothing to say.
    says: str | Callable[..., str]
    # function of the values; None: each setting differs from its default, or `says` decides
    when: Callable[..., Any] | None = None
    # unread: the first setting, or all settings of this section, have no effect
    kind: Literal["refuse", "warn", "unread"] = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition on other settings."""

    keys: tuple[str, ...]  # dotted keys of the settings that it looks at, each once
    holds: Callable[[Mapping[str, Any]], bool]  # function of dotted key -> value
    words: str  # end of the sentence "it is read with ..."

    def __and__(self, other: Condition) -> Condition:
        return Condition(
            keys=tuple(dict.fromkeys((*self.keys, *other.keys))),
            holds=lambda settings: self.holds(settings) and other.holds(settings),
            words=f"{self.words} and {other.words}",
        )

    def __or__(self, other: Condition) -> Condition:
        return Condition(
            keys=tuple(dict.fromkeys((*self.keys, *other.keys))),
            holds=lambda settings: self.holds(settings) or other.holds(settings),
            words=f"{self.words}, or with {other.words}",
        )

    def rule(self, key: str) -> Rule:
        """Make the rule that says that a setting is not read."""
        present = " and ".join(f"{{{place}}}" for place in range(1, len(self.keys) + 1))
        return Rule(
            (key, *self.keys),
            f"read only with {self.words}; here {present}",
            when=lambda _, *values: not self.holds(dict(zip(self.keys, values, strict=True))),
            kind="unread",
        )


def read_when(key: str, *values: object) -> Condition:
    """Make the condition that a setting has one of these values.

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
    """Make the condition that a setting is a number above the bound."""
    return Condition(
        keys=(key,), holds=lambda settings: settings[key] > bound, words=f"{key} above {bound}"
    )


def read_with(key: str) -> Condition:
    """Make the condition that a setting has any value."""
    return Condition(
        keys=(key,),
        holds=lambda settings: settings[key] is not None,
        words=f"a value of {key}",
    )


def conditions(
    schema: type[BaseModel], prefix: str = "", outer: tuple[Condition, ...] = ()
) -> Iterator[tuple[str, tuple[Condition, ...]]]:
    """Yield (dotted key, condition under which it is read) of every leaf of a schema, in its order.

    The conditions of a section come before those of its settings.
    """
    for name, field in schema.model_fields.items():
        declared = (*outer, *(m for m in field.metadata if isinstance(m, Condition)))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from conditions(field.annotation, f"{prefix}{name}.", declared)
        else:
            yield f"{prefix}{name}", declared


def as_yaml(value: object) -> str:
    """Write a value in the form of the command line: None -> null, True -> true."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def as_word(key: str, value: object) -> str:
    """Write a setting in the form of the command line: train.shard=[denoiser]."""
    given = f"[{','.join(map(str, value))}]" if isinstance(value, list) else as_yaml(value)
    return f"{key}={given}"
