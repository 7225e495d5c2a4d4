"""Pictures inside a table, as Hugging Face's datasets write them: {"bytes", "path"}. They stay
encoded, and on the disk, until a prompt needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.data import media


@dataclass(frozen=True)
class Stored:
    """A cell that holds a picture, or a list of them.

    where: the row, "edits.parquet, row 3". version: of the table. cell() -> what the cell holds,
    {"bytes", "path"}. folder: where paths without bytes begin.
    """

    where: str
    column: str
    version: str
    folder: Path
    cell: Callable[[], Any] = field(compare=False, repr=False)

    def picture(self) -> Any:
        """The decoded picture, RGB and upright. What cannot be read -> ValueError that names it."""
        return self._decoded(self.cell())

    def tobytes(self) -> bytes:
        """What stands for it in the identity of a run."""
        return f"{self.version} {self.where} {self.column}".encode()

    def _decoded(self, cell: Any) -> Any:
        if isinstance(cell, list):
            return [self._decoded(entry) for entry in cell]
        what = f'{self.where}: "{self.column}"'
        if cell is None or (not cell.get("bytes") and not cell.get("path")):
            raise ValueError(f"{what} holds no picture")
        if content := cell.get("bytes"):
            return media.to_pil(media.decode_image(content, what))[0]
        return self._opened(self.folder / cell["path"])

    def _opened(self, path: Path) -> Image.Image:
        return media.to_pil(media.read_image(path))[0]


def is_struct(names: set[str]) -> bool:
    """Whether a cell with fields of these names is a picture."""
    return names == {"bytes", "path"}
