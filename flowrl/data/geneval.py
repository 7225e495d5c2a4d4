"""Prompts of GenEval's six tasks (arXiv:2310.11513), with the clauses that the benchmark checks.

meta["include"]: clauses {"class": str, "count": int} with "color" and "position" where one is asked
for; "position" is [relation, index], the object stands in that relation to an earlier clause.
meta["exclude"]: {"class", "count"}, so many are too many. meta["tag"]: the task (also under "task",
by which evaluation groups). Format and templates: djghosh13/geneval, prompts/create_prompts.py.

Held-out prompts have the benchmark's sizes (80, 99, 80, 94, 100, 100: 553). What a prompt asks for,
whatever the order of words, is a combination; the first combinations in the order of their hashes
are held out, the rest are for training. Departures: the texts are not the benchmark's own 553 (its
prompt file works as it is: data.eval=evaluation_metadata.jsonl), plurals are English ("knives"),
and pairs and masses ("skis", "scissors", "broccoli") are neither counted nor given an article.
"""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import combinations, permutations, product
from typing import Any

from flowrl.runtime.text import items

# COCO's classes in COCO's order, under GenEval's names: a detector's label is a place in this list
CLASSES = items("""
    person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light,
    fire hydrant, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant,
    bear, zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard,
    sports ball, kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket, bottle,
    wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot,
    hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop,
    computer mouse, tv remote, computer keyboard, cell phone, microwave, oven, toaster, sink,
    refrigerator, book, clock, vase, scissors, teddy bear, hair drier, toothbrush
""")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
UNCOUNTED = ("skis", "scissors", "broccoli")
PLURALS = {
    "person": "people",
    "sheep": "sheep",
    "knife": "knives",
    "computer mouse": "computer mice",
}
HELD_OUT = {
    "single_object": 80,
    "two_object": 99,
    "counting": 80,
    "colors": 94,
    "position": 100,
    "color_attr": 100,
}
# Flow-GRPO's ratio of the training tasks (arXiv:2505.05470, section 5.1): hard tasks are frequent,
# and single objects are left out
RATIO = {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1}
DRAWN = 4000  # number of combinations of two coloured objects that are drawn, of 277,290

Prompt = dict[str, Any]


def train_prompts(count: int = 5100) -> list[Prompt]:
    """About `count` prompts in Flow-GRPO's ratio, none of a held-out combination. Tasks with few
    combinations repeat theirs."""
    out = []
    for task, share in RATIO.items():
        members = _ordered(task)[1]
        own = round(count * share / sum(RATIO.values()))
        out += [members[i % len(members)] for i in range(own)]
    return out


def eval_prompts() -> list[Prompt]:
    """The 553 held-out prompts, tasks mixed, so that the first n are a sample of all."""
    return _by_hash([prompt for task in HELD_OUT for prompt in _ordered(task)[0]], "prompt")


def plural(name: str) -> str:
    return PLURALS.get(name, f"{name}es" if name.endswith(("s", "ch", "sh")) else f"{name}s")


def with_article(name: str) -> str:
    return name if name in UNCOUNTED else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


@cache
def _ordered(task: str) -> tuple[list[Prompt], list[Prompt]]:
    """Held-out and training prompts of a task, both in the order of their hashes."""
    by_combination: dict[str, list[Prompt]] = {}
    for prompt in _TASKS[task]():
        by_combination.setdefault(prompt["combination"], []).append(prompt)
    first = [group[0] for group in by_combination.values()]
    reserved = _by_hash(first, "combination")[: HELD_OUT[task]]
    names = {prompt["combination"] for prompt in reserved}
    first_of = [_by_hash(by_combination[prompt["combination"]], "prompt")[0] for prompt in reserved]
    rest = [prompt for name, own in by_combination.items() if name not in names for prompt in own]
    return first_of, _by_hash(rest, "prompt")


def _by_hash(prompts: list[Prompt], key: str) -> list[Prompt]:
    def digest(prompt: Prompt) -> bytes:
        return hashlib.sha256(f"{prompt['tag']}:{prompt[key]}".encode()).digest()

    return sorted(prompts, key=digest)


def _prompt(
    tag: str,
    text: str,
    *include: dict[str, Any],
    combination: str,
    exclude: list[dict[str, Any]] | None = None,
) -> Prompt:
    prompt = {
        "prompt": f"a photo of {text}",
        "tag": tag,
        "task": tag,
        "include": list(include),
        "combination": combination,
    }
    return prompt | ({"exclude": exclude} if exclude else {})


def _single_object() -> list[Prompt]:
    return [
        _prompt("single_object", with_article(name), {"class": name, "count": 1}, combination=name)
        for name in CLASSES
    ]


def _two_object() -> list[Prompt]:
    return [
        _prompt(
            "two_object",
            f"{with_article(a)} and {with_article(b)}",
            {"class": a, "count": 1},
            {"class": b, "count": 1},
            combination="+".join(sorted((a, b))),
        )
        for a, b in permutations(CLASSES, 2)
    ]


def _counting() -> list[Prompt]:
    return [
        _prompt(
            "counting",
            f"{word} {plural(name)}",
            {"class": name, "count": n},
            exclude=[{"class": name, "count": n + 1}],
            combination=f"{n} {name}",
        )
        for name, (n, word) in product(CLASSES, NUMBERS.items())
        if name not in UNCOUNTED
    ]


def _colors() -> list[Prompt]:
    return [
        _prompt(
            "colors",
            _colored(color, name),
            {"class": name, "count": 1, "color": color},
            combination=f"{color} {name}",
        )
        # the first class, person, is left out: there are no coloured people
        for name, color in product(CLASSES[1:], COLORS)
    ]


def _position() -> list[Prompt]:
    mirror = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    out = []
    for (a, b), relation in product(combinations(CLASSES, 2), mirror):
        # "a left of b" and "b right of a" are one combination
        for first, where, second in ((a, relation, b), (b, mirror[relation], a)):
            text = f"{with_article(first)} {where} {with_article(second)}"
            clauses = (
                {"class": second, "count": 1},
                {"class": first, "count": 1, "position": [where, 0]},
            )
            out.append(_prompt("position", text, *clauses, combination=f"{a} {relation} {b}"))
    return out


def _color_attr() -> list[Prompt]:
    """Prompts of two coloured objects: DRAWN combinations out of all, drawn by a hash."""
    out: dict[str, Prompt] = {}
    number = 0
    while len(out) < DRAWN:
        things = _two_things(number)
        number += 1
        combination = "+".join(sorted(f"{color} {name}" for name, color in things))
        (first, one), (second, other) = things
        if first == second or one == other or combination in out:
            continue
        text = " and ".join(_colored(color, name) for name, color in things)
        clauses = [{"class": name, "count": 1, "color": color} for name, color in things]
        out[combination] = _prompt("color_attr", text, *clauses, combination=combination)
    return list(out.values())


def _two_things(number: int) -> list[tuple[str, str]]:
    """Read (class, colour) of two objects off a hash of the number."""
    draw = int.from_bytes(hashlib.sha256(f"color_attr:{number}".encode()).digest()[:8])
    draw, i = divmod(draw, len(CLASSES) - 1)
    draw, j = divmod(draw, len(CLASSES) - 1)
    draw, k = divmod(draw, len(COLORS))
    return [(CLASSES[i + 1], COLORS[k]), (CLASSES[j + 1], COLORS[draw % len(COLORS)])]


def _colored(color: str, name: str) -> str:
    return f"{color} {name}" if name in UNCOUNTED else f"{with_article(color)} {name}"


_TASKS = {
    "single_object": _single_object,
    "two_object": _two_object,
    "counting": _counting,
    "colors": _colors,
    "position": _position,
    "color_attr": _color_attr,
}
