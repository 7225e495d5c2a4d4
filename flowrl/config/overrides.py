"""Words of the command line: "key.sub=value" in the grammar of Hydra.

`key=value` and `++key=value` set a key, `+key=value` adds one that is not there, `~key` leaves one
out. flowrl/runtime/typed_text.py reads the value, by what the setting takes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.runtime.text import printable
from flowrl.runtime.typed_text import TEXT, Kinds, SeveralValues, value_of

WORD = re.compile(
    r"(?P<sign>\+\+|\+|~|)(?P<key>[a-z_$][\w$/-]*(\.[\w$-]+)*)(=\s*(?P<value>.*))?",
    re.ASCII | re.DOTALL | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    text: str  # the whole word
    sign: str  # "", "+", "++" or "~"
    key: str  # dotted, as "batch.group"
    raw: str | None  # value as it was given; None for "~key"

    def value(self, kinds: Kinds = TEXT) -> Any:
        """The value for a setting of these kinds; ValueError says why the grammar has no such
        one."""
        if self.raw is None:
            return None
        try:
            return value_of(self.raw, kinds)
        except ValueError as error:
            if float in kinds and re.fullmatch(r"0,\d+|\d+,0\d*", self.raw):
                raise ValueError(f"write {self.key}={self.raw.replace(',', '.')}") from None
            several = isinstance(error, SeveralValues)
            loop = as_loop(self.key, self.raw.split(",")) if several else ""
            raise ValueError(f'"{printable(self.text)}" {error}{loop}') from error


def as_loop(key: str, values: Sequence[Any]) -> str:
    """End a sentence with how to try several values: they are several runs."""
    if key == "seed":
        given = ",".join(str(value).strip() for value in values)
        return f"; several seeds are several runs: flowrl train ... --seeds {given}"
    listed = " ".join(shlex.quote(str(value)) for value in values)
    return (
        f"; several runs are a loop of the shell: for v in {listed}; do flowrl train ... {key}=$v"
        f" output=runs/{key}-$v; done"
    )


def parse_override(text: str) -> Override:
    """Parse one word of the command line; raise ValueError where it has another form.

    >>> parse_override("+model.pipeline.sizes=[64, '1:2']").key
    'model.pipeline.sizes'
    """
    word = WORD.fullmatch(text)
    if word is None or (word["value"] is None and word["sign"] != "~"):
        raise ValueError(
            f'"{printable(text)}" is not key=value (nor +key=value, which adds a key that is not'
            " there, or ~key, which leaves one out)"
        )
    if word["value"] == "":
        raise ValueError(
            f'"{printable(text)}" has no value; was a shell variable unset? give one, or'
            f" {word['key']}=null for none, or {word['key']}='\"\"' for an empty text"
        )
    return Override(text=text, sign=word["sign"], key=word["key"], raw=word["value"])
