"""Small drawings of media that are no pictures: a path (T, 2) in the plane, and a motion (T, D) as
D curves over T.

Pillow draws them, as it draws grids: reports need no plotting library.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw
from torch import Tensor

PAPER, FRAME, START = (255, 255, 255), (208, 215, 222), (110, 118, 129)
COLOURS = (
    (47, 111, 222),
    (214, 69, 65),
    (26, 158, 92),
    (221, 138, 27),
    (137, 87, 229),
    (16, 150, 160),
)
MOST = 100  # most curves of a motion
FINER = 3  # factor by which drawings are larger before they are reduced, which smooths lines
MARGIN = 0.08  # empty share of a side at each edge


def drawable(shape: Sequence[int]) -> bool:
    """Whether media of this shape, (n, *D), are drawn: (n, T, D) with two moments or more."""
    return len(shape) == 3 and shape[1] >= 2 and 1 <= shape[2] <= MOST


def drawings(media: Tensor, cell: int) -> list[Image.Image]:
    """Draw media (n, T, D) -> n drawings of cell x cell pixels, all on one scale.

    The start of a path is grey and its end is filled. Values that are not finite are left out.
    """
    values = media.detach().double().cpu()
    points = values if values.shape[2] == 2 else _over_time(values)  # (n, lines, T, 2) or (n, T, 2)
    lines = points[:, None] if points.ndim == 3 else points
    low, span = _scale(lines, equal=points.ndim == 3)
    unit = (lines - low) / span * (1 - 2 * MARGIN) + MARGIN
    unit[..., 1] = 1 - unit[..., 1]  # pixels count downwards, and values grow upwards
    return [_drawn(sample, cell, ends=points.ndim == 3) for sample in unit]


def _over_time(values: Tensor) -> Tensor:
    """Turn (n, T, D) into curves (n, D, T, 2) of (time from 0 to 1, value)."""
    n, steps, size = values.shape
    time = torch.linspace(0, 1, steps, dtype=values.dtype).expand(n, size, steps)
    return torch.stack([time, values.transpose(1, 2)], dim=-1)


def _scale(lines: Tensor, *, equal: bool) -> tuple[Tensor, Tensor]:
    """Find (low (2,), span (2,)) of all finite points; equal: one unit is as long on both axes."""
    points = lines.reshape(-1, 2)
    points = points[points.isfinite().all(1)]
    if not len(points):
        points = torch.zeros(1, 2, dtype=lines.dtype)
    low, high = points.amin(0), points.amax(0)
    span = (high - low).clamp(min=1e-9)
    if equal:
        longest = span.max()
        low, span = (low + high - longest) / 2, longest.expand(2)
    return low, span


def _drawn(lines: Tensor, cell: int, *, ends: bool) -> Image.Image:
    """Draw lines (lines, T, 2) in [0, 1], with y downwards."""
    size = cell * FINER
    image = Image.new("RGB", (size, size), PAPER)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, size - 1, size - 1), outline=FRAME, width=FINER)
    for i, line in enumerate(lines):
        known = line[line.isfinite().all(1)]
        points = [(x * size, y * size) for x, y in known.tolist()]
        colour = COLOURS[i % len(COLOURS)]
        draw.line(points, fill=colour, width=max(FINER, size // 60), joint="curve")
        if ends and points:
            for (x, y), mark in ((points[0], START), (points[-1], colour)):
                r = size // 28
                draw.ellipse((x - r, y - r, x + r, y + r), fill=mark)
    return image.resize((cell, cell), Image.Resampling.LANCZOS)
