"""Pictures inside a table, as Hugging Face's datasets write them, {"bytes", "path"}, or as bytes
alone. They stay encoded, and on the disk, until a prompt needs them."""

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

    def __str__(self) -> str:
        return f'{self.where}: "{self.column}"'

    def picture(self, alpha: bool = False) -> Any:
        """Decode the picture as it is seen; alpha: see media.read_picture. A picture that cannot be
        read -> ValueError that names it."""
        return self._decoded(self.cell(), alpha)

    def header(self) -> media.Header:
        """Read the header of the picture; errors as `picture`."""
        return media.header(*self._source(self.cell()))

    def content(self) -> bytes:
        """Return the bytes of the picture's file."""
        path, content = self._source(self.cell())
        return content or path.read_bytes()

    def tobytes(self) -> bytes:
        """Bytes that stand for the picture in the identity of a run."""
        return f"{self.version} {self.where} {self.column}".encode()

    def _decoded(self, cell: Any, alpha: bool) -> Any:
        if isinstance(cell, list):
            return [self._decoded(entry, alpha) for entry in cell]
        path, content = self._source(cell)
        return media.read_picture(path, content=content, alpha=alpha)

    def _source(self, cell: Any) -> tuple[Path, bytes | None]:
        """The bytes of a picture with the name for errors, or the path of its file."""
        cell = {"bytes": cell} if isinstance(cell, bytes) else cell or {}
        if content := cell.get("bytes"):
            return Path(str(self)), content
        if not cell.get("path"):
            raise ValueError(f"{self} holds no picture")
        return self.folder / cell["path"], None


def is_struct(names: set[str]) -> bool:
    """Whether a cell with fields of these names is a picture."""
    return names == {"bytes", "path"}
