"""A progress bar below the cell of a notebook."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from IPython import get_ipython
from IPython.display import display
from rich.progress import Progress


class CellBar(Progress):
    """Rich's bar, drawn again in its place by the notebook itself: rich would need ipywidgets."""

    # number of a cell -> its output that an earlier bar left empty: a cell needs one for all
    empty: ClassVar[dict[int, Any]] = {}
    shown: Any = None  # the notebook's output that holds the bar
    drawn = 0.0  # time when it was drawn last

    def start(self) -> None:
        self.cell = get_ipython().execution_count
        self.shown = self.shown or self.empty.pop(self.cell, None) or display(self, display_id=True)

    def update(self, *task: Any, **changes: Any) -> None:
        super().update(*task, **changes, refresh=time.monotonic() - self.drawn > 0.2)

    def refresh(self) -> None:
        if self.shown:
            self.shown.update(self)
            self.drawn = time.monotonic()

    def stop(self) -> None:
        self.refresh()
        if not self.tasks:
            self.empty[self.cell] = self.shown
