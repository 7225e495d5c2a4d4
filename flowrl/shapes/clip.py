"""The tiny CLIP of the shapes world, and the close prompts that it is trained and judged on.

`open_clip.create_model_and_transforms(SOURCE)` and `open_clip.get_tokenizer(SOURCE)` load it as
they load any other model: a CLIP with 64 x 64 inputs and the world's own vocabulary, made by
scripts/embedded/train_shapes_clip.py. It never saw a held-out combination. Its cosine is a proxy
for the verifier, good enough to climb and imperfect enough to be hacked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from flowrl.shapes import verify
from flowrl.shapes.prompts import NUMBERS, Prompt, all_prompts
from flowrl.shapes.scenes import COLORS, RELATIONS, SHAPES, Object

FOLDER = Path(__file__).parent / "weights" / "clip"
SOURCE = f"local-dir:{FOLDER}"  # a model name for open_clip

KINDS = ("colour", "shape", "count", "relation", "swap")  # kinds of near misses

# sorted pairs (shape, colour), one for each object; colour None: the prompt leaves it open
Things = tuple[tuple[str, str | None], ...]


def near_misses(prompt: Prompt) -> dict[str, list[Prompt]]:
    """Prompts of the world that differ from this one in one attribute, by kind: colour, shape,
    count, relation, or colours swapped.

    None of them describes a picture of the prompt, except for two relations that hold at once in a
    diagonal picture; see `truths`.
    """
    own = set(_meaning(prompt["include"]))
    out: dict[str, list[Prompt]] = {kind: [] for kind in KINDS}
    for kind, include in _edits(prompt["include"]):
        found = _by_clauses().get(_spelled(include))
        if found and not own & set(_meaning(include)):
            out[kind].append(found)
    return out


def _edits(include: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Edit one thing of a prompt -> (kind, clauses); some edits leave the world of prompts, or say
    the same in other words."""
    for i, clause in enumerate(include):
        for kind, change in _changes(clause):
            yield kind, [*include[:i], clause | change, *include[i + 1 :]]
    if len(include) == 2:
        first, second = include
        yield "swap", [first | {"color": second["color"]}, second | {"color": first["color"]}]


def _changes(clause: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Change each attribute that a clause states -> (kind, other value)."""
    yield from (("colour", {"color": c}) for c in COLORS if clause["color"] not in (None, c))
    yield from (("shape", {"shape": s}) for s in SHAPES if s != clause["shape"])
    yield from (("count", {"count": n}) for n in (1, *NUMBERS) if n != clause["count"])
    if "position" in clause:
        others = (relation for relation in RELATIONS if relation != clause["position"][0])
        yield from (("relation", {"position": [relation, 0]}) for relation in others)


@cache
def _by_clauses() -> dict[str, Prompt]:
    return {_spelled(p["include"]): p for p in all_prompts()}


def _spelled(include: list[dict[str, Any]]) -> str:
    return repr([sorted(clause.items()) for clause in include])


def _meaning(include: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """A key that is equal for prompts that say the same: word order does not matter, and "a left of
    b" is "b right of a"."""
    things = [(c["shape"], c["color"], c["count"]) for c in include]
    relation = next((c["position"][0] for c in include if "position" in c), None)
    if relation is None:
        return [tuple(sorted(things, key=str))]
    opposite = next(r for r, d in RELATIONS.items() if d == tuple(-x for x in RELATIONS[relation]))
    return [(relation, things[1], things[0]), (opposite, things[0], things[1])]


def truths(objects: list[Object]) -> list[Prompt]:
    """Find every prompt of the world that describes the scene, by the verifier's strict reading."""
    found = [verify.FoundShape(o.shape, o.color, o.x, o.y, 2 * o.size, 2 * o.size) for o in objects]
    candidates = [
        *_about()[_things((o.shape, o.color) for o in objects)],
        *_about()[_things((o.shape, None) for o in objects)],
    ]
    return [p for p in candidates if verify.strict(found, p["include"])]


@cache
def _about() -> dict[Things, list[Prompt]]:
    """Prompts by the objects that they ask for."""
    out: dict[Things, list[Prompt]] = defaultdict(list)
    for p in all_prompts():
        asked = ((c["shape"], c["color"]) for c in p["include"] for _ in range(c["count"]))
        out[_things(asked)].append(p)
    return out


def _things(pairs: Iterable[tuple[str, str | None]]) -> Things:
    return tuple(sorted(pairs, key=str))
