"""Turn a text of the command line into a value that its setting takes.

Values are in the grammar of Hydra and OmegaConf: a number, true, false, null, a text (in quotes
where it holds , : = or brackets, or with a backslash before each), [a, b] or {a: b}; ${key} stands
for another key's value. A setting that takes a text gets all input as it was given (1980, true,
1e-4, "# noise", ~/runs), except a list, a mapping or null if it takes those as well.
"""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from flowrl.runtime.text import printable
from flowrl.runtime.yaml_text import DEEPEST

Kinds = frozenset[Any]  # types that a setting takes; empty: they are not known
TEXT: Kinds = frozenset({str})
# beginnings of the names of pydantic's errors -> what a value should be
PLAIN = {"int": "a whole number", "float": "a number", "bool": "true or false"}
# names of text arguments: prompt, negative_prompt_2, system_prompt, lyrics; not use_en_prompt
TEXT_NAMES = re.compile(
    r"(?!(num|use|add|enable)_)(\w+_)?(prompt|text|caption|instruction|lyrics|transcription)(_\d)?"
)

# last words, apart from a number, in the names of arguments that take pictures
PICTURES = ("image", "images", "mask", "masks", "video", "videos")
# names with these first words hold no pictures: num_images, attention_mask
NOT = {"num", "attention"}


def takes_text(name: str) -> bool:
    """Whether an argument of the call is a text, by its name."""
    return TEXT_NAMES.fullmatch(name) is not None


def is_picture(name: str) -> bool:
    """Whether an argument of this name takes pictures, from paths in a file."""
    *before, last = name.rstrip("_0123456789").split("_")
    return last in PICTURES and NOT.isdisjoint(before)


def kinds_of_argument(name: str) -> Kinds:
    """Return what an argument of this name takes: a text, paths of pictures, or anything."""
    if takes_text(name):
        return TEXT
    return frozenset({str, list}) if is_picture(name) else frozenset()


class SeveralValues(ValueError):
    """A text gives several values, and its setting takes one."""


def value_of(raw: str, kinds: Kinds) -> Any:
    """Return the value that a text gives a setting of these kinds. If the grammar has no such text
    -> ValueError whose words follow the given text.

    >>> value_of("1980", TEXT), value_of("1980", frozenset({int})), value_of("a, b", TEXT)
    ('1980', 1980, 'a, b')
    """
    text = bool(kinds & {str, Path}) and not kinds & {int, float, bool, Any}
    try:
        values = parse_values(raw) or [""]
    except (UserWarning, ValueError) as error:
        if text:
            return raw.strip()
        reason = printable(str(error).partition("\n")[0])
        raise ValueError(f"is not key=value ({reason}); quote a text with signs") from error
    if text and len(values) > 1:
        return raw.strip()
    if len(values) > 1:
        raise SeveralValues("gives several values; a run takes one, and a list is written [...]")
    taken = not text or isinstance(values[0], (str, *kinds))
    return values[0] if taken else raw.strip()


def parse_values(text: str) -> list[Any]:
    """Parse the values between commas; ${...} stays as it is, until the config is whole. If the
    grammar has no such text -> ValueError."""
    # imported here, because a server of rewards needs no OmegaConf
    from omegaconf.errors import GrammarParseError
    from omegaconf.grammar_parser import parse
    from omegaconf.grammar_visitor import GrammarVisitor

    levels = accumulate((sign in "[{(") - (sign in "]})") for sign in text)
    if max(levels, default=0) > DEEPEST:
        raise ValueError(f"a value nests at most {DEEPEST} brackets, and this one more")
    as_written = GrammarVisitor(
        node_interpolation_callback=_node_as_written,
        resolver_interpolation_callback=lambda name, args, args_str: (
            f"${{{name}:{','.join(args_str)}}}"
        ),
        memo=None,
    )
    with warnings.catch_warnings():
        # OmegaConf completes "[1,]" with a warning; it should be refused
        warnings.simplefilter("error")
        try:
            return as_written.visit(parse(f"[{text}]", "singleElement", "VALUE_MODE"))
        except GrammarParseError as error:
            raise ValueError(str(error)) from error


def _node_as_written(key: Any, memo: Any) -> Any:
    """Write ${key}; OmegaConf gives the key as a text, from 2.4 on as a record of its parts."""
    return f"${{{getattr(key, 'raw', key)}}}"


def kinds_at(schema: Any, path: Sequence[str]) -> Kinds:
    """Find the types that the setting at a path of a schema takes, in its sections and mappings."""
    for name in path:
        fields = getattr(schema, "model_fields", None)
        if fields is None:
            schema = (get_args(schema) or [None])[-1]
        elif field := fields.get(name):
            untyped = field.annotation is Any and isinstance(field.default, str)
            schema = str if untyped else field.annotation
        else:
            return frozenset()
    return _kinds(schema)


def _kinds(annotation: Any) -> Kinds:
    """Collect the types: str | Literal[2] | None -> str, int, NoneType."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kinds(inside[0])
    if origin in (Union, types.UnionType):
        return frozenset[Any]().union(*map(_kinds, inside))
    return frozenset(map(type, inside)) if origin is Literal else frozenset({origin or annotation})
