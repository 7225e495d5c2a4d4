"""One small grammar of pictures, motions and edits: a sentence becomes a structure and back.

    a cat left of a pizza on a blue background    Picture
    two tacos move left                           Motion
    replace the cat with a taco                   Edit

A world says which words it has (`Language`), and `sentences` lists every sentence of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations, product
from typing import Any, TypeVar

from flowrl.runtime.registry import did_you_mean
from flowrl.shapes.scenes import RELATIONS

NUMBERS = {1: "a", 2: "two", 3: "three", 4: "four"}
JOINS = ("and", *RELATIONS)  # what stands between two objects; "and" leaves their places open
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
MOTIONS = (*(f"moves {way}" for way in DIRECTIONS), "appears", "disappears", "grows", "shrinks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """The words of a world."""

    name: str  # as in data=NAME
    nouns: tuple[str, ...]  # objects, in the singular
    colors: tuple[str, ...] = ()  # colours that objects may have
    backgrounds: tuple[str, ...] = ()  # colours that a sentence may name
    motions: tuple[str, ...] = ()  # those of MOTIONS that it has
    edits: bool = False  # whether its pictures are edited


@dataclass(frozen=True, slots=True)
class Thing:
    """Some objects of a kind."""

    noun: str  # a noun of the world
    count: int = 1  # 1 to 4
    color: str | None = None  # None: open


@dataclass(frozen=True, slots=True)
class Picture:
    """One thing, or two single objects that are joined."""

    things: tuple[Thing, ...]  # in the order of the sentence
    join: str | None = None  # one of JOINS; None: there is one thing
    background: str | None = None  # None: open


@dataclass(frozen=True, slots=True)
class Motion:
    """One or two objects of a kind that do something, alone in their video."""

    thing: Thing  # what moves
    verb: str  # one of MOTIONS, in the singular
    background: str | None = None  # None: open


@dataclass(frozen=True, slots=True)
class Edit:
    """An instruction about one object of a picture, or about its background."""

    action: str  # replace, remove, background or move
    noun: str | None = None  # the object; None: the background
    to: str | None = None  # the new object, the new background, or a name of DIRECTIONS


Sentence = Picture | Motion | Edit


def _a(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' and not words.startswith('uni') else 'a'} {words}"


def plural(noun: str) -> str:
    """The regular plural."""
    if noun.endswith(("s", "x", "sh", "ch")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if re.search("[^aeiou]y$", noun) else f"{noun}s"


def text(sentence: Sentence | Thing) -> str:
    """Write a sentence, or a thing's part of it."""
    match sentence:
        case Thing(noun, count, color):
            words = f"{color} " * (color is not None) + (noun if count == 1 else plural(noun))
            return _a(words) if count == 1 else f"{NUMBERS[count]} {words}"
        case Picture(things, join, background):
            words = f" {join} ".join(map(text, things))
        case Motion(thing, verb, background):
            one, *rest = verb.split()
            verb = " ".join([one if thing.count == 1 else one.removesuffix("s"), *rest])
            words = f"{text(thing)} {verb}"
        case Edit("replace", noun, to):
            return f"replace the {noun} with {_a(to or '')}"
        case Edit("background", _, to):
            return f"make the background {to}"
        case Edit(action, noun, to):
            return f"{action} the {noun}" + f" {to}" * (to is not None)
    return words + (f" on {_a(background)} background" if background else "")


@cache
def sentences(world: Language) -> dict[str, Sentence]:
    """Every sentence of a world that names no background, with its structure, in a fixed order."""
    return {text(sentence): sentence for sentence in _all(world)}


def _all(world: Language) -> Iterator[Sentence]:
    kinds = [(noun, color) for noun in world.nouns for color in (None, *world.colors)]
    for (noun, color), count in product(kinds, NUMBERS):
        yield Picture((Thing(noun, count, color),))
    for (one, other), join in product(permutations(kinds, 2), JOINS):
        yield Picture((Thing(one[0], 1, one[1]), Thing(other[0], 1, other[1])), join)
    for (noun, color), count, verb in product(kinds, (1, 2), world.motions):
        yield Motion(Thing(noun, count, color), verb)
    if world.edits:
        yield from (Edit("replace", *pair) for pair in permutations(world.nouns, 2))
        yield from (Edit("remove", noun) for noun in world.nouns)
        yield from (Edit("background", None, color) for color in world.backgrounds)
        yield from (Edit("move", *pair) for pair in product(world.nouns, DIRECTIONS))


S = TypeVar("S", bound=Sentence)


def read(sentence: str, world: Language, kind: type[S]) -> S:
    """Read a sentence of a kind; another one -> ValueError that says which word is wrong."""
    own = sentences(world)
    grounds = {text(Picture((), background=color)): color for color in world.backgrounds}
    end = next((end for end in grounds if sentence.endswith(end)), "")
    found = own.get(sentence.removesuffix(end))
    if isinstance(found, kind) and not end:
        return found
    if isinstance(found, kind) and not isinstance(found, Edit):
        plain: Any = found  # a picture or a motion: both have a background
        return replace(plain, background=grounds[end])
    example = next((words for words, other in own.items() if isinstance(other, kind)), "")
    known = {word for words in (*own, *grounds) for word in words.split()}
    wrong = next((word for word in sentence.split() if word not in known), None)
    if wrong is not None and kind is not Motion:
        near = did_you_mean(wrong, known)
        raise ValueError(f'"{sentence}": the {world.name} world has no word "{wrong}"{near}')
    like = f'; write it like "{example}"' if example else ", which has none"
    if example and kind is Motion:
        like += f" (its motions: {', '.join(world.motions)})"
    raise ValueError(f'"{sentence}" is no {kind.__name__.lower()} of the {world.name} world{like}')
