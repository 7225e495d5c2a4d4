"""Prompts of the shapes world: GenEval's six tasks (arXiv:2310.11513), each with the clauses that a
verifier checks.

meta["include"] lists clauses in GenEval's form, {"shape": str, "count": int, "color": str | None}
and, where one is asked for, "position": [relation, index], which points at an earlier clause.
Combinations are split by a hash into train and held-out prompts, so that RL trains on no held-out
combination (pretraining draws from both).
"""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import permutations, product
from typing import Any

import torch

from flowrl.runtime.registry import did_you_mean
from flowrl.shapes.scenes import COLORS, RELATIONS, SHAPES, Object, place

NUMBERS = {2: "two", 3: "three", 4: "four"}
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
# share of each task in pretraining and in the held-out set; single shapes and pairs are few and
# easy
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
    out: list[Prompt] = []
    for shape in SHAPES:
        out.append(_prompt("single_object", f"a {shape}", _clause(shape), combination=shape))
    for a, b in permutations(SHAPES, 2):
        combination = "+".join(sorted((a, b)))
        out.append(
            _prompt(
                "two_object", f"a {a} and a {b}", _clause(a), _clause(b), combination=combination
            )
        )
    for shape, color in product(SHAPES, COLORS):
        out.append(
            _prompt(
                "colors",
                f"a {color} {shape}",
                _clause(shape, color),
                combination=f"{color} {shape}",
            )
        )
        for n, word in NUMBERS.items():
            text = f"{word} {color} {shape}s"
            out.append(_prompt("counting", text, _clause(shape, color, n), combination=text))
    things = list(product(COLORS, SHAPES))
    for (ca, a), (cb, b) in permutations(things, 2):
        if ca == cb:
            continue
        combination = "+".join(sorted((f"{ca} {a}", f"{cb} {b}")))
        first, second = _clause(a, ca), _clause(b, cb)
        out.append(
            _prompt(
                "color_attr", f"a {ca} {a} and a {cb} {b}", first, second, combination=combination
            )
        )
        for relation in RELATIONS:
            # GenEval's form: the second clause is the one that stands in relation to clause 0
            where = _clause(a, ca, position=[relation, 0])
            text = f"a {ca} {a} {relation} a {cb} {b}"
            out.append(
                _prompt("position", text, second, where, combination=f"{combination} {relation}")
            )
    return tuple(out)


def held_out(prompt: Prompt) -> bool:
    """Whether the combination belongs to the held-out quarter: a hash of the combination, so both
    word orders fall together."""
    digest = hashlib.sha256(f"{prompt['task']}:{prompt['combination']}".encode()).digest()
    return digest[0] % 4 == 0


def train_prompts() -> list[Prompt]:
    """Prompts that RL trains on, all tasks, disjoint in combination from `eval_prompts`."""
    return _shared_out([p for p in all_prompts() if not held_out(p)], 512)


def eval_prompts(count: int = 128) -> list[Prompt]:
    """Held-out prompts, the tasks in SHARES' proportions (tasks with few combinations repeat a
    prompt, with another seed)."""
    return _shared_out([p for p in all_prompts() if held_out(p)], count)


def _shared_out(prompts: list[Prompt], count: int) -> list[Prompt]:
    out: list[Prompt] = []
    for task, share in SHARES.items():
        members = sorted(
            (p for p in prompts if p["task"] == task),
            key=lambda p: hashlib.sha256(p["prompt"].encode()).digest(),
        )
        wanted = round(share * count)
        out += [members[i % len(members)] for i in range(wanted)]
    return out


def scene(prompt: Prompt, generator: torch.Generator) -> list[Object]:
    """A random scene that the prompt describes exactly; colours that it leaves open are drawn at
    random."""
    colors = list(COLORS)
    kinds: list[tuple[str, str]] = []
    relation = None
    for clause in (
        reversed(prompt["include"]) if prompt["task"] == "position" else prompt["include"]
    ):
        open_color = colors[int(torch.randint(len(colors), (1,), generator=generator))]
        kinds += [(clause["shape"], clause["color"] or open_color)] * clause["count"]
        relation = relation or clause.get("position", [None])[0]
    return place(kinds, generator, relation)


def find(text: str) -> Prompt:
    """The prompt of the world with this text; unknown -> ValueError naming near ones."""
    by_text = {p["prompt"]: p for p in all_prompts()}
    if text not in by_text:
        raise ValueError(f'"{text}" is no prompt of the shapes world{did_you_mean(text, by_text)}')
    return by_text[text]
