"""Motions of the stickers world: sentences, videos, and a verifier that reads every frame."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import torch

from flowrl.scenes.grammar import DIRECTIONS, Motion, read, sentences, text
from flowrl.scenes.stickers.prompts import PLAIN, WORLD, keyed
from flowrl.scenes.stickers.scenes import MARGIN, PIXELS, SIZES, StickerScene, place
from flowrl.scenes.stickers.verify import FoundScene
from flowrl.shapes.prompts import Prompt, held_out, shared_out

MOVED, GROWN = 8, 4  # px, least way and least change of size that count in full
STEADY = 0.9  # least direction that is strictly right
SHARES = {"motion": 1.0}


def _rows(kept: bool) -> list[Prompt]:
    found = (motion for motion in sentences(WORLD).values() if isinstance(motion, Motion))
    rows = [
        {"prompt": text(m), "task": "motion", "combination": f"{m.thing.noun} {m.verb}"}
        for m in found
    ]
    return [row for row in rows if held_out(row) == kept]


def train_prompts() -> list[Prompt]:
    """Motions that RL trains on, disjoint in object and verb from `eval_prompts`."""
    return shared_out(_rows(False), 256, SHARES)


def eval_prompts(count: int = 64) -> list[Prompt]:
    """Held-out motions."""
    return shared_out(_rows(True), count, SHARES)


def frames(prompt: str, seed: int, number: int = 8) -> tuple[StickerScene, ...]:
    """Draw the scenes of a video (at least 2) that a motion describes, a function of prompt and
    seed. What moves goes as far as there is room, at least MOVED px."""
    if number < 2:
        raise ValueError(f"a motion has at least 2 frames, not {number}")
    motion = read(prompt, WORLD, Motion)
    names, background = [motion.thing.noun] * motion.thing.count, motion.background or PLAIN
    for attempt in count():
        generator = keyed(seed, prompt, attempt)
        last = StickerScene(place(names, generator), background)
        times = torch.linspace(0, 1, number).tolist()
        match motion.verb.split():
            case ["moves", way]:
                # The group goes from edge to edge, or back where the direction is negative.
                dx, dy = DIRECTIONS[way]
                axis = 0 if dx else 1
                low = min(o.corner[axis] for o in last.objects)
                high = max(o.corner[axis] + o.size for o in last.objects)
                room = PIXELS - 2 * MARGIN - (high - low)
                if room < MOVED:
                    continue
                times = times if dx + dy > 0 else times[::-1]
                steps = [MARGIN - low + round(room * t) for t in times]
                return tuple(_shifted(last, abs(dx) * s, abs(dy) * s) for s in steps)
            case ["grows" | "shrinks" as verb]:
                if min(o.size for o in last.objects) < SIZES[0] + GROWN:
                    continue
                times = times if verb == "grows" else times[::-1]
                return tuple(_scaled(last, t) for t in times)
            case [verb]:
                first = 1 + int(torch.randint(number - 1, (), generator=generator))
                shown = [i >= first if verb == "appears" else i < first for i in range(number)]
                return tuple(last if s else replace(last, objects=()) for s in shown)
    raise AssertionError("unreachable")


def _shifted(scene: StickerScene, dx: int, dy: int) -> StickerScene:
    return replace(scene, objects=tuple(replace(o, x=o.x + dx, y=o.y + dy) for o in scene.objects))


def _scaled(scene: StickerScene, share: float) -> StickerScene:
    """Between the smallest size (share 0) and the scene's own (1), about the same corners."""
    sizes = [round(SIZES[0] + share * (o.size - SIZES[0])) for o in scene.objects]
    each = zip(scene.objects, sizes, strict=True)
    return replace(
        scene,
        objects=tuple(
            replace(o, size=s, x=o.corner[0] + s / 2, y=o.corner[1] + s / 2) for o, s in each
        ),
    )


def verdict(found: list[FoundScene], motion: Motion) -> dict[str, float]:
    """Judge the frames of a video, parts in [0, 1].

    number: share of frames with as many objects as the motion has then; persistence: share in which
    all is known, the object's own and on the asked background; direction: what the way, or the
    change of size, has in its direction, over its whole length and at most 1, less where it is
    short. partial is their product, strict is 1 where number and persistence are 1 and direction is
    at least STEADY. A motion that appears or disappears has the direction 1 if it does so once.
    """
    asked, total = motion.thing, len(found)
    if total < 2:
        raise ValueError(f"a motion has at least 2 frames, and this video has {total}")
    ground = motion.background or found[0].background
    right = [f.known() and f.background == ground for f in found]
    right = [
        r and all(o.name == asked.noun for o in f.objects)
        for r, f in zip(right, found, strict=True)
    ]
    counts = [len(f.objects) for f in found]
    if motion.verb in ("appears", "disappears"):
        order = counts if motion.verb == "appears" else counts[::-1]
        direction = float(order[0] == 0 and order[-1] == asked.count and order == sorted(order))
        number = sum(c in (0, asked.count) for c in counts) / total
    else:
        number = sum(c == asked.count for c in counts) / total
        whole = [
            f for f, ok in zip(found, right, strict=True) if ok and len(f.objects) == asked.count
        ]
        direction = _along(whole, motion)
    parts = {"number": number, "persistence": sum(right) / total, "direction": direction}
    partial = number * parts["persistence"] * direction
    strict = number == parts["persistence"] == 1 and direction >= STEADY
    return {"partial": partial, "strict": float(strict), **parts}


def _along(whole: list[FoundScene], motion: Motion) -> float:
    """The way, or the change of size, in its direction over its whole length."""
    if len(whole) < 2:
        return 0.0
    facts = torch.tensor([[(o.x, o.y, o.size) for o in f.objects] for f in whole]).mean(1)
    steps = facts.diff(dim=0)  # (F - 1, 3): x, y, size
    way = motion.verb.partition(" ")[2]
    if way:
        towards, least = torch.tensor([*DIRECTIONS[way], 0.0]), MOVED
        length = steps[:, :2].norm(dim=1).sum().item()
    else:
        towards = torch.tensor([0.0, 0.0, 1.0 if motion.verb == "grows" else -1.0])
        least, length = GROWN, steps[:, 2].abs().sum().item()
    net = (steps @ towards).sum().item()
    return max(0.0, net) / length * min(1.0, net / least) if net > 0 else 0.0
