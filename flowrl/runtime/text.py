"""Text from elsewhere made fit to print: prompts, file names, and what servers and libraries say.

A terminal obeys control characters (colours, cursor, title, clipboard) and turns text around at
bidirectional ones, and a line break in a name forges a line of a log. Here they become visible
escapes, such as \\x1b and \\u202e, and long text is cut.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

LIMIT = 300  # most characters of a sentence from elsewhere
LONGEST = 2000  # most characters of a sentence of flowrl, with all its quotations
# Unicode categories of characters that a terminal obeys
OBEYED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
KEPT = frozenset("\n\t\u200c\u200d")  # lines, columns, and joiners, which scripts and emoji need
DEEPEST = 10  # most causes of causes that are followed
NAMED = 8  # most items of a list in a sentence


def visible(text: object, encoding: str = "utf-8") -> str:
    """Return the text with its lines and tabs; other control characters, and characters that an
    encoding does not have, become escapes.

    >>> print(visible("a\\x1b[31m red\\u202e circle"))
    a\\x1b[31m red\\u202e circle
    """
    text = str(text)
    text = text if text.isprintable() else "".join(map(_shown, text))
    return text.encode(encoding, "backslashreplace").decode(encoding)


def printable(text: object, limit: int = LIMIT) -> str:
    """Make a sentence from elsewhere one line of at most `limit` characters, with controls visible.

    >>> print(printable("401\\n  Unauthorized\\x07"))
    401 Unauthorized\\x07
    >>> printable("a" * 9, limit=6)
    'aaa...'
    """
    return _cut(" ".join(str(text).split()), limit)


def one_line(text: object) -> str:
    """Make a sentence of flowrl one line, like `printable`; but spaces stay, since they may be part
    of a path, and it may be longer."""
    return _cut(" ".join(str(text).splitlines()), LONGEST)


def listed(items: Sequence[str]) -> str:
    """Write items into a sentence: the first few, and how many more there are."""
    more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return ", ".join(items[:NAMED]) + more


def items(text: str) -> tuple[str, ...]:
    """Split a text, of one line or several, at its commas.

    >>> items("a dog, a cat,\\n    a bird")
    ('a dog', 'a cat', 'a bird')
    """
    return tuple(item.strip() for item in text.split(","))


def error_text(error: object) -> str:
    """Say an error in one line, with its causes; long quotations of them are cut."""
    text = str(error)
    for cause in _causes(error):
        if len(quoted := str(cause)) > LIMIT:
            text = text.replace(quoted, printable(quoted))
    return one_line(text)


def _cut(line: str, limit: int) -> str:
    line = visible(line[: limit + 1])
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def _causes(error: object) -> Iterator[BaseException]:
    for _ in range(DEEPEST):
        behind = getattr(error, "__cause__", None) or getattr(error, "__context__", None)
        if behind is None:
            return
        yield behind
        error = behind


def _shown(letter: str) -> str:
    if letter in KEPT or letter.isprintable() or unicodedata.category(letter) not in OBEYED:
        return letter
    return letter.encode("unicode_escape").decode("ascii")
