"""The world of shapes-sd3: coloured shapes on white, 64x64 px, and its renderer of ground truth.

A scene is a few objects that do not touch, each in a cell of its own on a 3x3 grid, a little off
its centre. Coordinates are pixels, x to the right, y downwards; size is half of the bounding box.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PIXELS = 64
SHAPES = ("circle", "square", "triangle")
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.0, 0.7, 0.1),
    "blue": (0.1, 0.2, 0.9),
    "yellow": (0.95, 0.85, 0.1),
    "purple": (0.6, 0.1, 0.7),
    "black": (0.05, 0.05, 0.05),
}
RELATIONS: dict[str, tuple[int, int]] = {
    "left of": (-1, 0),
    "right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}
CELL = PIXELS / 3  # objects sit in the cells of a 3x3 grid
JITTER = 1.5  # px, largest distance of an object from the centre of its cell, per axis


@dataclass(frozen=True, slots=True)
class Object:
    """One drawn object."""

    shape: str  # a name of SHAPES
    color: str  # a name of COLORS
    x: float  # px, horizontal place of the centre
    y: float  # px, vertical place of the centre
    size: float  # px, half of the bounding box


# Shape -> whether points (u, v) are in it, in units of the half-size around the centre of the
# bounding box. Triangles point up.
INSIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": lambda u, v: u.square() + v.square() <= 1,
    "square": lambda u, v: (u.abs() <= 1) & (v.abs() <= 1),
    "triangle": lambda u, v: (u.abs() <= (v + 1) / 2) & (v <= 1),
}


def render(scene: list[Object], *, supersample: int = 4) -> Tensor:
    """Draw a scene -> (3, 64, 64) fp32 in [0, 1]; edges are antialiased by box-filtering
    `supersample`**2 points a pixel."""
    n = PIXELS * supersample
    grid = (torch.arange(n) + 0.5) / supersample
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    image = torch.ones(3, PIXELS, PIXELS)
    for o in scene:
        mask = INSIDE[o.shape]((x - o.x) / o.size, (y - o.y) / o.size).float()
        alpha = mask.reshape(PIXELS, supersample, PIXELS, supersample).mean((1, 3))
        image = image * (1 - alpha) + torch.tensor(COLORS[o.color])[:, None, None] * alpha
    return image


def place(
    kinds: list[tuple[str, str]], generator: torch.Generator, relation: str | None = None
) -> list[Object]:
    """Draw cells, shifts and sizes for at most nine (shape, colour) pairs; `relation` holds between
    the first two, within 45 degrees."""
    while True:
        cells = torch.randperm(9, generator=generator)[: len(kinds)].tolist()
        scene = []
        for (shape, color), cell in zip(kinds, cells, strict=True):
            a, b, c = torch.rand(3, generator=generator).tolist()
            x = CELL * (cell % 3 + 0.5) + JITTER * (2 * a - 1)
            y = CELL * (cell // 3 + 0.5) + JITTER * (2 * b - 1)
            scene.append(Object(shape, color, x, y, 6.5 + 1.5 * c))
        if relation is None or _holds(relation, scene[0], scene[1]):
            return scene


def _holds(relation: str, a: Object, b: Object) -> bool:
    dx, dy = RELATIONS[relation]
    along = (a.x - b.x) * dx + (a.y - b.y) * dy
    across = abs((a.x - b.x) * dy) + abs((a.y - b.y) * dx)
    return along > across
