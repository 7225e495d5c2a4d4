"""Run the notebooks of docs/notebooks, and keep what they show.

    python scripts/docs/notebooks.py            # all of them
    python scripts/docs/notebooks.py align      # one

Each runs in a folder of its own, with a kernel of its own, as a reader starts it; a cell that fails
ends the script. What is kept depends on no machine: no times of cells and no paths.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def run(name: str, folder: str | Path) -> nbformat.NotebookNode:
    """Execute a notebook's cells in a folder -> the notebook with what they show."""
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    options = {"kernel_name": "python3", "timeout": 300, "record_timing": False}
    where = {"metadata": {"path": str(folder)}}
    return NotebookClient(book, **options, resources=where).execute()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help=f"of {', '.join(NAMES)}")
    for name in parser.parse_args().names:
        with tempfile.TemporaryDirectory() as folder:
            book = run(name, folder)
        book.metadata.language_info = {"name": "python"}
        nbformat.write(book, NOTEBOOKS / f"{name}.ipynb")
        print(f"{name}: {(NOTEBOOKS / f'{name}.ipynb').stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
