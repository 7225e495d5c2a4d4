"""Tables of text as Markdown and LaTeX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

NUMBERS = re.compile(r"[-+0-9.,\[\] ]+")  # a cell that LaTeX sets as mathematics
# what LaTeX reads as an instruction -> how it prints
SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {c: f"\\char{ord(c)}{{}}" for c in "\\~^"}


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["-"] * len(heads), *rows])


def latex(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A tabular of the package booktabs."""
    head, *body = (" & ".join(map(_latex_cell, row)) + r" \\" for row in [heads, *rows])
    begin = rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}"
    return "\n".join(
        [begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    )


def _latex_cell(text: str) -> str:
    if NUMBERS.fullmatch(text):
        return f"${re.sub(',(?! )', '{,}', text)}$"
    return "".join(SPECIAL.get(c, c) for c in text)
