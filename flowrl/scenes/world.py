"""What worlds of small pictures share: scenes of placed objects, and what is found in a picture.

Coordinates are pixels of 64 x 64, x to the right, y downwards. An object fills a square tile whose
side is its size; whichever of width and height is the longer one reaches from side to side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.scenes.grammar import RELATIONS, Language

PIXELS = 64
MARGIN = 2  # px, least distance of a tile from the edge of the picture
GAP = 6  # px, least distance between two tiles, along x or along y
DRAWS = 128  # layouts that are drawn at once, of which the first that fits is taken


@dataclass(frozen=True, slots=True)
class Placed:
    """One drawn object."""

    name: str  # a noun of the world
    x: float  # px, horizontal place of the tile's centre
    y: float  # px, vertical place of the tile's centre
    size: int  # px, side of the tile, one of the world's sizes

    @property
    def corner(self) -> tuple[int, int]:
        """Pixel (x, y) at the upper left of the tile; a centre between pixels is rounded."""
        half = self.size / 2
        return round(self.x - half), round(self.y - half)


@dataclass(frozen=True, slots=True)
class Scene:
    """Objects that do not touch on a background of one colour."""

    objects: tuple[Placed, ...]  # one to four, in the order in which a prompt names them
    background: str = "white"  # one of the world's


@dataclass(frozen=True, slots=True)
class FoundObject:
    """One component of a picture."""

    name: str | None  # a noun of the world; None: not recognised
    x: float  # px, horizontal place of the tile's centre, or of the centre of gravity
    y: float  # px, vertical place
    size: float  # px, side of the tile; 0: not recognised
    like: tuple[str, ...] = ()  # nouns that it nearly is


@dataclass(frozen=True, slots=True)
class FoundScene:
    """What is in a picture."""

    objects: tuple[FoundObject, ...]  # the largest first
    background: str | None  # one of the world's; None: another colour

    def known(self) -> bool:
        """Whether the background and every object were recognised."""
        return self.background is not None and all(o.name is not None for o in self.objects)


def truth(scene: Scene) -> FoundScene:
    """What is to be found in the picture of a scene."""
    found = (FoundObject(o.name, o.x, o.y, o.size) for o in scene.objects)
    return FoundScene(tuple(found), scene.background)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallWorld:
    """A world whose pictures can be drawn and read."""

    language: Language  # its words
    sizes: range  # px, sides that an object can have
    backgrounds: tuple[str, ...]  # the first is that of a sentence that names none
    render: Callable[[Scene], Tensor]  # a scene -> (3, 64, 64) fp32 in [0, 1]
    detect: Callable[[Tensor], list[FoundScene]]  # (B, 3, H, W) in [0, 1] -> what each shows


def keyed(*parts: object) -> torch.Generator:
    """A generator whose numbers are a function of these parts."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def place(
    names: Sequence[str],
    sizes: range,
    generator: torch.Generator,
    relation: str | None = None,
) -> tuple[Placed, ...]:
    """Draw sizes, of `sizes`, and places for one to four objects; `relation` holds between the
    first two, within 45 degrees. Two objects are at most 26 px each, three 24 px, four 22 px."""
    count = len(names)
    largest = min(sizes[-1], {2: 26, 3: 24, 4: 22}.get(count, PIXELS))
    while True:
        u = torch.rand(DRAWS, count, 3, generator=generator)
        size = sizes[0] + (u[..., 0] * (largest - sizes[0] + 1)).long()  # (DRAWS, count)
        corner = MARGIN + (u[..., 1:] * (PIXELS - 2 * MARGIN - size + 1)[..., None]).long()
        center = corner + size[..., None] / 2
        apart = (center[:, :, None] - center[:, None]).abs().amax(-1)
        touching = apart < GAP + (size[:, :, None] + size[:, None]) / 2
        fits = touching.sum((1, 2)) == count  # an object touches itself alone
        if relation is not None:
            fits &= holds(relation, center[:, 0] - center[:, 1])
        if fits.any():
            first = int(fits.int().argmax())
            each = zip(names, center[first].tolist(), size[first].tolist(), strict=True)
            return tuple(Placed(name, x, y, side) for name, (x, y), side in each)


def holds(relation: str, offset: Tensor) -> Tensor:
    """Whether offsets (..., 2) point within 45 degrees of a relation's direction."""
    direction = torch.tensor(RELATIONS[relation], dtype=offset.dtype)
    along = offset @ direction
    return along > (offset - along[..., None] * direction).abs().amax(-1)
