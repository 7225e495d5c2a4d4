"""A verifier for shapes: what is in the picture, and does it match the prompt's clauses.

The clauses and their reading are GenEval's (arXiv:2310.11513). On white, a pixel that is covered to
the fraction a by colour c is 1 - a (1 - c): its *direction* from white tells the colour whatever
the coverage, its length the coverage. Objects are connected components of one colour; a shape is
recognised by the overlap (intersection over union) with the ideal shape in its bounding box, so a
blob of the right area is not taken for a circle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.shapes.scenes import COLORS, INSIDE, PIXELS, RELATIONS, SHAPES

COVERED = 0.5  # a pixel belongs to an object from this coverage on
SAME_COLOR = 0.92  # cosine with the colour's direction from white
SPECK = 12  # px; smaller components are ignored
# IoU with the ideal shape from which a shape is recognised. A triangle that is softened (by the
# VAE) loses its tip and with it box height; circles and squares never exceed 0.57 with a triangle,
# but 0.86 with each other.
OVERLAP = {"circle": 0.78, "square": 0.78, "triangle": 0.68}
SQUARENESS = 0.72  # least ratio of shorter to longer side of a bounding box
SLACK = 0.06  # by which an outline that is nearly a shape may miss any of these


@dataclass(frozen=True, slots=True)
class FoundShape:
    """One component of one colour, and its bounding box."""

    shape: str | None  # a name of SHAPES; None: not recognised
    color: str  # a name of COLORS
    x: float  # px, horizontal place of the box's centre
    y: float  # px, vertical place of the box's centre
    width: float  # px, width of the box
    height: float  # px, height of the box
    like: tuple[str, ...] = ()  # names of SHAPES that it is or nearly is
    margins: tuple[float, ...] = ()  # by how much it is each of SHAPES; below 0 it is not


def components(mask: Tensor) -> Tensor:
    """Label 8-connected components of (n, H, W) bool -> (n, H, W) int64, 0 outside; the label of a
    component is its largest pixel number + 1.

    A sweep spreads the largest label along whole runs of each row and each column, and then to
    diagonal neighbours.
    """
    n, h, w = mask.shape
    label = torch.arange(1, h * w + 1, device=mask.device).reshape(1, h, w) * mask
    lines = torch.arange(n * h, device=mask.device).reshape(n, h, 1) * (w + 1)
    rows = lines + (~mask).cumsum(2)  # number of the run that a pixel belongs to
    lines = torch.arange(n * w, device=mask.device).reshape(n, 1, w) * (h + 1)
    columns = lines + (~mask).cumsum(1)
    while True:
        new = label
        for runs, count in ((rows, n * h * (w + 1)), (columns, n * w * (h + 1))):
            best = torch.zeros(count, dtype=torch.int64, device=mask.device).scatter_reduce_(
                0, runs.flatten(), new.flatten(), "amax"
            )
            new = best[runs] * mask
        new = F.max_pool2d(new[:, None].float(), 3, stride=1, padding=1)[:, 0].long() * mask
        if torch.equal(new, label):
            return label
        label = new


def to_world(images: Tensor) -> Tensor:
    """Scale (B, 3, H, W) to (B, 3, 64, 64): the longer side becomes 64 px (antialiased), and white
    paper fills what is missing."""
    if images.ndim != 4:
        raise ValueError(
            "the shapes verifier reads images (B, 3, H, W), not media of shape"
            f" {tuple(images.shape)}"
        )
    height, width = images.shape[-2:]
    if height == width == PIXELS:
        return images
    size = [max(1, round(side * PIXELS / max(height, width))) for side in (height, width)]
    small = F.interpolate(images.float(), size, mode="bilinear", antialias=True)
    return F.pad(small, (0, PIXELS - size[1], 0, PIXELS - size[0]), value=1.0)


def detect(images: Tensor) -> list[list[FoundShape]]:
    """Find the objects in each of (B, 3, H, W) images in [0, 1], in px of the 64x64 world; see
    `to_world` for other sizes."""
    names = list(COLORS)
    if images.shape[-3:] != (3, PIXELS, PIXELS) or images.ndim != 4:
        images = to_world(images)
    color, covered = nearest(1 - images.float().clamp(0, 1))
    planes = torch.stack([covered & (color == c) for c in range(len(names))], 1)  # (B, C, H, W)
    busy = torch.nonzero(planes.flatten(2).sum(2) >= SPECK)  # planes that hold anything
    out: list[list[FoundShape]] = [[] for _ in range(len(images))]
    if not len(busy):
        return out
    rows, masks = objects(components(planes[busy[:, 0], busy[:, 1]]))
    if not len(masks):
        return out
    images_of, colors = busy[rows].T.tolist()
    found = recognise(masks, [names[c] for c in colors])
    for image, shape in zip(images_of, found, strict=True):
        out[image].append(shape)
    return out


def nearest(away: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels' distances from white (B, 3, H, W) -> (the number of the colour that each is nearest
    to (B, H, W), whether it is near enough to it and covered)."""
    toward = 1 - torch.tensor([*COLORS.values()], device=away.device)  # (C, 3)
    length = away.norm(dim=1).clamp_min(1e-6)
    cosine = torch.einsum("bkhw,ck->bchw", away / length[:, None], F.normalize(toward, dim=1))
    best, color = cosine.max(1)
    coverage = length / toward.norm(dim=1)[color]
    return color, (coverage >= COVERED) & (best >= SAME_COLOR)


def objects(labels: Tensor, least: int = SPECK) -> tuple[Tensor, Tensor]:
    """Find the components of (n, H, W) labels of at least so many pixels -> (their planes (K,),
    masks (K, H, W))."""
    stride = PIXELS * PIXELS + 1  # makes one number of plane and label
    plane = torch.arange(len(labels), device=labels.device)[:, None, None]
    values, counts = (labels + stride * plane).unique(return_counts=True)
    values = values[(values % stride > 0) & (counts >= least)]
    rows = values // stride
    return rows, labels[rows] == (values % stride)[:, None, None]


def recognise(masks: Tensor, colors: Iterable[str]) -> list[FoundShape]:
    """Recognise shape, centre and size of each component (K, H, W) bool of a colour.

    Its shape is the one that it overlaps most, if it does so enough; it is nearly each shape that
    misses the largest overlap, or what is enough, by at most SLACK. The margin of a shape is the
    least of what its overlap has above what is enough and above any other's, and of what the box is
    squarer than it has to be.
    """
    _, h, w = masks.shape
    ys, xs = torch.arange(h, device=masks.device), torch.arange(w, device=masks.device)
    rows, cols = masks.any(2), masks.any(1)
    top, bottom = rows.float().argmax(1), h - rows.flip(1).float().argmax(1)
    left, right = cols.float().argmax(1), w - cols.flip(1).float().argmax(1)
    width, height = (right - left).float(), (bottom - top).float()
    u = ((xs + 0.5 - left[:, None]) / width[:, None] * 2 - 1)[:, None, :].expand(masks.shape)
    v = ((ys + 0.5 - top[:, None]) / height[:, None] * 2 - 1)[:, :, None].expand(masks.shape)
    ideal = [INSIDE[s](u, v) & (u.abs() <= 1) & (v.abs() <= 1) for s in SHAPES]
    shapes = torch.stack(ideal, 1)  # (K, S, H, W)
    overlap, union = shapes & masks[:, None], shapes | masks[:, None]
    ious = overlap.flatten(2).sum(2) / union.flatten(2).sum(2)
    iou, shape = ious.max(1)
    enough = torch.tensor([OVERLAP[s] for s in SHAPES], device=masks.device)
    squareness = torch.minimum(width, height) / torch.maximum(width, height)
    known = (iou >= enough[shape]) & (squareness >= SQUARENESS)
    near = ious >= torch.maximum(enough, iou[:, None]) - SLACK
    near &= (squareness >= SQUARENESS - SLACK)[:, None]
    itself = torch.eye(len(SHAPES), dtype=torch.bool, device=masks.device)
    others = ious[:, None].masked_fill(itself, 0).amax(2)
    margins = torch.minimum(ious - torch.maximum(enough, others), squareness[:, None] - SQUARENESS)
    box = torch.stack([(left + right) / 2, (top + bottom) / 2, width, height], 1)
    sure = zip(shape.tolist(), known.tolist(), strict=True)
    names = [SHAPES[s] if right else None for s, right in sure]
    likes = [tuple(compress(SHAPES, close)) for close in near.tolist()]
    each = zip(names, colors, *box.T.tolist(), likes, map(tuple, margins.tolist()), strict=True)
    return [FoundShape(*one) for one in each]


def complaint(include: Any) -> str | None:
    """Say what is wrong with a prompt's clauses, as the end of a sentence; None if they can be
    judged."""
    example = '{"shape": "circle", "count": 1, "color": "red"}'
    if not isinstance(include, list) or not include:
        return f"has include={include!r}, which should be a list of clauses {example}"
    for number, clause in enumerate(include):
        if not _well_formed(clause):
            return f"has the clause {clause!r}, which should be like {example} (null: any colour)"
        if "position" in clause and not _points_back(clause["position"], number):
            return (
                f'has the position {clause["position"]!r}, which should be like ["left of", 0]: a'
                " relation and an earlier clause"
            )
    return None


def _well_formed(clause: Any) -> bool:
    """Whether a clause has a shape, a count and, maybe, a colour."""
    if not isinstance(clause, dict) or not isinstance(clause.get("shape"), str):
        return False
    if not isinstance(clause.get("color", 0), str | None):
        return False
    return isinstance(clause.get("count"), int) and clause["count"] >= 1


def _points_back(position: Any, number: int) -> bool:
    """Whether a position is [relation, index of a clause before `number`]."""
    if not isinstance(position, list) or len(position) != 2:
        return False
    relation, target = position
    return (
        isinstance(relation, str)
        and relation in RELATIONS
        and isinstance(target, int)
        and 0 <= target < number
    )


def strict(objects: list[FoundShape], include: list[dict[str, Any]]) -> bool:
    """Judge by GenEval's strict reading: every clause is exactly right. It is stricter in one
    point: nothing else may be in the picture."""
    return len(objects) == sum(c["count"] for c in include) and partial(objects, include) == 1.0


def partial(objects: list[FoundShape], include: list[dict[str, Any]]) -> float:
    """Flow-GRPO's partial credit: the mean of a clause's terms, in [0, 1].

    Count term 1 - |n - found| / n (floored at 0); when the count is right, colour term 1 - |n -
    n_colour| / n and position term 1 or 0; when it is not, those terms are 0. Departures from the
    reference server: the count term is not negative above 2n, and a wrong position scores 0 rather
    than the mean of [0, 1].
    """
    terms: list[float] = []
    chosen: list[list[FoundShape]] = []
    for clause in include:
        same = [o for o in objects if o.shape == clause["shape"]]
        if clause["color"] and sum(c["shape"] == clause["shape"] for c in include) > 1:
            # two clauses of one shape: the colour tells them apart
            same = [o for o in same if o.color == clause["color"]]
        right = [o for o in same if clause["color"] in (None, o.color)]
        chosen.append(right)
        count = clause["count"]
        shape_term, color_term = (
            max(0.0, 1 - abs(count - len(found)) / count) for found in (same, right)
        )
        terms.append(shape_term)
        matched = len(same) == count
        if clause["color"]:
            terms.append(color_term if matched else 0.0)
        if "position" in clause:
            relation, target = clause["position"]
            holds = matched and _all_hold(relation, right, chosen[target])
            terms.append(1.0 if holds else 0.0)
    return sum(terms) / len(terms)


def _all_hold(relation: str, these: list[FoundShape], those: list[FoundShape]) -> bool:
    """Whether there are objects on both sides, and the relation holds between any two."""
    pairs = [(a, b) for a in these for b in those]
    return bool(pairs) and all(_holds(relation, a, b) for a, b in pairs)


def _holds(relation: str, a: FoundShape, b: FoundShape) -> bool:
    """GenEval's relation: the centre offset, shrunk by a tenth of both sizes, points within 60
    degrees of the named direction."""
    dx = _shrink(a.x - b.x, 0.1 * (a.width + b.width))
    dy = _shrink(a.y - b.y, 0.1 * (a.height + b.height))
    norm = (dx * dx + dy * dy) ** 0.5
    ux, uy = RELATIONS[relation]
    return norm > 0 and (dx * ux + dy * uy) / norm > 0.5


def _shrink(offset: float, by: float) -> float:
    return max(abs(offset) - by, 0.0) * (1 if offset > 0 else -1)
