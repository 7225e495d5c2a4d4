"""What JSON takes in memory once it is parsed, from its bytes alone.

Fifteen megabytes of `{}` are half a gigabyte of Python objects, and one emoji makes a text of ASCII
four times as long. Base64, which is nearly all of a request, stays as long as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MARKS = (b",", b":", b"{", b"[")  # one of them goes with every value; base64 has none
VALUE = 200  # bytes of a value, at most; 85 were measured
TEXT = 6  # bytes of a byte of text, at most: 4 for a letter outside Latin-1, and copies of escapes
# a long text in base64 alone: without escapes, and not the rest of a text with an escaped quote
LONG = re.compile(rb'(?<!\\)"[A-Za-z0-9+/]{4096,}+={0,2}"')


@dataclass(frozen=True, slots=True)
class Weight:
    """Bytes of what was parsed. long: of long texts in base64. rest: of all else, at most."""

    long: int
    rest: int

    @property
    def total(self) -> int:
        return self.long + self.rest


def weigh(body: bytes | bytearray) -> Weight:
    """An upper bound, in one pass over the bytes."""
    long, values, at = 0, 0, 0
    for match in LONG.finditer(body):
        values += values_of(body, at, match.start())
        at = match.end()
        long += at - match.start()
    values += values_of(body, at, len(body))
    return Weight(long=long, rest=TEXT * (len(body) - long) + VALUE * values)


def values_of(body: bytes | bytearray, start: int, end: int) -> int:
    """At most so many values are in a part of JSON; more, if marks stand in texts."""
    return sum(body.count(mark, start, end) for mark in MARKS)
