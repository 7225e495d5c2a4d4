"""Checklists: the clauses of a prompt as yes/no questions, for a judge that looks at the picture or
for code.

A question is {"question": str, "weight": float, "parent": None | index | [indices], "check": "vlm"
| name of a code function, "args": {...}}. Parents come earlier and zero their children when they
are answered no (DPG-Bench, ELLA arXiv:2403.05135). All weigh the same. Answered by code, all of
them are yes exactly where the strict verdict of the verifier (shapes) or of the detector (GenEval)
is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from flowrl.data.geneval import NUMBERS, plural

Question = dict[str, Any]
By = Literal["vlm", "code"]


def with_checklists(
    prompts: Iterable[dict[str, Any]], write: Callable[..., list[Question]], by: By = "code"
) -> list[dict[str, Any]]:
    """The prompts, each with a "checklist" that `write` (from_shapes, from_geneval) makes of its
    clauses."""
    return [prompt | {"checklist": write(prompt, by)} for prompt in prompts]


def from_shapes(prompt: dict[str, Any], by: By = "code") -> list[Question]:
    """Count, colour and position of every clause of meta["include"], and that nothing else is in
    the picture."""
    include: list[dict[str, Any]] = prompt["include"]
    out: list[Question] = []
    counted: list[int] = []  # place of each clause's count question
    for clause in include:
        shape, color, count = clause["shape"], clause["color"], clause["count"]
        alone = sum(other["shape"] == shape for other in include) == 1
        said = (
            shape if alone or not color else f"{color} {shape}"
        )  # two clauses of one shape: the colour tells them apart
        args = {"shape": shape, "count": count} | ({} if alone or not color else {"color": color})
        counted.append(len(out))
        out.append(_question(_how_many(said, count), by, "shapes_count", args))
        if color and alone:
            args = {"shape": shape, "color": color, "count": count}
            out.append(
                _question(
                    _is_colored(shape, color, count), by, "shapes_count", args, parent=counted[-1]
                )
            )
    for number, clause in enumerate(include):
        if "position" in clause:
            relation, target = clause["position"]
            names = [_named(c["shape"], c["color"], c["count"]) for c in (clause, include[target])]
            args = {
                "include": [
                    _without_position(include[target]),
                    clause | {"position": [relation, 0]},
                ]
            }
            text = _stands(names, relation, clause["count"])
            out.append(
                _question(
                    text, by, "shapes_position", args, parent=[counted[number], counted[target]]
                )
            )
    total = {"count": sum(clause["count"] for clause in include)}
    out.append(
        _question(
            "Is the rest of the picture empty, with no other object in it?",
            by,
            "shapes_count",
            total,
        )
    )
    return out


def from_geneval(prompt: dict[str, Any], by: By = "code") -> list[Question]:
    """Count, colour and position of every clause of meta["include"], and every clause of
    meta["exclude"] that they leave open."""
    include: list[dict[str, Any]] = prompt["include"]
    out: list[Question] = []
    last: list[int] = []  # place of the last question about each clause's own objects
    for clause in include:
        name, count, color = clause["class"], clause["count"], clause.get("color")
        wanted = {"class": name, "count": count}
        out.append(_question(_how_many(name, count), by, "geneval", {"include": [wanted]}))
        if color:
            args = {"include": [wanted | {"color": color}]}
            out.append(
                _question(_is_colored(name, color, count), by, "geneval", args, parent=len(out) - 1)
            )
        last.append(len(out) - 1)
    for number, clause in enumerate(include):
        if "position" in clause:
            relation, target = clause["position"]
            others = include[target]
            pair = [_without_position(others), clause | {"position": [relation, 0]}]
            names = [_named(c["class"], c.get("color"), c["count"]) for c in (clause, others)]
            parents = [last[number], last[target]]
            out.append(
                _question(
                    _stands(names, relation, clause["count"]),
                    by,
                    "geneval",
                    {"include": pair},
                    parent=parents,
                )
            )
    for clause in prompt.get("exclude", []):
        name, count = clause["class"], clause["count"]
        if not any(c["class"] == name and c["count"] < count for c in include):
            text = (
                f"Are there no {plural(name)}?"
                if count == 1
                else f"Are there fewer than {count} {plural(name)}?"
            )
            out.append(_question(text, by, "geneval", {"exclude": [clause], "reading": "official"}))
    return out


def _question(
    text: str, by: By, check: str, args: dict[str, Any], parent: int | list[int] | None = None
) -> Question:
    question: Question = {"question": text, "weight": 1.0, "parent": parent}
    return question | ({"check": "vlm"} if by == "vlm" else {"check": check, "args": args})


def _without_position(clause: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in clause.items() if key != "position"}


def _how_many(name: str, count: int) -> str:
    return (
        f"Is there exactly one {name}?"
        if count == 1
        else f"Are there exactly {NUMBERS.get(count, count)} {plural(name)}?"
    )


def _is_colored(name: str, color: str, count: int) -> str:
    return f"Is the {name} {color}?" if count == 1 else f"Are all {plural(name)} {color}?"


def _named(name: str, color: str | None, count: int) -> str:
    return f"the {f'{color} ' if color else ''}{name if count == 1 else plural(name)}"


def _stands(names: list[str], relation: str, count: int) -> str:
    return f"{'Is' if count == 1 else 'Are'} {names[0]} {relation} {names[1]}?"
