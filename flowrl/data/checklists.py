"""Checklists: the clauses of a prompt as yes/no questions, for a judge of pictures or for code.

A question is {"question": str, "weight": float, "parent": None | index | [indices], "check": "vlm"
| name of a code function, "args": {...}}. Parents come earlier and zero their children when they
are answered no (DPG-Bench, ELLA arXiv:2403.05135). All questions weigh the same. Answered by code,
all of them are yes exactly where the strict verdict of the verifier (shapes) or of the detector
(GenEval) is yes.
"""

from __future__ import annotations

from typing import Any, Literal

from flowrl.data.geneval import NUMBERS, plural

Question = dict[str, Any]
By = Literal["vlm", "code"]


def from_shapes(prompt: dict[str, Any], by: By = "code") -> list[Question]:
    """Ask for the count, the colour and the position of every clause of meta["include"], and
    whether nothing else is there."""
    include: list[dict[str, Any]] = prompt["include"]
    out: list[Question] = []
    counted: list[int] = []  # place of the count question of each clause
    for clause in include:
        alone = sum(other["shape"] == clause["shape"] for other in include) == 1
        counted.append(len(out))
        out += _of_shape(clause, alone, by, len(out))
    for number, clause in enumerate(include):
        if "position" in clause:
            relation, target = clause["position"]
            names = [_named(c["shape"], c["color"], c["count"]) for c in (clause, include[target])]
            text = _stands(names, relation, clause["count"])
            args = {"include": _pair(clause, include)}
            parents = [counted[number], counted[target]]
            out.append(_question(text, by, "shapes_position", args, parent=parents))
    text = "Is the rest of the picture empty, with no other object in it?"
    total = {"count": sum(clause["count"] for clause in include)}
    return [*out, _question(text, by, "shapes_count", total)]


def _of_shape(clause: dict[str, Any], alone: bool, by: By, place: int) -> list[Question]:
    """Ask for a clause's count and colour. place: where its first question stands.

    alone: whether no other clause is about its shape; where one is, the colour tells them apart.
    """
    shape, color, count = clause["shape"], clause["color"], clause["count"]
    if alone or not color:
        name, args = shape, {"shape": shape, "count": count}
    else:
        name, args = f"{color} {shape}", {"shape": shape, "count": count, "color": color}
    out = [_question(_how_many(name, count), by, "shapes_count", args)]
    if color and alone:
        args = {"shape": shape, "color": color, "count": count}
        text = _is_colored(shape, color, count)
        out.append(_question(text, by, "shapes_count", args, parent=place))
    return out


def from_geneval(prompt: dict[str, Any], by: By = "code") -> list[Question]:
    """Ask for the count, the colour and the position of every clause of meta["include"], and for
    the clauses that "exclude" adds."""
    include: list[dict[str, Any]] = prompt["include"]
    out: list[Question] = []
    last: list[int] = []  # place of the last question about each clause's own objects
    for clause in include:
        out += _of_class(clause, by, len(out))
        last.append(len(out) - 1)
    for number, clause in enumerate(include):
        if "position" in clause:
            relation, target = clause["position"]
            pair = (clause, include[target])
            names = [_named(c["class"], c.get("color"), c["count"]) for c in pair]
            text = _stands(names, relation, clause["count"])
            args = {"include": _pair(clause, include)}
            out.append(_question(text, by, "geneval", args, parent=[last[number], last[target]]))
    return [*out, *_excluded(prompt.get("exclude", []), include, by)]


def _of_class(clause: dict[str, Any], by: By, place: int) -> list[Question]:
    """Ask for a clause's count and colour. place: where its first question stands."""
    name, count, color = clause["class"], clause["count"], clause.get("color")
    wanted = {"class": name, "count": count}
    out = [_question(_how_many(name, count), by, "geneval", {"include": [wanted]})]
    if color:
        args = {"include": [wanted | {"color": color}]}
        out.append(_question(_is_colored(name, color, count), by, "geneval", args, parent=place))
    return out


def _excluded(
    exclude: list[dict[str, Any]], include: list[dict[str, Any]], by: By
) -> list[Question]:
    """Ask for the clauses of meta["exclude"] that the questions about "include" leave open."""
    out = []
    for clause in exclude:
        name, count = clause["class"], clause["count"]
        if any(c["class"] == name and c["count"] < count for c in include):
            continue
        text = f"Are there fewer than {count} {plural(name)}?"
        if count == 1:
            text = f"Are there no {plural(name)}?"
        out.append(_question(text, by, "geneval", {"exclude": [clause], "reading": "official"}))
    return out


def _pair(clause: dict[str, Any], include: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put a clause with a position after the clause that it stands in relation to."""
    relation, target = clause["position"]
    other = {key: value for key, value in include[target].items() if key != "position"}
    return [other, clause | {"position": [relation, 0]}]


def _question(
    text: str, by: By, check: str, args: dict[str, Any], parent: int | list[int] | None = None
) -> Question:
    question: Question = {"question": text, "weight": 1.0, "parent": parent}
    return question | ({"check": "vlm"} if by == "vlm" else {"check": check, "args": args})


def _how_many(name: str, count: int) -> str:
    if count == 1:
        return f"Is there exactly one {name}?"
    return f"Are there exactly {NUMBERS.get(count, count)} {plural(name)}?"


def _is_colored(name: str, color: str, count: int) -> str:
    return f"Is the {name} {color}?" if count == 1 else f"Are all {plural(name)} {color}?"


def _named(name: str, color: str | None, count: int) -> str:
    thing = name if count == 1 else plural(name)
    return f"the {color} {thing}" if color else f"the {thing}"


def _stands(names: list[str], relation: str, count: int) -> str:
    return f"{'Is' if count == 1 else 'Are'} {names[0]} {relation} {names[1]}?"
