"""Prompts of the stickers world for pictures: GenEval's tasks with objects in place of colours.

Combinations are split by a hash into train and held-out prompts, as those of shapes are, so that RL
trains on no held-out combination (pretraining draws from both).
"""

from __future__ import annotations

from functools import cache

from flowrl.scenes.grammar import MOTIONS, RELATIONS, Language, Picture, read, sentences, text
from flowrl.scenes.stickers.scenes import BACKGROUNDS, OBJECTS, SIZES
from flowrl.scenes.world import Scene, keyed, place
from flowrl.shapes.prompts import Prompt, held_out, shared_out

PLAIN = "white"  # the background of a scene whose prompt names none
WORLD = Language(
    name="stickers",
    nouns=OBJECTS,
    backgrounds=tuple(color for color in BACKGROUNDS if color != PLAIN),
    motions=MOTIONS,
    edits=True,
)
# share of each task in the lists; single objects are few
SHARES = {
    "single_object": 0.10,
    "two_object": 0.15,
    "counting": 0.25,
    "position": 0.30,
    "background": 0.20,
}


@cache
def all_prompts() -> tuple[Prompt, ...]:
    """Every listed prompt, {"prompt", "task", "combination"}, in a fixed order. Two objects on a
    coloured background are sentences of the world that no list holds."""
    pictures = [found for found in sentences(WORLD).values() if isinstance(found, Picture)]
    single = (
        Picture(p.things, None, color) for p in pictures if not p.join for color in BACKGROUNDS
    )
    return tuple(_row(p) for p in (*pictures, *(p for p in single if p.background != PLAIN)))


def _row(picture: Picture) -> Prompt:
    names = "+".join(sorted(thing.noun for thing in picture.things))
    count = picture.things[0].count
    if picture.background:
        task, combination = "background", f"{names} {picture.background}"
    elif picture.join in RELATIONS:
        task, combination = "position", f"{names} {picture.join}"
    elif picture.join:
        task, combination = "two_object", names
    else:
        task, combination = "single_object" if count == 1 else "counting", f"{count} {names}"
    return {"prompt": text(picture), "task": task, "combination": combination}


def train_prompts() -> list[Prompt]:
    """Prompts that RL trains on, disjoint in combination from `eval_prompts`."""
    return shared_out([p for p in all_prompts() if not held_out(p)], 1024, SHARES)


def eval_prompts(count: int = 128) -> list[Prompt]:
    """Held-out prompts, the tasks in SHARES' proportions (a task with few combinations repeats a
    prompt, with another seed)."""
    return shared_out([p for p in all_prompts() if held_out(p)], count, SHARES)


def scene(prompt: str, seed: int) -> Scene:
    """Draw a scene that the prompt describes exactly, a function of prompt and seed; white where it
    names no background. Not a picture of this world -> ValueError."""
    picture = read(prompt, WORLD, Picture)
    names = [thing.noun for thing in picture.things for _ in range(thing.count)]
    relation = picture.join if picture.join in RELATIONS else None
    return Scene(place(names, SIZES, keyed(seed, prompt), relation), picture.background or PLAIN)
