"""Draw docs/images/worlds.webp: scenes of both small worlds, and print how large each is.

    python scripts/bench/worlds.py

The first sentence of each task, by the world's own renderer; of an edit the source and the result,
of a motion the first frame and the last.
"""

from __future__ import annotations

from pathlib import Path

import scenes
import torch
from torch import Tensor

from flowrl.report import grids
from flowrl.shapes.prompts import vocabulary

PAGE = Path(__file__).resolve().parents[2] / "docs" / "images" / "worlds.webp"
SHOWN = {"pictures": ("counting", "position"), "edits": ("replace",), "motions": ("moves left",)}
COLUMNS, CELL = 6, 128


def drawn(world: str) -> tuple[list[Tensor], list[str]]:
    """Pictures of a world, and what was asked for."""
    images, captions = [], []
    for kind, tasks in SHOWN.items():
        rows = scenes.KINDS[world][kind].all_prompts()
        for task in tasks:
            prompt = next(row["prompt"] for row in rows if row["task"] == task)
            found = scenes.described(world, kind, prompt, 0).scenes
            ends = found[:1] if kind == "pictures" else (found[0], found[-1])
            images += [scenes.WORLDS[world].render(scene) for scene in ends]
            captions += [prompt, "after it"][: len(ends)]
    return images, captions


def main(path: Path = PAGE) -> None:
    sides = [drawn(world) for world in scenes.WORLDS]
    images, captions = (sum(part, []) for part in zip(*sides, strict=True))
    grids.grid(torch.stack(images), captions, columns=COLUMNS, cell=CELL).save(path, quality=92)
    for world, kinds in scenes.KINDS.items():
        rows = [row for source in kinds.values() for row in source.all_prompts()]
        nouns = len(scenes.WORLDS[world].language.nouns)
        print(f"{world}: {nouns} objects, {len(rows):,} sentences of {len(vocabulary(rows))} words")


if __name__ == "__main__":
    main()
