"""Edits of a world: instructions with their source pictures, the scenes before and
after, and a verifier of what changed and what did not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from PIL import Image

from flowrl.scenes.grammar import DIRECTIONS, Edit, read, sentences, text
from flowrl.scenes.world import (
    MARGIN,
    PIXELS,
    FoundObject,
    FoundScene,
    Scene,
    SmallWorld,
    keyed,
    place,
)
from flowrl.shapes.prompts import Prompt, held_out, shared_out

NEAR, MOVED = 3, 6  # px: an object that stays is as near to its place; one that moves is farther
SHARES = {"replace": 0.4, "remove": 0.2, "background": 0.1, "move": 0.3}


class Edits:
    """Instructions, pairs of scenes and verdicts of a world."""

    def __init__(self, world: SmallWorld) -> None:
        self.world = world

    def all_prompts(self) -> list[Prompt]:
        """Every instruction, without a source."""
        return [
            {"prompt": text(e), "task": e.action, "combination": f"{e.noun} {e.to}"}
            for e in sentences(self.world.language).values()
            if isinstance(e, Edit)
        ]

    def train_prompts(self) -> list[Prompt]:
        """Instructions that RL trains on, each with its source picture as the condition "image".
        All but the few about backgrounds are disjoint from `eval_prompts`."""
        return [*self._with_sources(False, 256, 0)]

    def eval_prompts(self) -> list[Prompt]:
        """Held-out instructions, on other sources."""
        return [*self._with_sources(True, 64, 256)]

    @cache  # noqa: B019 a world's edits live as long as the program
    def _with_sources(self, kept: bool, count: int, seed: int) -> tuple[Prompt, ...]:
        rows = [p for p in self.all_prompts() if held_out(p) == kept or p["task"] == "background"]
        shares = {task: SHARES[task] for task in SHARES if any(p["task"] == task for p in rows)}
        chosen = enumerate(shared_out(rows, count, shares), seed)
        return tuple(
            row | {"image": self.picture(self.pair(row["prompt"], i)[0])} for i, row in chosen
        )

    def picture(self, scene: Scene) -> Image.Image:
        """Draw a scene as a picture of 8 bits a channel."""
        pixels = (self.world.render(scene) * 255).round().byte().permute(1, 2, 0)
        return Image.fromarray(pixels.numpy())

    def pair(self, instruction: str, seed: int) -> tuple[Scene, Scene]:
        """Draw the scenes before and after an edit, a function of instruction and seed: the object
        that is edited and one other. A sentence that is no edit of this world -> ValueError."""
        language = self.world.language
        edit, generator = read(instruction, language, Edit), keyed(seed, instruction)
        nouns = [n for n in language.nouns if n not in (edit.noun, edit.to)]
        colors = [c for c in self.world.backgrounds if c != edit.to]
        color = colors[int(torch.randint(len(colors), (), generator=generator))]
        first, second = torch.randperm(len(nouns), generator=generator)[:2].tolist()
        while True:
            own, other = place(
                (edit.noun or nouns[first], nouns[second]), self.world.sizes, generator
            )
            source = Scene((own, other), color)
            match edit:
                case Edit("background", _, str(to)):
                    return source, replace(source, background=to)
                case Edit("remove"):
                    return source, replace(source, objects=(other,))
                case Edit("replace", _, str(to)):
                    return source, replace(source, objects=(replace(own, name=to), other))
            dx, dy = DIRECTIONS[edit.to or ""]
            moved = replace(own, x=own.x + 2 * MOVED * dx, y=own.y + 2 * MOVED * dy)
            inside = all(MARGIN <= c <= PIXELS - MARGIN - own.size for c in moved.corner)
            apart = (
                max(abs(moved.x - other.x), abs(moved.y - other.y)) - (own.size + other.size) / 2
            )
            if inside and apart >= MOVED:
                return source, replace(source, objects=(moved, other))

    def verdict(self, before: FoundScene, after: FoundScene, edit: Edit) -> dict[str, float]:
        """Judge the result of an edit by what is found in source and result, parts in [0, 1].

        changed: 1 where what the instruction asks for happened; a half where the object is gone and
        the new one is not at its place. kept: share of the other objects that are as they were, 0
        where the background is not, and divided by 1 + the number of objects that are new. partial
        is their product, so that a copy of the source scores 0; strict is 1 where both are 1. A
        source with something unknown, or without one object to edit -> ValueError.
        """
        own = [o for o in before.objects if o.name == edit.noun]
        if not before.known():
            raise ValueError(
                f'"{text(edit)}" has a source that is no picture of the {self.world.language.name}'
                " world; give one that shows its objects alone, on one of its backgrounds"
            )
        if edit.noun and len(own) != 1:
            raise ValueError(
                f'"{text(edit)}" is about one {edit.noun}, and its source shows {len(own)}; give a'
                " picture with exactly one"
            )
        # What stays and what the edit brings is taken out of `rest`, so that new objects remain.
        rest = list(after.objects)
        others = [o for o in before.objects if o.name != edit.noun]
        stay = [_take(rest, o, o.name) for o in others]
        same = after.background == (edit.to if edit.action == "background" else before.background)
        changed = float(same)
        if edit.action == "move":
            changed = float(_moved(rest, own[0], edit.to or ""))
        elif edit.noun:
            changed = float(all(o.name != edit.noun for o in rest))
            if edit.action == "replace":
                changed *= (1 + _take(rest, own[0], edit.to)) / 2
        untouched = same or edit.action == "background"
        kept = (sum(stay) / len(stay) if stay else 1.0) * untouched / (1 + len(rest))
        strict = changed == kept == 1
        return {
            "partial": changed * kept,
            "strict": float(strict),
            "changed": changed,
            "kept": kept,
        }


def _take(rest: list[FoundObject], at: FoundObject, name: str | None) -> bool:
    """Take the object of a name at a place out of the rest, if it is there."""
    for o in rest:
        if o.name == name and max(abs(o.x - at.x), abs(o.y - at.y), abs(o.size - at.size)) <= NEAR:
            rest.remove(o)
            return True
    return False


def _moved(rest: list[FoundObject], own: FoundObject, way: str) -> bool:
    """Take the object, if there is one alone, out of the rest, and say whether it is farther that
    way and as large as before."""
    found = [o for o in rest if o.name == own.name]
    if len(found) != 1:
        return False
    rest.remove(found[0])
    dx, dy = DIRECTIONS[way]
    x, y = found[0].x - own.x, found[0].y - own.y
    far = x * dx + y * dy >= max(MOVED, abs(x * dy) + abs(y * dx))
    return far and abs(found[0].size - own.size) <= NEAR
