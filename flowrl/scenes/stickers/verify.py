"""A verifier for stickers: which of the known pictures are there, at which size and place.

What differs from the background falls into components. Around each, every object at every size is
laid over the picture at nine places; with d the picture and t the sprite, both less the background,

    error = sum |d - t|^2 / max(sum |t|^2, FAINT)     over the sprite's tile

is 0 for a render, and a component is the object of the least error if that is at most ERROR. A
picture k times as pale has (1 - k)^2; blur hides in the error of objects with few details, so that
the details, d and t less their means of 3 x 3 pixels, must agree too, with an error of at most
DETAIL.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.scenes.grammar import RELATIONS, Picture
from flowrl.scenes.stickers.scenes import BACKGROUNDS, OBJECTS, SIZES, sprites
from flowrl.scenes.world import PIXELS, FoundObject, FoundScene, holds
from flowrl.shapes.verify import components, objects

ERROR, DETAIL = 0.06, 0.45  # largest errors of an object that is recognised
FAINT = 0.02  # mean square of a sprite below which it counts as this much
SEEN = 0.08  # a pixel belongs to an object if a channel, smoothed, is this far from the background
SPECK, MOST = 20, 6  # px, smaller components are ignored; how many of a picture are read
SAME_COLOR = 0.08  # largest distance of a channel from the background's colour
WINDOW = 38  # px, side of the window in which sprites are compared
REACH = 1  # px, how far from the centre of gravity a sprite may lie, per axis


@cache
def _bank(background: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Sprites less a background with their centres of gravity in the middle of a window.

    -> sprites (N * S, 3, W, W), their tiles (N * S, W, W) as 0 or 1, and (N * S, 4): number of the
    name, size, and the middle of the window less the tile's upper left corner, x and y.
    """
    color = torch.tensor(BACKGROUNDS[background])[:, None, None]
    shown, tiles, facts = [], [], []
    for size in SIZES:
        for number, sprite in enumerate(sprites(size)):
            less = sprite[:3] - color * sprite[3]
            x, y = (round(v) for v in _gravity(less.square().sum(0)).tolist())
            left, top = WINDOW // 2 - x, WINDOW // 2 - y
            pad = (left, WINDOW - left - size, top, WINDOW - top - size)
            shown.append(F.pad(less, pad))
            tiles.append(F.pad(torch.ones(size, size), pad))
            facts.append((number, size, x, y))
    return (
        torch.stack(shown).to(device),
        torch.stack(tiles).to(device),
        torch.tensor(facts, device=device),
    )


def _gravity(weight: Tensor) -> Tensor:
    """Centre of gravity (..., 2), x and y, of weights (..., H, W), in px from the upper left."""
    total = weight.sum((-2, -1)).clamp_min(1e-12)
    x = (weight.sum(-2) * (torch.arange(weight.shape[-1], device=weight.device) + 0.5)).sum(-1)
    y = (weight.sum(-1) * (torch.arange(weight.shape[-2], device=weight.device) + 0.5)).sum(-1)
    return torch.stack([x, y], -1) / total[..., None]


def detail(d: Tensor) -> Tensor:
    """What differs from the mean of 3 x 3 pixels, of (B, 3, H, W)."""
    return d - F.avg_pool2d(d, 3, stride=1, padding=1)


def to_world(images: Tensor) -> Tensor:
    """Scale (B, 3, S, S) to (B, 3, 64, 64) fp32 in [0, 1]; other shapes -> ValueError."""
    if images.ndim != 4 or images.shape[1] != 3 or images.shape[2] != images.shape[3]:
        raise ValueError(
            f"the stickers verifier reads square pictures (B, 3, S, S), not {tuple(images.shape)}"
        )
    images = images.float().clamp(0, 1)
    if images.shape[-1] == PIXELS:
        return images
    return F.interpolate(images, (PIXELS, PIXELS), mode="bilinear", antialias=True)


def detect(images: Tensor) -> list[FoundScene]:
    """Read each of (B, 3, S, S) images in [0, 1], in px of the 64 x 64 world; see `to_world` for
    other sizes."""
    images = to_world(images)
    # The background is the median of the two outer rows and columns, where no object is.
    ring = torch.ones(PIXELS, PIXELS, dtype=torch.bool, device=images.device)
    ring[2:-2, 2:-2] = False
    color = images[:, :, ring].median(2).values  # (B, 3)
    palette = torch.tensor(list(BACKGROUNDS.values()), device=images.device)
    far, nearest = (color[:, None] - palette).abs().amax(2).min(1)
    less = images - color[:, :, None, None]
    # Means of 3 x 3 pixels against noise; dilation closes gaps in an object. Two are farther apart.
    seen = F.avg_pool2d(less, 3, stride=1, padding=1).abs().amax(1, keepdim=True) >= SEEN
    seen = F.max_pool2d(seen.float(), 3, stride=1, padding=1)[:, 0] > 0
    rows, masks = _parts(components(seen))
    names = list(BACKGROUNDS)
    found: list[list[FoundObject]] = [[] for _ in range(len(images))]
    for b in nearest[rows].unique().tolist():
        own = nearest[rows] == b
        _match(less, rows[own], masks[own], names[b], found)
    colors = (
        names[b] if same else None for b, same in zip(nearest, far <= SAME_COLOR, strict=True)
    )
    return [FoundScene(tuple(o), c) for o, c in zip(found, colors, strict=True)]


def _parts(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The MOST largest components of each picture, the largest first -> their pictures (K,), masks
    (K, 64, 64)."""
    rows, masks = objects(labels, SPECK)
    order = masks.sum((1, 2)).argsort(descending=True, stable=True)
    rows = rows[order]
    first = (rows[:, None] == rows).tril().sum(1) <= MOST
    return rows[first], masks[order[first]]


def _match(
    less: Tensor, rows: Tensor, masks: Tensor, background: str, found: list[list[FoundObject]]
) -> None:
    """Recognise components (K, 64, 64) of pictures `rows` (K,), which lie on one background, and
    add each to what was found."""
    shown, tiles, facts = _bank(background, less.device)
    middle = _gravity(less[rows].square().sum(1) * masks).round().long()  # (K, 2)
    half = WINDOW // 2 + REACH
    steps = torch.arange(-REACH, REACH + 1, device=less.device)
    shift = torch.cartesian_prod(steps, steps)  # (9, 2)
    at = middle[:, None] + shift + REACH  # upper left corners of windows in the padded picture
    less = F.pad(less, (half,) * 4)
    views = torch.cat([less, less.square().sum(1, keepdim=True)], 1)
    views = views.unfold(2, WINDOW, 1).unfold(3, WINDOW, 1)
    windows, squares = views[rows[:, None], :, at[..., 1], at[..., 0]].split([3, 1], 2)
    # |d - t|^2 = |d|^2 - 2 d t + |t|^2, for all windows and sprites at once
    energy = shown.square().sum((1, 2, 3))
    error = squares.flatten(2) @ tiles.flatten(1).T + energy
    error -= 2 * windows.flatten(2) @ shown.flatten(1).T
    error /= energy.maximum(FAINT * 3 * facts[:, 1] ** 2)
    least, place = error.flatten(1).min(1)
    best, moved = place % len(facts), place // len(facts)
    tile = tiles[best][:, None]
    fine = detail(shown[best])
    apart = detail(windows[torch.arange(len(rows)), moved] * tile - shown[best])
    blur = apart.square().sum((1, 2, 3)) / fine.square().sum((1, 2, 3))
    sure = (least <= ERROR) & (blur <= DETAIL)
    corner = middle + shift[moved] - facts[best, 2:]
    for k, row in enumerate(rows.tolist()):
        x, y = middle[k].tolist()
        if sure[k]:
            number, size = facts[best[k], :2].tolist()
            left, top = corner[k].tolist()
            found[row].append(FoundObject(OBJECTS[number], left + size / 2, top + size / 2, size))
        elif not any(max(abs(o.x - x), abs(o.y - y)) <= o.size / 2 for o in found[row]):
            # what lies in the tile of an object that was recognised is a loose part of it
            found[row].append(FoundObject(None, x, y, 0))


def stated(relation: str, a: FoundObject, b: FoundObject) -> bool:
    """Whether a relation holds between two objects, within 45 degrees."""
    return bool(holds(relation, torch.tensor([a.x - b.x, a.y - b.y])))


def strict(found: FoundScene, picture: Picture) -> bool:
    """Judge whether the picture shows exactly this, and nothing else."""
    asked = sum(thing.count for thing in picture.things)
    return found.known() and len(found.objects) == asked and partial(found, picture) == 1.0


def partial(found: FoundScene, picture: Picture) -> float:
    """The mean of a prompt's terms, in [0, 1].

    Each thing has the term 1 - |n - found| / n (floored at 0); the background, where it is named,
    and the relation have terms of 1 or 0, the relation only where both counts are right.
    """
    chosen = [[o for o in found.objects if o.name == thing.noun] for thing in picture.things]
    terms = [
        max(0.0, 1 - abs(thing.count - len(own)) / thing.count)
        for thing, own in zip(picture.things, chosen, strict=True)
    ]
    if picture.join in RELATIONS:
        right = terms == [1.0, 1.0] and stated(picture.join, chosen[0][0], chosen[1][0])
        terms.append(float(right))
    if picture.background:
        terms.append(float(found.background == picture.background))
    return sum(terms) / len(terms)
