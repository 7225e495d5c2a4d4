"""Pictures inside a table, as Hugging Face's datasets write them: {"bytes", "path"}. They stay
encoded, and on the disk, until a prompt needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.data import media


@dataclass(frozen=True)
class PictureCell:
    """A cell that holds a picture, or a list of them."""

    where: str  # the row, as "edits.parquet, row 3"
    column: str  # name of the column
    version: str  # a hash that changes with the table
    folder: Path  # folder from which paths without bytes lead
    # reads the cell: {"bytes", "path"}, or a list of these
    cell: Callable[[], Any] = field(compare=False, repr=False)

    def picture(self, alpha: bool = False) -> Any:
        """Decode the picture as it is seen; alpha: see media.read_picture. A picture that cannot be
        read -> ValueError that names it."""
        return self._decoded(self.cell(), alpha)

    def tobytes(self) -> bytes:
        """Bytes that stand for the picture in the identity of a run."""
        return f"{self.version} {self.where} {self.column}".encode()

    def _decoded(self, cell: Any, alpha: bool) -> Any:
        if isinstance(cell, list):
            return [self._decoded(entry, alpha) for entry in cell]
        what = f'{self.where}: "{self.column}"'
        if cell is None or (not cell.get("bytes") and not cell.get("path")):
            raise ValueError(f"{what} holds no picture")
        if content := cell.get("bytes"):
            return media.read_picture(Path(what), content=content, alpha=alpha)
        return media.read_picture(self.folder / cell["path"], alpha=alpha)


def is_struct(names: set[str]) -> bool:
    """Whether a cell with fields of these names is a picture."""
    return names == {"bytes", "path"}
