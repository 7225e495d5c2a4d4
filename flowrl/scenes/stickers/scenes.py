"""The world of stickers: recognisable objects on a plain background, 64x64 px, and its renderer.

A scene is a few objects that do not touch. Coordinates are pixels, x to the right, y downwards. An
object fills a square tile whose side is its size; whichever of width and height is the longer one
reaches from side to side. The pictures are Noto Emoji's (NOTICE beside this file), drawn once at
56 px a tile by scripts/embedded/draw_stickers.py.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.scenes.world import PIXELS, Scene

SHEET = Path(__file__).with_name("sprites.png")  # OBJECTS in rows of COLUMNS tiles, RGBA
TILE, COLUMNS = 56, 8  # px, side of a tile of the sheet; tiles in a row
SIZES = range(18, 29)  # px, sides that an object can have

# fmt: off
OBJECTS = (
    "octopus", "cat", "dog", "frog", "panda", "fox", "ladybug", "turtle",
    "whale", "crab", "butterfly", "penguin", "unicorn", "ghost", "robot", "rocket",
    "taco", "pizza", "apple", "strawberry", "watermelon", "avocado", "mushroom", "cake",
    "doughnut", "car", "bus", "sailboat", "balloon", "umbrella", "cactus", "sunflower",
)
# fmt: on
# Pastels on which every object stands out.
BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    "white": (1.0, 1.0, 1.0),
    "blue": (0.62, 0.85, 1.00),
    "green": (0.50, 0.88, 0.55),
    "yellow": (1.00, 0.94, 0.55),
    "pink": (1.00, 0.74, 0.88),
    "purple": (0.80, 0.64, 0.96),
}


@cache
def _sheet() -> Tensor:
    """The sprites, (N, 4, 56, 56) fp32: colour times alpha, and alpha, in [0, 1]."""
    with Image.open(SHEET) as image:
        sheet = torch.from_numpy(np.array(image.convert("RGBA"))).float() / 255
    rows = sheet.reshape(-1, TILE, COLUMNS, TILE, 4)
    tiles = rows.permute(0, 2, 4, 1, 3).reshape(-1, 4, TILE, TILE)
    return torch.cat([tiles[:, :3] * tiles[:, 3:], tiles[:, 3:]], 1)


@cache
def sprites(size: int) -> Tensor:
    """Every object at a size -> (N, 4, size, size) fp32: colour times alpha, and alpha.

    A pixel is the mean of the area of the sheet that it covers.
    """
    edges = torch.arange(size + 1, dtype=torch.float64) * TILE / size
    pixel = torch.arange(TILE, dtype=torch.float64)
    low = torch.maximum(edges[:-1, None], pixel)
    high = torch.minimum(edges[1:, None], pixel + 1)
    share = ((high - low).clamp_min(0) * size / TILE).float()  # (size, 56), rows sum to 1
    return share @ _sheet() @ share.T


def render(scene: Scene) -> Tensor:
    """Draw a scene -> (3, 64, 64) fp32 in [0, 1]; what lies outside the picture is cut off."""
    image = torch.tensor(BACKGROUNDS[scene.background])[:, None, None].repeat(1, PIXELS, PIXELS)
    for sticker in scene.objects:
        left, top = sticker.corner
        sprite = sprites(sticker.size)[OBJECTS.index(sticker.name)]
        x, y = max(left, 0), max(top, 0)
        sprite = sprite[:, y - top : PIXELS - top, x - left : PIXELS - left]
        seen = image[:, y : y + sprite.shape[1], x : x + sprite.shape[2]]
        seen.mul_(1 - sprite[3]).add_(sprite[:3])
    return image.clamp_(0, 1)
