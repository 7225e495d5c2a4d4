"""Turn the equations of a page into MathML while the site is built: no script runs in the page.

mkdocs.yml names this file under `hooks`. An equation is a fenced block with the language `math`, in
LaTeX; GitHub draws the same block.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

FENCE = re.compile(r"^(`{3,})(\w*)[^\n]*\n(.*?)^\1$", re.M | re.S)
# latex2mathml writes a command that it does not know as text, and an alignment sign as a name.
UNREAD = re.compile(r"\\[a-zA-Z]+|<mi>&(?:amp;)?</mi>")


def mathml(latex: str) -> str:
    """One `<math display="block">` on one line.

    Raises ValueError where a command or an alignment sign was not understood.
    """
    # GitHub reads `aligned`, latex2mathml calls the same thing `split`.
    source = re.sub(r"\{aligned\}", "{split}", " ".join(latex.split()))
    drawn = convert(source, display="block").replace(r"\_", "_").replace("&#x0005C;_", "_")
    if unread := UNREAD.search(drawn):
        raise ValueError(
            f"the equation {latex.strip()!r} has {unread[0]!r}, which latex2mathml does not read; "
            "write it with another command"
        )
    return drawn


def with_equations(markdown: str) -> str:
    """A page's Markdown with its `math` blocks drawn; all other blocks stay as they are."""

    def drawn(fence: re.Match[str]) -> str:
        if fence[2] != "math":
            return fence[0]
        # The box rolls sideways where the equation is wider than the page, by keyboard, too.
        return f'<div class="equation" tabindex="0">{mathml(fence[3])}</div>'

    return FENCE.sub(drawn, markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this with each page's Markdown before it makes HTML."""
    return with_equations(markdown)
