"""Prompts of the shapes world: GenEval's six tasks (arXiv:2310.11513), with clauses to check.

meta["include"] lists clauses in GenEval's form, {"shape": str, "count": int, "color": str | None}
and, where one is asked for, "position": [relation, index], which points at an earlier clause.
Combinations are split by a hash into train and held-out prompts, so that RL trains on no held-out
combination (pretraining draws from both).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import permutations, product
from typing import Any

import torch

from flowrl.runtime.registry import did_you_mean
from flowrl.shapes.scenes import COLORS, RELATIONS, SHAPES, Object, place

NUMBERS = {2: "two", 3: "three", 4: "four"}
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
# share of each task in pretraining and in the held-out set; single shapes and pairs are few
SHARES = {
    "single_object": 0.05,
    "two_object": 0.10,
    "counting": 0.25,
    "colors": 0.10,
    "position": 0.25,
    "color_attr": 0.25,
}

Prompt = dict[str, Any]  # {"prompt": str, "task": str, "include": [...], "combination": str}


def _prompt(task: str, text: str, *clauses: dict[str, Any], combination: str) -> Prompt:
    return {"prompt": text, "task": task, "include": list(clauses), "combination": combination}


def _clause(
    shape: str, color: str | None = None, count: int = 1, position: list[Any] | None = None
) -> dict[str, Any]:
    clause: dict[str, Any] = {"shape": shape, "count": count, "color": color}
    return clause | ({"position": position} if position else {})


@cache
def all_prompts() -> tuple[Prompt, ...]:
    """Every prompt of the world, in a fixed order."""
    return (*_plain_prompts(), *_coloured_prompts(), *_pair_prompts())


def _plain_prompts() -> Iterator[Prompt]:
    """Shapes without a colour, alone and in pairs."""
    for shape in SHAPES:
        yield _prompt("single_object", f"a {shape}", _clause(shape), combination=shape)
    for a, b in permutations(SHAPES, 2):
        clauses = (_clause(a), _clause(b))
        combination = "+".join(sorted((a, b)))
        yield _prompt("two_object", f"a {a} and a {b}", *clauses, combination=combination)


def _coloured_prompts() -> Iterator[Prompt]:
    """One coloured shape, or several of it."""
    for shape, color in product(SHAPES, COLORS):
        text = f"{color} {shape}"
        yield _prompt("colors", f"a {text}", _clause(shape, color), combination=text)
        for n, word in NUMBERS.items():
            text = f"{word} {color} {shape}s"
            yield _prompt("counting", text, _clause(shape, color, n), combination=text)


def _pair_prompts() -> Iterator[Prompt]:
    """Two shapes of two colours, beside each other in some way, or in a stated relation."""
    for (ca, a), (cb, b) in permutations(product(COLORS, SHAPES), 2):
        if ca == cb:
            continue
        one, other = f"{ca} {a}", f"{cb} {b}"
        both = "+".join(sorted((one, other)))
        first, second = _clause(a, ca), _clause(b, cb)
        yield _prompt("color_attr", f"a {one} and a {other}", first, second, combination=both)
        for relation in RELATIONS:
            # GenEval's form: the second clause is the one that stands in relation to clause 0
            where = _clause(a, ca, position=[relation, 0])
            text, combination = f"a {one} {relation} a {other}", f"{both} {relation}"
            yield _prompt("position", text, second, where, combination=combination)


def held_out(prompt: Prompt) -> bool:
    """Whether the combination belongs to the held-out quarter: a hash of the combination, so that
    both word orders fall together."""
    digest = hashlib.sha256(f"{prompt['task']}:{prompt['combination']}".encode()).digest()
    return digest[0] % 4 == 0


def train_prompts() -> list[Prompt]:
    """Prompts that RL trains on, all tasks, disjoint in combination from `eval_prompts`."""
    return shared_out([p for p in all_prompts() if not held_out(p)], 512, SHARES)


def eval_prompts(count: int = 128) -> list[Prompt]:
    """Held-out prompts, the tasks in SHARES' proportions (tasks with few combinations repeat a
    prompt, with another seed)."""
    return shared_out([p for p in all_prompts() if held_out(p)], count, SHARES)


def shared_out(prompts: list[Prompt], count: int, shares: Mapping[str, float]) -> list[Prompt]:
    """Choose about `count` prompts, the tasks in these shares, by a hash of their texts."""
    out: list[Prompt] = []
    for task, share in shares.items():
        members = sorted(
            (p for p in prompts if p["task"] == task),
            key=lambda p: hashlib.sha256(p["prompt"].encode()).digest(),
        )
        wanted = round(share * count)
        out += [members[i % len(members)] for i in range(wanted)]
    return out


def words(text: str) -> list[str]:
    """The words of a text in small letters."""
    return re.findall(r"\w+", text.lower())


def vocabulary(prompts: list[Prompt]) -> frozenset[str]:
    """Every word of these prompts."""
    return frozenset(word for prompt in prompts for word in words(prompt["prompt"]))


def scene(prompt: Prompt, generator: torch.Generator) -> list[Object]:
    """A random scene that the prompt describes exactly; colours that it leaves open are drawn at
    random."""
    colors = list(COLORS)
    kinds: list[tuple[str, str]] = []
    relation = None
    include = prompt["include"]
    for clause in reversed(include) if prompt["task"] == "position" else include:
        open_color = colors[int(torch.randint(len(colors), (1,), generator=generator))]
        kinds += [(clause["shape"], clause["color"] or open_color)] * clause["count"]
        relation = relation or clause.get("position", [None])[0]
    return place(kinds, generator, relation)


def find(text: str) -> Prompt:
    """The prompt of the world with this text; unknown -> ValueError naming near ones."""
    by_text = {p["prompt"]: p for p in all_prompts()}
    if text not in by_text:
        near = did_you_mean(text, by_text)
        raise ValueError(f'"{text}" is not a prompt of the shapes world{near}')
    return by_text[text]
