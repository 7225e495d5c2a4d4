"""Words of the command line: "key.sub=value" in the grammar of Hydra and OmegaConf.

`key=value` and `++key=value` set a key, `+key=value` adds one that is not there, `~key` leaves one
out. A value is a number, true, false, null, a text (in quotes where it holds , : = or brackets, or
with a backslash before each), [a, b] or {a: b}; ${key} stands for another key's value.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from omegaconf.errors import GrammarParseError
from omegaconf.grammar_parser import parse
from omegaconf.grammar_visitor import GrammarVisitor

from flowrl.runtime.text import printable
from flowrl.runtime.yaml_text import DEEPEST

WORD = re.compile(
    r"(?P<sign>\+\+|\+|~|)(?P<key>[a-z_$][\w$/-]*(\.[\w$-]+)*)(=\s*(?P<value>.*))?",
    re.ASCII | re.DOTALL | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    text: str
    sign: str  # "", "+", "++" or "~"
    key: str
    value: Any  # None of "~key"


def parse_override(text: str) -> Override:
    """One word of the command line. Not in the grammar -> ValueError that says why.

    >>> parse_override("+model.pipeline.sizes=[64, '1:2']").value
    [64, '1:2']
    """
    word = WORD.fullmatch(text)
    if word is None or (word["value"] is None and word["sign"] != "~"):
        raise ValueError(f'"{printable(text)}" is not key=value')
    if word["value"] == "":
        raise ValueError(
            f'"{printable(text)}" has no value; was a shell variable unset? give one, or'
            f" {word['key']}=null for none, or {word['key']}='\"\"' for an empty text"
        )
    try:
        values = parse_values(word["value"] or "")
    except (GrammarParseError, UserWarning, ValueError) as error:
        reason = printable(str(error).partition("\n")[0])
        raise ValueError(
            f'"{printable(text)}" is not key=value ({reason}); quote a text with signs'
        ) from error
    if len(values) > 1:
        raise ValueError(
            f'"{printable(text)}" gives several values; a run takes one, and a list is written'
            f" {word['key']}=[...]"
        )
    value = values[0] if values else None
    return Override(text=text, sign=word["sign"], key=word["key"], value=value)


def parse_values(text: str) -> list[Any]:
    """The values between commas; ${...} stays as it is, until the config is whole."""
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
        warnings.simplefilter("error")  # of "[1,]", which OmegaConf would complete
        return as_written.visit(parse(f"[{text}]", "singleElement", "VALUE_MODE"))


def _node_as_written(key: Any, memo: Any) -> Any:
    """${key}; OmegaConf gives the key as a text, from 2.4 on as a record of its parts."""
    return f"${{{getattr(key, 'raw', key)}}}"
