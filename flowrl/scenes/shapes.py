"""Edits and motions of coloured shapes on white, "replace the red circle with a blue square" or
"two red circles move left", as those of flowrl.scenes are for other worlds."""

from __future__ import annotations

from torch import Tensor

from flowrl.scenes.edits import Edits
from flowrl.scenes.grammar import MOTIONS as VERBS
from flowrl.scenes.grammar import Language
from flowrl.scenes.motions import Motions
from flowrl.scenes.world import FoundObject, FoundScene, Scene, SmallWorld
from flowrl.shapes import scenes, verify

INK = 0.25  # a pixel of which a channel is so far from white belongs to something
HALO = 2  # px around an object that may be inked, too


def render(scene: Scene) -> Tensor:
    """Draw a scene -> (3, 64, 64) fp32 in [0, 1]."""
    drawn = []
    for o in scene.objects:
        color, shape = o.name.split()
        drawn.append(scenes.Object(shape, color, o.x, o.y, o.size / 2))
    return scenes.render(drawn)


def detect(images: Tensor) -> list[FoundScene]:
    """Read each of (B, 3, H, W) images in [0, 1]. What is inked and lies in no object, like a pale
    shape or a background, makes the background unknown."""
    images = verify.to_world(images)
    shapes = verify.detect(images)
    white = outside(images, shapes).flatten(1).sum(1) < verify.SPECK
    each = zip(shapes, white.tolist(), strict=True)
    return [FoundScene(tuple(map(found, one)), "white" if bare else None) for one, bare in each]


def outside(images: Tensor, shapes: list[list[verify.FoundShape]]) -> Tensor:
    """Which pixels of (B, 3, 64, 64) images are inked and lie in none of their shapes -> (B, 64,
    64) bool."""
    inked = (1 - images).amax(1) >= INK
    for ink, own in zip(inked, shapes, strict=True):
        for o in own:
            x, y = (int(v - HALO) for v in (o.x - o.width / 2, o.y - o.height / 2))
            right, low = (int(v + 2 * HALO) for v in (x + o.width, y + o.height))
            ink[max(0, y) : low, max(0, x) : right] = False
    return inked


def found(o: verify.FoundShape) -> FoundObject:
    """A shape as an object of this world."""
    name, like = o.shape and f"{o.color} {o.shape}", tuple(f"{o.color} {s}" for s in o.like)
    return FoundObject(name, o.x, o.y, max(o.width, o.height), like)


SHAPES = SmallWorld(
    language=Language(
        name="shapes",
        nouns=tuple(f"{color} {shape}" for shape in scenes.SHAPES for color in scenes.COLORS),
        motions=VERBS,
        edits=True,
    ),
    sizes=range(13, 21),
    backgrounds=("white",),
    render=render,
    detect=detect,
)
EDITS, MOTIONS = Edits(SHAPES), Motions(SHAPES)
