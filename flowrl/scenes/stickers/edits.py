"""Edits of the stickers world: instructions, pairs of scenes, and a verifier of what changed and
what did not."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import torch

from flowrl.scenes.grammar import DIRECTIONS, Edit, read, sentences, text
from flowrl.scenes.stickers.prompts import PLAIN, WORLD, keyed
from flowrl.scenes.stickers.scenes import BACKGROUNDS, MARGIN, OBJECTS, PIXELS, StickerScene, place
from flowrl.scenes.stickers.verify import FoundScene, FoundSticker
from flowrl.shapes.prompts import Prompt, held_out, shared_out

NEAR, MOVED = 3, 6  # px: an object that stays is as near to its place; one that moves is farther
SHARES = {"replace": 0.4, "remove": 0.2, "background": 0.1, "move": 0.3}


def _rows(kept: bool) -> list[Prompt]:
    rows = [
        {"prompt": text(e), "task": e.action, "combination": f"{e.noun} {e.to}"}
        for e in sentences(WORLD).values()
        if isinstance(e, Edit)
    ]
    return [row for row in rows if held_out(row) == kept or row["task"] == "background"]


def train_prompts() -> list[Prompt]:
    """Instructions that RL trains on; all but those about backgrounds are disjoint from
    `eval_prompts`. A data file adds the source's picture as "image"."""
    return shared_out(_rows(False), 256, SHARES)


def eval_prompts(count: int = 64) -> list[Prompt]:
    """Held-out instructions."""
    return shared_out(_rows(True), count, SHARES)


def pair(instruction: str, seed: int) -> tuple[StickerScene, StickerScene]:
    """Draw scenes before and after an edit, a function of instruction and seed: the object that is
    edited and one other that stays."""
    edit = read(instruction, WORLD, Edit)
    for attempt in count():
        generator = keyed(seed, instruction, attempt)
        free = [n for n in OBJECTS if n not in (edit.noun, edit.to)]
        picks = torch.randperm(len(free), generator=generator)[:2].tolist()
        names = (edit.noun or free[picks[1]], free[picks[0]])
        grounds = [c for c in BACKGROUNDS if c != edit.to]
        ground = grounds[int(torch.randint(len(grounds), (), generator=generator))]
        source = StickerScene(place(names, generator), ground)
        own, other = source.objects
        match edit.action:
            case "background":
                return source, replace(source, background=edit.to or PLAIN)
            case "remove":
                return source, replace(source, objects=(other,))
            case "replace":
                return source, replace(source, objects=(replace(own, name=edit.to or ""), other))
        dx, dy = DIRECTIONS[edit.to or ""]
        moved = replace(own, x=own.x + 2 * MOVED * dx, y=own.y + 2 * MOVED * dy)
        inside = all(MARGIN <= c <= PIXELS - MARGIN - own.size for c in moved.corner)
        apart = max(abs(moved.x - other.x), abs(moved.y - other.y))
        if inside and apart >= MOVED + (own.size + other.size) / 2:
            return source, replace(source, objects=(moved, other))
    raise AssertionError("unreachable")


def verdict(before: FoundScene, after: FoundScene, edit: Edit) -> dict[str, float]:
    """Judge the result of an edit by what is found in source and result.

    changed: 1 where what the instruction asks for happened (a half where the object is gone and the
    new one is not at its place); kept: share of the other objects that are as they were, 0 where
    the background is not, and divided by 1 + the number of objects that are new. partial is their
    product, so that a copy of the source scores 0; strict is 1 where both are.
    """
    own = [o for o in before.objects if o.name == edit.noun]
    if edit.noun and len(own) != 1:
        raise ValueError(
            f'"{text(edit)}" is about one {edit.noun}, and its source shows {len(own)}; give a'
            " picture with exactly one"
        )
    # What stays and what the edit brings is taken out of `rest`, so that new objects remain.
    rest = list(after.objects)
    others = [o for o in before.objects if o not in own]
    stay = [_take(rest, o, o.name) for o in others]
    changed = 0.0
    if edit.action == "background":
        changed = float(after.background == edit.to)
    elif edit.action == "move":
        changed = float(_moved(own[0], rest, edit.to or ""))
    else:
        changed = float(all(o.name != edit.noun for o in rest))
        if edit.action == "replace":
            changed = (changed + float(_take(rest, own[0], edit.to))) / 2 if changed else 0.0
    same = edit.action == "background" or after.background == before.background
    kept = (sum(stay) / len(stay) if stay else 1.0) * same / (1 + len(rest))
    strict = changed == kept == 1
    return {"partial": changed * kept, "strict": float(strict), "changed": changed, "kept": kept}


def _take(rest: list[FoundSticker], at: FoundSticker, name: str | None) -> bool:
    """Take the object of a name from its place out of the rest, if it is there."""
    for o in rest:
        near = max(abs(o.x - at.x), abs(o.y - at.y), abs(o.size - at.size)) <= NEAR
        if near and o.name is not None and o.name == name:
            rest.remove(o)
            return True
    return False


def _moved(own: FoundSticker, rest: list[FoundSticker], way: str) -> bool:
    """Whether the rest has the object alone, farther that way; it is taken out."""
    found = [o for o in rest if o.name == own.name]
    if len(found) != 1:
        return False
    rest.remove(found[0])
    dx, dy = DIRECTIONS[way]
    x, y = found[0].x - own.x, found[0].y - own.y
    return x * dx + y * dy >= max(MOVED, abs(x * dy) + abs(y * dx))
