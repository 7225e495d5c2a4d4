"""A checklist's questions: their faults, and the code that answers some of them.

A question is {"question": str, "weight": float, "parent": None | index | [indices], "check": "vlm"
| name of a code function, "args": {...}}; see rewards/checklist.py.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.rewards.core.failures import RewardBug
from flowrl.rewards.networks.detector import Clauses, Detections, official, strict
from flowrl.runtime.paths import located
from flowrl.runtime.registry import did_you_mean, user_file
from flowrl.shapes import verify

Question = Mapping[str, Any]

EXAMPLE = '{"question": "Is there a dog?", "weight": 1.0}'


def check_of(question: Question) -> Any:
    """Who answers a question: "vlm" for a judge, or the name of a code function."""
    return question.get("check", "vlm")


def parents(question: Question) -> list[Any]:
    """Places of the questions that must be answered yes for this one to count."""
    parent = question.get("parent")
    if parent is None:
        return []
    return list(parent) if isinstance(parent, list | tuple) else [parent]


# --- faults of a checklist


def complaint(questions: Any, *, judged: bool) -> str | None:
    """The fault of a checklist, as the end of a sentence; None if it can be answered.

    judged: whether there is an answerer.
    """
    if not isinstance(questions, list) or not questions:
        return f"has checklist={questions!r}, which should be a list of questions {EXAMPLE}"
    for number, question in enumerate(questions):
        wrong = _wrong_form(question) or _wrong_weight(question) or _wrong_parent(question, number)
        wrong = wrong or _wrong_check(question, judged)
        if wrong:
            return wrong
    if not sum(question.get("weight", 1.0) for question in questions):
        return "has a checklist whose weights are all 0"
    return None


def _wrong_form(question: Any) -> str | None:
    text = question.get("question") if isinstance(question, Mapping) else None
    if isinstance(text, str) and text.strip():
        return None
    return f"has {question!r} in its checklist, which should be like {EXAMPLE}"


def _wrong_weight(question: Question) -> str | None:
    weight = question.get("weight", 1.0)
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if number and math.isfinite(weight) and weight >= 0:
        return None
    return (
        f'gives the question "{question["question"]}" the weight {weight!r}, which should be a'
        " number from 0 on"
    )


def _wrong_parent(question: Question, number: int) -> str | None:
    """The fault of the parents of the question at place `number`."""
    for parent in parents(question):
        whole = isinstance(parent, int) and not isinstance(parent, bool)
        if not whole or not 0 <= parent < number:
            return (
                f'gives the question "{question["question"]}" the parent {question["parent"]!r},'
                " which should be the place, from 0, of an earlier one"
            )
    return None


def _wrong_check(question: Question, judged: bool) -> str | None:
    text, check = question["question"], check_of(question)
    if check == "vlm" and not judged:
        return (
            f'asks a judge "{text}", and none is set; set reward.checklist.answerer=vlm_yesno,'
            ' or give the question a "check"'
        )
    known = ["vlm", *CHECKS]
    if not isinstance(check, str) or (check not in known and ".py:" not in check):
        close = did_you_mean(str(check), known)
        return f'has the check {check!r} for the question "{text}"{close}'
    wrong = _wrong_args(check, question.get("args", {}))
    return wrong and f'cannot check "{text}": {wrong}'


def _wrong_args(check: str, args: Any) -> str | None:
    """Why a check cannot be called with args; None if it can."""
    if not isinstance(args, Mapping):
        return f'args={args!r} should be a mapping, as {{"count": 2}}'
    if check == "vlm":
        return None
    try:
        function = _users_function(check) if ".py:" in check else CHECKS[check]
    except ValueError as error:
        return str(error)
    try:
        inspect.signature(function).bind(None, **args)
    except TypeError as error:
        return f"{check} does not take args={dict(args)!r}: {error}"
    except ValueError:  # a function written in C may have no signature
        return None
    return None


# --- answers in code


class InCode:
    """Answers in code about (n, 3, H, W) pictures, each with its questions.

    Their shapes or objects are detected once, for all questions.
    """

    def __init__(
        self,
        pictures: Tensor,
        lists: list[Sequence[Question]],
        metas: list[dict[str, Any]],
        detector: Callable[[torch.device], Any],
    ):
        """detector: the geneval reward on a device; called only where a question needs it."""
        self.pictures = pictures
        checks = {check_of(question) for questions in lists for question in questions}
        self.shapes = verify.detect(pictures) if checks & SHAPES.keys() else []
        self.objects: list[Detections] = []
        if "geneval" in checks:
            asked = [_asked_of_detector(*pair) for pair in zip(lists, metas, strict=True)]
            self.objects = detector(pictures.device).detect(pictures, asked)

    def __call__(self, picture: int, question: Question) -> float:
        name, args = question["check"], question.get("args", {})
        if name in SHAPES:
            return float(SHAPES[name](self.shapes[picture], **args))
        if name == "geneval":
            return float(geneval(self.objects[picture], **args))
        answer = float(_users_function(name)(self.pictures[picture], **args))
        if answer < 0 or answer > 1:
            raise RewardBug(
                f'{name} answered {answer:g} to "{question["question"]}"; expected a number in'
                " [0, 1]"
            )
        return answer


def _asked_of_detector(questions: Sequence[Question], meta: Mapping[str, Any]) -> dict[str, Any]:
    """The tag and the clauses by which the detector sets its threshold and names colours."""
    every = [q.get("args", {}) for q in questions if q.get("check") == "geneval"]
    clauses = [clause for args in every for clause in args.get("include", [])]
    return {"tag": meta.get("tag"), "include": clauses}


def shapes_count(
    objects: list[verify.FoundShape],
    *,
    count: int,
    shape: str | None = None,
    color: str | None = None,
) -> bool:
    return sum(shape in (None, o.shape) and color in (None, o.color) for o in objects) == count


def shapes_position(objects: list[verify.FoundShape], *, include: list[dict[str, Any]]) -> bool:
    named = [
        o
        for o in objects
        if any(o.shape == c["shape"] and c["color"] in (None, o.color) for c in include)
    ]
    return verify.partial(named, include) == 1.0


def geneval(
    found: Detections,
    *,
    include: Clauses = (),
    exclude: Clauses = (),
    reading: Literal["strict", "official"] = "strict",
) -> bool:
    if reading == "strict":
        return strict(found, include)
    return official(found, include, exclude)


SHAPES: dict[str, Callable[..., bool]] = {
    "shapes_count": shapes_count,
    "shapes_position": shapes_position,
}
CHECKS = {**SHAPES, "geneval": geneval}


@cache
def _users_function(name: str) -> Callable[..., Any]:
    """The function behind "path/to/file.py:function"."""
    place, _, member = name.rpartition(":")
    path = located(place)
    found = user_file(path, what=f'check "{name}"').get(member)
    if not callable(found):
        raise ValueError(f'check "{name}": {path.name} has no function "{member}"')
    return found
