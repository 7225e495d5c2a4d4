"""Prompts that ask for written text: scenes with a place for it, and the text to write there.

meta["text"] is the text that should be read, in the prompt between double quotes; meta["task"] is
its kind. A hash of the text decides whether it is held out, so that no held-out text is ever
trained on; scenes are shared.
"""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import product
from typing import Any

from flowrl.runtime.text import items

SCENES = (
    'A neon sign on a brick wall that says "{}"',
    'A chalkboard in front of a cafe with "{}" written on it',
    'A wooden shop sign that reads "{}"',
    'A birthday cake with "{}" in icing',
    'A white T-shirt printed with "{}"',
    'A road sign in the desert that reads "{}"',
    'A hand holding a paper note that says "{}"',
    'A movie poster with the title "{}"',
    'A book cover titled "{}" on a table',
    'A coffee mug with "{}" printed on it',
    'A billboard above a busy street showing "{}"',
    'A banner across a stadium that says "{}"',
    'A license plate that reads "{}"',
    'A train station board showing "{}"',
    'A graffiti of "{}" on a concrete wall',
    'A street name plate that says "{}" on an old house',
    'A laptop screen showing "{}" in large letters',
    'A stone tablet engraved with "{}"',
    'A robot holding a cardboard sign that says "{}"',
    'A hot air balloon with "{}" on its side',
    'A jar with the label "{}" on a kitchen shelf',
    'A beach with "{}" written in the sand',
    'A museum plaque that reads "{}"',
    'A cinema marquee at night showing "{}"',
)
WORDS = items("""
    Bakery, Harbor, Winter, Garden, Library, Welcome, Galaxy, Journey, Market, Station, Rainbow,
    Freedom, Puzzle, Thunder, Velvet, Quartz, Jungle, Oxygen, Zebra, Mystery, Copper, Lantern,
    Meadow, Whisper, Bridge, Saturn, Festival, Kitchen, Museum, Orchid, Pioneer, Sunrise
""")
FIRST = items("""
    Fresh, Grand, Silent, Golden, Open, Happy, Lost, Secret, Little, Royal, Blue, Final
""")
SECOND = items("""
    Bread, Opening, River, Ticket, Kitchen, Birthday, Island, Garden, Planet, Hotel, Moon, Chapter
""")
PHRASES = items("""
    Mind the Gap, Keep It Simple, No Parking Today, Best in Town, Back in Time, Wash Your Hands,
    Made With Love, Out of Order, Follow Your Heart, Save the Bees, Do Not Enter,
    Live Music Tonight, Made by Robots, Never Stop Learning, Free Coffee Inside, Closed on Monday,
    Turn Left Here, Think Before Speaking, Look Both Ways, Welcome to Mars
""")
NUMBERS = tuple(str(number) for number in range(1007, 10000, 211))
KINDS = ("word", "two_words", "phrase", "number")
HELD_OUT = 4  # one text in 4 is held out

Prompt = dict[str, Any]


def train_prompts() -> list[Prompt]:
    """The 3,960 prompts whose texts are not held out; kinds and scenes mixed."""
    return [prompt for prompt in all_prompts() if not held_out(prompt["text"])]


def eval_prompts(count: int = 1018) -> list[Prompt]:
    """Held-out texts, as many prompts as Flow-GRPO's OCR test set has; kinds and scenes mixed."""
    return [prompt for prompt in all_prompts() if held_out(prompt["text"])][:count]


def held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT == 0


@cache
def all_prompts() -> tuple[Prompt, ...]:
    """Every scene with every text, ordered by a hash."""
    two_words = [f"{a} {b}" for a, b in product(FIRST, SECOND)]
    texts = zip(KINDS, (WORDS, two_words, PHRASES, NUMBERS), strict=True)
    out = [
        {"prompt": scene.format(text), "text": text, "task": kind}
        for kind, members in texts
        for text in members
        for scene in SCENES
    ]
    return tuple(sorted(out, key=lambda prompt: hashlib.sha256(prompt["prompt"].encode()).digest()))
