"""Put CHANGELOG.md into the page docs/changelog.md while the site is built.

mkdocs.yml names this file under `hooks`. The page is a heading and a mark; GitHub shows the file
itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "CHANGELOG.md"
MARK = "<!-- CHANGELOG.md -->"


def with_changelog(markdown: str, changelog: str) -> str:
    """A page with the changelog at its mark, if it has one; links lead from docs/ on."""
    _, _, entries = changelog.partition("\n")  # without its heading, as the page has one
    return markdown.replace(MARK, entries.replace("](docs/", "]("))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this with each page's Markdown before it makes HTML."""
    if MARK not in markdown:
        return markdown
    return with_changelog(markdown, FILE.read_text(encoding="utf-8"))
