"""GenEval's arithmetic (arXiv:2310.11513): detections in a picture, judged by the clauses of its
prompt. It needs no network.

Sources: djghosh13/geneval, evaluation/evaluate_images.py (`official`); yifan123/reward-server,
reward_server/gen_eval.py (`partial` and `strict`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.data.geneval import CLASSES, COLORS, RELATIONS
from flowrl.runtime.registry import did_you_mean

SHRINK = 0.1  # share of both sizes by which the offset of two centres is shrunk


@dataclass(frozen=True, slots=True)
class DetectedObject:
    """One object that a detector found in a picture."""

    box: tuple[float, float, float, float]  # left, top, right, bottom in px
    score: float  # confidence in [0, 1]
    color: str | None = None  # name of its colour; None: no clause asks for the colour


# class -> detected objects of it, the most confident first
Detections = Mapping[str, Sequence[DetectedObject]]
Clauses = Sequence[Mapping[str, Any]]


def readings(found: Detections, meta: Mapping[str, Any]) -> dict[str, float]:
    """All readings of one picture: partial, partial_fixed, strict, official."""
    include, exclude = meta["include"], meta.get("exclude", [])
    return {
        "partial": partial(found, include),
        "partial_fixed": partial_fixed(found, include),
        "strict": float(strict(found, include)),
        "official": float(official(found, include, exclude)),
    }


def partial(found: Detections, include: Clauses) -> float:
    """The score that Flow-GRPO trains on: the mean of the terms that the clauses collect.

    A clause that asks for n and meets f gives 1 - |n - f| / n, below 0 where f > 2n. If f != n, a
    colour or a position (or both) adds one 0. Else a colour adds 1 - |n - right| / n; and where
    that is 1, a position adds 0 if its target did not match, 1 if it holds for all pairs, and 0
    *and* 1 if it does not. So the number of terms depends on the picture. `exclude` does not count.
    """
    terms: list[float] = []
    matched: list[Sequence[DetectedObject] | None] = []
    for clause in include:
        n, objects = clause["count"], found.get(clause["class"], [])
        terms.append(1 - abs(n - len(objects)) / n)
        ok = len(objects) == n
        if not ok and (clause.get("color") or clause.get("position")):
            terms.append(0.0)
        if ok and clause.get("color"):
            right = _colored(objects, clause["color"])
            terms.append(1 - abs(n - right) / n)
            ok = right == n
        if ok and clause.get("position"):
            ok = _stands(objects, clause["position"], matched)
            reachable = matched[clause["position"][1]] is not None
            terms += [1.0] if ok else [0.0, 1.0] if reachable else [0.0]
        matched.append(objects if ok else None)
    return sum(terms) / len(terms)


def partial_fixed(found: Detections, include: Clauses) -> float:
    """Partial credit in [0, 1]: each clause has a term for its count, its colour and its position.

    Unlike in `partial`, the count term is at least 0, a wrong position gives one 0, and colour and
    position terms stay, as 0, when an earlier term of the clause is not 1: the mean is always over
    the same number of terms. It is 1 exactly where `strict` is true.
    """
    terms: list[float] = []
    matched: list[Sequence[DetectedObject] | None] = []
    for clause in include:
        n, objects = clause["count"], found.get(clause["class"], [])
        terms.append(max(0.0, 1 - abs(n - len(objects)) / n))
        ok = len(objects) == n
        if clause.get("color"):
            right = _colored(objects, clause["color"])
            terms.append(right / n if ok else 0.0)
            ok = ok and right == n
        if clause.get("position"):
            ok = ok and _stands(objects, clause["position"], matched)
            terms.append(float(ok))
        matched.append(objects if ok else None)
    return sum(terms) / len(terms)


def strict(found: Detections, include: Clauses) -> bool:
    """The server's strict verdict: every clause exactly right, counts equal.

    Other classes and `exclude` do not count.
    """
    return partial_fixed(found, include) == 1.0


def official(found: Detections, include: Clauses, exclude: Clauses = ()) -> bool:
    """The benchmark's verdict: at least as many objects as asked for, of which the most confident
    are judged; and fewer objects than each exclude clause says."""
    matched: list[Sequence[DetectedObject] | None] = []
    for clause in include:
        n = clause["count"]
        objects = found.get(clause["class"], [])[:n]
        ok = len(objects) == n
        if ok and clause.get("color"):
            ok = _colored(objects, clause["color"]) == n
        if ok and clause.get("position"):
            ok = _stands(objects, clause["position"], matched)
        matched.append(objects if ok else None)
    return None not in matched and all(
        len(found.get(clause["class"], [])) < clause["count"] for clause in exclude
    )


def relations(a: DetectedObject, b: DetectedObject) -> set[str]:
    """Relations of a to b: up to two of RELATIONS.

    The offset of the centres, each component shrunk by a tenth of both sizes, over the length of
    the offset *before* shrinking: a component beyond 0.5 counts. So objects that nearly overlap are
    in none.
    """
    ax, ay, aw, ah = _centre(a)
    bx, by, bw, bh = _centre(b)
    dx, dy = ax - bx, ay - by
    sx, sy = _shrunk(dx, SHRINK * (aw + bw)), _shrunk(dy, SHRINK * (ah + bh))
    if abs(sx) < 1e-3 and abs(sy) < 1e-3:
        return set()
    length = (dx * dx + dy * dy) ** 0.5
    holds = {"left of": -sx, "right of": sx, "above": -sy, "below": sy}  # y grows downwards
    return {relation for relation in RELATIONS if holds[relation] / length > 0.5}


def complaint(meta: Mapping[str, Any]) -> str | None:
    """The fault of a prompt's clauses, as the end of a sentence; None if they can be judged."""
    include, exclude = meta.get("include"), meta.get("exclude", [])
    if not isinstance(include, list) or not include:
        return (
            f'has include={include!r}, which should be a list of clauses {{"class": "dog", "count":'
            ' 1, "color": "red"}'
        )
    if not isinstance(exclude, list):
        return (
            f'has exclude={exclude!r}, which should be a list of clauses {{"class": "dog",'
            ' "count": 3}'
        )
    wrong = (_flaw(clause, number) for number, clause in enumerate([*include, *exclude]))
    return next((flaw for flaw in wrong if flaw), None)


def _flaw(clause: Any, number: int) -> str | None:
    """The fault of the clause at place `number` of its prompt; None: it has none."""
    if not isinstance(clause, Mapping) or not isinstance(clause.get("class"), str):
        return f'has the clause {clause!r}, which should be like {{"class": "dog", "count": 1}}'
    count = clause.get("count")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        return f"has the clause {clause!r}, whose count should be a whole number from 1"
    for key, names in (("class", CLASSES), ("color", COLORS)):
        if clause.get(key) is not None and clause[key] not in names:
            return (
                f'asks for the {key} "{clause[key]}", which GenEval cannot'
                f" detect{did_you_mean(str(clause[key]), names)}"
            )
    if clause.get("position") is not None and not _points_back(clause["position"], number):
        return (
            f'has the position {clause["position"]!r}, which should be like ["left of", 0]: a'
            " relation and an earlier clause"
        )
    return None


def _points_back(position: Any, number: int) -> bool:
    if not isinstance(position, list | tuple) or len(position) != 2:
        return False
    relation, target = position
    return relation in RELATIONS and isinstance(target, int) and 0 <= target < number


def _colored(objects: Sequence[DetectedObject], color: str) -> int:
    return sum(found.color == color for found in objects)


def _stands(
    objects: Sequence[DetectedObject],
    position: Sequence[Any],
    matched: Sequence[Sequence[DetectedObject] | None],
) -> bool:
    """Whether each object is in the relation to each of an earlier clause, which must have
    matched."""
    relation, target = position
    others = matched[target]
    return others is not None and all(relation in relations(a, b) for a in objects for b in others)


def _centre(found: DetectedObject) -> tuple[float, float, float, float]:
    left, top, right, bottom = found.box
    return (left + right) / 2, (top + bottom) / 2, abs(right - left), abs(bottom - top)


def _shrunk(offset: float, by: float) -> float:
    return max(abs(offset) - by, 0.0) * (1 if offset > 0 else -1)
