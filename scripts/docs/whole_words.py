"""Keep words such as `--dry-run` and `sd3.5-medium` on one line while the site is built.

A browser breaks a line behind a hyphen, also in code, and no style forbids it for words alone.
mkdocs.yml names this file under `hooks`.
"""

from __future__ import annotations

import re
from typing import Any

CODE = re.compile(r"(<code\b[^>]*>)(.*?)(</code>)", re.S)
# A word with a hyphen outside of a tag; one that is longer may be wider than a telephone.
WORD = re.compile(r"(?<![\w<&/=\"-])([\w.=/~+:'-]*\w-\w[\w.=/~+:'-]*)(?![^<>]*>)")
LONGEST = 32  # letters


def unbroken(html: str) -> str:
    """A page's HTML with each hyphenated word of its code in a span that does not break."""

    def word(found: re.Match[str]) -> str:
        if len(found[1]) > LONGEST:
            return found[0]
        return f'<span class="whole">{found[1]}</span>'

    return CODE.sub(lambda code: code[1] + WORD.sub(word, code[2]) + code[3], html)


def on_page_content(html: str, **_: Any) -> str:
    """mkdocs calls this with each page's HTML."""
    return unbroken(html)
