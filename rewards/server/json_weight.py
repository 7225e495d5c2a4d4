"""What JSON takes in memory once it is parsed, from its bytes alone.

Fifteen megabytes of `{}` are half a gigabyte of Python objects, and one emoji makes a text of ASCII
four times as long.
"""

from __future__ import annotations

MARKS = (b",", b":", b"{", b"[")  # one of them goes with every value; base64 has none
VALUE = 200  # bytes of a value, at most; 85 were measured
ASCII = 2  # bytes of a byte of text, at most: the text, and a copy where escapes are replaced
TEXT = 6  # the same where a letter may be outside Latin-1, which takes 4


def weigh(body: bytes) -> int:
    """Bytes that the parsed JSON takes, at most."""
    letter = ASCII if body.isascii() and b"\\u" not in body else TEXT
    return letter * len(body) + VALUE * values_of(body)


def values_of(body: bytes | bytearray) -> int:
    """At most so many values are in JSON; more, if marks stand in texts."""
    return sum(body.count(mark) for mark in MARKS)
