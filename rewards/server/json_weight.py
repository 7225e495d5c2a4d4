"""The memory that JSON takes once it is parsed, estimated from its bytes alone.

Fifteen megabytes of `{}` are half a gigabyte of Python objects, and one emoji makes a text of ASCII
four times as long.
"""

from __future__ import annotations

MARKS = (b",", b":", b"{", b"[")  # marks, one of which comes with every value; base64 has none
VALUE = 200  # most bytes that a value takes; 85 were measured
ASCII = 2  # most bytes for a byte of text: the text, and a copy in which escapes are replaced
TEXT = 6  # most bytes for a byte of text with a letter outside Latin-1, which takes 4


def weigh(body: bytes) -> int:
    """Bytes that the parsed JSON takes, at most."""
    letter = ASCII if body.isascii() and b"\\u" not in body else TEXT
    return letter * len(body) + VALUE * values_of(body)


def values_of(body: bytes | bytearray) -> int:
    """Most values that JSON can hold; the count is too high if marks stand in texts."""
    return sum(body.count(mark) for mark in MARKS)
