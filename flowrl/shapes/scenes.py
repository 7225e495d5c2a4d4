"""The world of shapes-sd3: coloured shapes on white, 64x64 px, and the renderer that draws ground truth.

A scene is at most four objects that do not touch. Coordinates are pixels, x to the right, y downwards; size is half of the bounding box.
"""

from __future__ import annotations

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
RELATIONS: dict[str, tuple[int, int]] = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
GAP = 4.0  # px between bounding boxes


@dataclass(frozen=True, slots=True)
class Object:
    """One drawn object: shape and colour by name, centre and half-size in px."""

    shape: str
    color: str
    x: float
    y: float
    size: float


def inside(shape: str, u: Tensor, v: Tensor) -> Tensor:
    """Membership of points (u, v), in units of the half-size around the centre of the bounding box -> bool. Triangles point up."""
    if shape == "circle":
        return u.square() + v.square() <= 1
    if shape == "square":
        return (u.abs() <= 1) & (v.abs() <= 1)
    return (u.abs() <= (v + 1) / 2) & (v <= 1)


def render(scene: list[Object], *, supersample: int = 4) -> Tensor:
    """Draw a scene -> (3, 64, 64) fp32 in [0, 1]; edges are antialiased by box-filtering `supersample`**2 points a pixel."""
    n = PIXELS * supersample
    grid = (torch.arange(n) + 0.5) / supersample
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    image = torch.ones(3, PIXELS, PIXELS)
    for o in scene:
        mask = inside(o.shape, (x - o.x) / o.size, (y - o.y) / o.size).float()
        alpha = mask.reshape(PIXELS, supersample, PIXELS, supersample).mean((1, 3))
        image = image * (1 - alpha) + torch.tensor(COLORS[o.color])[:, None, None] * alpha
    return image


def place(kinds: list[tuple[str, str]], generator: torch.Generator, relation: str | None = None) -> list[Object]:
    """Random non-touching positions and sizes for (shape, colour) pairs; `relation` holds between the first two, within 45 degrees."""
    low, high = (7.0, 10.0) if len(kinds) <= 2 else (6.0, 8.0)
    while True:
        r = torch.rand((len(kinds), 3), generator=generator).tolist()
        sizes = [low + (high - low) * a for a, _, _ in r]
        xs = [s + 1 + (PIXELS - 2 * s - 2) * b for s, (_, b, _) in zip(sizes, r, strict=True)]
        ys = [s + 1 + (PIXELS - 2 * s - 2) * c for s, (_, _, c) in zip(sizes, r, strict=True)]
        scene = [Object(shape, color, x, y, s) for (shape, color), x, y, s in zip(kinds, xs, ys, sizes, strict=True)]
        if _apart(scene) and (relation is None or _holds(relation, scene[0], scene[1])):
            return scene


def _apart(scene: list[Object]) -> bool:
    return all(
        max(abs(a.x - b.x), abs(a.y - b.y)) >= a.size + b.size + GAP for i, a in enumerate(scene) for b in scene[:i]
    )


def _holds(relation: str, a: Object, b: Object) -> bool:
    dx, dy = RELATIONS[relation]
    along = (a.x - b.x) * dx + (a.y - b.y) * dy
    across = abs((a.x - b.x) * dy) + abs((a.y - b.y) * dx)
    return along > across
