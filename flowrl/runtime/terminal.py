"""The terminal as flowrl writes to it: text is shown as it is, never obeyed."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from flowrl.runtime.text import visible


class Terminal(Console):
    """A rich console for texts, and tables of texts: brackets and :names: mean nothing, control
    characters are visible. Takes the arguments of rich's Console."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Make escapes take their place in a table before its columns are measured."""
        return super().render_str(visible(text, self.encoding), **options)

    def on_broken_pipe(self) -> None:
        """Print no more; rich would end the process here."""
        self.quiet = True
