"""Motions of a world: prompts, videos, and a verifier that reads every frame."""

from __future__ import annotations

from dataclasses import replace

import torch

from flowrl.scenes.grammar import DIRECTIONS, MOTIONS, Motion, read, sentences, text
from flowrl.scenes.world import (
    MARGIN,
    PIXELS,
    FoundScene,
    Placed,
    Scene,
    SmallWorld,
    keyed,
    place,
    truth,
)
from flowrl.shapes.prompts import Prompt, held_out, shared_out

MOVED, GROWN = 8, 3  # px, least way and least change of size that count in full
DRAWN = 4  # px, least change of size that is drawn, since a faded tip can take a pixel of it
TIP = 1  # px, how far a size may step back, for the same reason
FEWEST = 3  # frames of a video
STEADY = 0.9  # least direction that is strictly right
CLEAR = 2 / 3  # least share of the frames with objects that have to be exactly right
BACKWARDS = ("moves left", "moves up", "disappears", "shrinks")  # drawn from the last frame on
SHARES = dict.fromkeys(MOTIONS, 1 / len(MOTIONS))


class Motions:
    """Sentences and videos of a world."""

    def __init__(self, world: SmallWorld) -> None:
        self.world = world

    def all_prompts(self) -> list[Prompt]:
        """Every motion that names no background; its task is its verb."""
        return [
            {"prompt": text(m), "task": m.verb, "combination": f"{m.thing.noun} {m.verb}"}
            for m in sentences(self.world.language).values()
            if isinstance(m, Motion)
        ]

    def train_prompts(self) -> list[Prompt]:
        """Motions that RL trains on, disjoint in object and verb from `eval_prompts`."""
        return shared_out([p for p in self.all_prompts() if not held_out(p)], 256, SHARES)

    def eval_prompts(self) -> list[Prompt]:
        """Held-out motions."""
        return shared_out([p for p in self.all_prompts() if held_out(p)], 64, SHARES)

    def frames(self, prompt: str, seed: int, number: int = 9) -> tuple[Scene, ...]:
        """Draw the scenes of a video that a motion describes, a function of prompt, seed and number
        of frames. What moves goes from one edge to the other. Fewer than FEWEST frames, or a
        sentence that is no motion of this world -> ValueError."""
        motion = read(prompt, self.world.language, Motion)
        if number < FEWEST:
            raise ValueError(f'"{prompt}" takes at least {FEWEST} frames, not {number}')
        generator = keyed(seed, prompt)
        start = float(torch.rand((), generator=generator))  # when objects appear
        times = torch.linspace(0, 1, number).tolist()
        while True:
            own = place([motion.thing.noun] * motion.thing.count, self.world.sizes, generator)
            drawn = [_at(own, motion.verb, time, start, self.world.sizes[0]) for time in times]
            if motion.verb in BACKWARDS:
                drawn.reverse()
            scenes = tuple(
                Scene(one, motion.background or self.world.backgrounds[0]) for one in drawn
            )
            # a large group has no room to move, and the smallest object none to grow
            if verdict([truth(s) for s in scenes], motion, DRAWN)["strict"]:
                return scenes


def _at(
    own: tuple[Placed, ...], verb: str, time: float, start: float, least: int
) -> tuple[Placed, ...]:
    """The objects at a time in [0, 1] of a motion to the right or down, or that grow or appear."""
    if "appears" in verb:
        return own if time > start else ()
    if not verb.startswith("moves"):
        sizes = [round(least + time * (o.size - least)) for o in own]
        each = [(o, *o.corner, size) for o, size in zip(own, sizes, strict=True)]
        return tuple(replace(o, x=x + s / 2, y=y + s / 2, size=s) for o, x, y, s in each)
    axis = "x" if verb.endswith(("left", "right")) else "y"
    low = min(getattr(o, axis) - o.size / 2 for o in own)
    high = max(getattr(o, axis) + o.size / 2 for o in own)
    step = MARGIN - low + round((PIXELS - 2 * MARGIN - (high - low)) * time)
    return tuple(replace(o, **{axis: getattr(o, axis) + step}) for o in own)


def verdict(found: list[FoundScene], motion: Motion, grown: int = GROWN) -> dict[str, float]:
    """Judge the frames of a video, parts in [0, 1].

    number: share of frames with as many objects as the motion has then. persistence: share of
    frames in which every object is what the sentence names, on the background that it names or that
    the first frame has. Once that is so in CLEAR of the frames that have objects, those in which
    the objects are nearly that count, too. direction: the way in the asked direction (or the change
    of size) over the whole way, less where it is below MOVED (or `grown`), of which a step counts
    for at most a half, so that a jump is not enough; 1 where objects appear or disappear once.
    partial is the product of the three; strict is 1 where the first two are 1 and direction is at
    least STEADY. Fewer than FEWEST frames -> ValueError.
    """
    if len(found) < FEWEST:
        shown = f"and the video has {len(found)}"
        raise ValueError(f'"{text(motion)}" takes at least {FEWEST} frames, {shown}')
    # a sentence that names no background leaves it open, but it must not change on the way
    ground = motion.background or found[0].background
    own = _right(found, motion.thing.noun, ground)
    counts, asked = [len(f.objects) for f in found], motion.thing.count
    comes = motion.verb == "appears"
    if comes or motion.verb == "disappears":
        order = counts if comes else counts[::-1]
        direction = float(order[0] == 0 and order[-1] == asked and order == sorted(order))
        number = sum(count in (0, asked) for count in counts) / len(found)
    else:
        # frames with something missing or unknown have no mean place
        each = zip(found, own, counts, strict=True)
        whole = [f for f, right, count in each if right and count == asked]
        direction = _along(whole, motion.verb, grown)
        number = counts.count(asked) / len(found)
    persistence = sum(own) / len(found)
    strict = number == persistence == 1 and direction >= STEADY
    parts = {"number": number, "persistence": persistence, "direction": direction}
    return {"partial": number * persistence * direction, "strict": float(strict), **parts}


def _right(found: list[FoundScene], noun: str, ground: str | None) -> list[bool]:
    """Whether each frame has nothing but the noun on the ground, or nearly, once CLEAR have."""
    grounded = [ground is not None and f.background == ground for f in found]
    each = [*zip(grounded, found, strict=True)]
    exact = [on and all(o.name == noun for o in f.objects) for on, f in each]
    filled = [right for right, f in zip(exact, found, strict=True) if f.objects]
    if sum(filled) < CLEAR * len(filled):
        return exact
    return [on and all(noun in (o.name, *o.like) for o in f.objects) for on, f in each]


def _along(whole: list[FoundScene], verb: str, grown: int) -> float:
    """The way, or the change of size, in its direction over its whole length."""
    if len(whole) < 2:
        return 0.0
    middle = torch.tensor([[(o.x, o.y, o.size) for o in f.objects] for f in whole]).mean(1)
    if verb.startswith("moves"):
        steps, least = middle[:, :2].diff(dim=0), MOVED
        towards = torch.tensor(DIRECTIONS[verb.split()[1]], dtype=steps.dtype)
    else:
        sizes = middle[:, 2:] if verb == "grows" else -middle[:, 2:]
        steps, least, towards = _without_tips(sizes).diff(dim=0), grown, torch.ones(1)
    ahead = steps @ towards
    share = ahead.clamp(max=least / 2).sum().item() / least
    net = ahead.sum().item()
    return net / steps.norm(dim=1).sum().item() * min(1.0, share) if share > 0 else 0.0


def _without_tips(sizes: torch.Tensor) -> torch.Tensor:
    """Sizes (F, 1) of what grows, in which a step back of at most TIP stays where it was."""
    kept = [sizes[0]]
    for size in sizes[1:]:
        kept.append(torch.maximum(size, torch.minimum(kept[-1], size + TIP)))
    return torch.stack(kept)
