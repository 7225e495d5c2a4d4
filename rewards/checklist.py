"""A prompt as a weighted list of yes/no questions, answered by a judge that looks at the picture,
or by code.

meta["checklist"] is a list of {"question": str, "weight": float, "parent": None | index |
[indices], "check": "vlm" | name, "args": {...}}. The score is the weighted mean of the answers,
where a question counts 0 when a parent, an earlier question, is below 0.5 (DPG-Bench, ELLA
arXiv:2403.05135, dpg_bench/compute_dpg_bench.py; "parent" is its dependency, counted from 0 here).
An answer that failed makes its sample NaN.

Judges are rewards that offer answer(media (n, 3, H, W), questions) -> (n,) in [0, 1], NaN where
failed: vlm_yesno, vqascore. Code functions:
* shapes_count {"count": n, "shape": ..., "color": ...}: exactly n objects of that shape and colour,
  either left open, in the shapes world;
* shapes_position {"include": [clause, clause with a position]}: the relation holds between all of
  the two;
* geneval {"include": [...], "exclude": [...], "reading": "strict" | "official"}: that verdict on
  GenEval's detections;
* path/to/file.py:function: your own, function(image (3, H, W), **args) -> a number in [0, 1].
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor

from flowrl.data import checklists
from flowrl.rewards.core.pictures import frames_of
from flowrl.rewards.core.reward import Reward, RewardBug, forgetful, load, user_file
from flowrl.rewards.core.reward import Settings as Base
from flowrl.rewards.core.wrap import load_inner
from flowrl.rewards.networks import detector as networks_detector
from flowrl.runtime.registry import did_you_mean
from flowrl.shapes import verify
from flowrl.types import MediaContext

YES = 0.5

Question = Mapping[str, Any]


class Settings(Base):
    questions: Literal["given", "shapes", "geneval"] = pydantic.Field(
        "given",
        description=(
            "given: each prompt's checklist; shapes, geneval: written from the prompt's include"
            " clauses."
        ),
    )
    answerer: Any = pydantic.Field(
        None,
        description=(
            "Reward that answers questions of check vlm: vlm_yesno or vqascore; null: none needed."
        ),
    )
    answerer_settings: dict[str, Any] = pydantic.Field({}, description="Its settings.")
    geneval_settings: dict[str, Any] = pydantic.Field(
        {}, description="Settings of the geneval reward, whose detector answers in code."
    )
    binary: bool = pydantic.Field(
        False, description="Count an answer as 1 from 0.5 on and as 0 below (DPG-Bench)."
    )
    frames: int = pydantic.Field(
        4,
        ge=1,
        description=(
            "Of a video, this many frames, evenly spaced, are asked about; answers are averaged."
        ),
    )
    chunk: int = pydantic.Field(
        64, ge=1, description="Most pairs of picture and question in one call of the answerer."
    )
    log: str | None = pydantic.Field(
        None, description="A .jsonl file that gets a line with all answers for each scored sample."
    )


class Checklist(Reward):
    """Weighted share of a prompt's yes/no questions that are answered yes, in [0, 1]."""

    Settings = Settings
    name = "checklist"
    scale = (
        "0 to 1: weighted share of the prompt's questions answered yes; a question counts only if"
        " its parents are answered yes"
    )
    range = (0.0, 1.0)
    needs = frozenset({"meta"})
    answers = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        self.reads = frozenset({"checklist"} if s.questions == "given" else {"include"})
        self.answerer = _load_answerer(s.answerer, s.answerer_settings)
        self.geneval: Any = (
            load("geneval", **s.geneval_settings)
            if s.questions == "geneval" and self.answerer is None
            else None
        )
        self.last_answers: list[
            list[float]
        ] = []  # of the samples scored last, before parents zeroed any
        self._asked = ""  # which samples those were
        self.remembers = True

    def to(self, device: Any) -> Checklist:
        for reward in (self.answerer, self.geneval):
            if reward is not None:
                reward.to(device)
        return self

    def begin(self, run: Path) -> None:
        for reward in self._inner():
            reward.begin(run)

    @contextmanager
    def uncached(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(forgetful(self))
            for reward in self._inner():
                stack.enter_context(reward.uncached())
            yield

    def _inner(self) -> list[Reward]:
        return [reward for reward in (self.answerer, self.geneval) if isinstance(reward, Reward)]

    def complaint(self, meta: Mapping[str, Any]) -> str | None:
        if self.settings.questions == "given":
            return complaint(meta.get("checklist"), judged=self.answerer is not None)
        return (
            verify.complaint(meta.get("include"))
            if self.settings.questions == "shapes"
            else networks_detector.complaint(meta)
        )

    def questions(self, meta: Mapping[str, Any]) -> Sequence[Question]:
        """The checklist of a prompt."""
        if self.settings.questions == "given":
            return meta["checklist"]
        write = (
            checklists.from_shapes
            if self.settings.questions == "shapes"
            else checklists.from_geneval
        )
        return write(dict(meta), "code" if self.answerer is None else "vlm")

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        lists, answers = self._ask(media, prompts, context)
        scores = [
            _mean(questions, self._counted(questions, row))
            for questions, row in zip(lists, answers, strict=True)
        ]
        if self.settings.log:
            self._write(prompts, lists, answers, scores)
        return torch.tensor(scores, dtype=torch.float32, device=media.device)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """{"all": 1 if every question is answered yes, "yes": the share of yes without weights or
        parents}, (B,) each."""
        _, answers = self._ask(media, prompts, context)
        failed = torch.tensor(
            [math.nan if any(map(math.isnan, row)) else 0.0 for row in answers], device=media.device
        )
        all_yes = torch.tensor(
            [float(all(answer >= YES for answer in row)) for row in answers], device=media.device
        )
        share = torch.tensor(
            [sum(answer >= YES for answer in row) / len(row) for row in answers],
            device=media.device,
        )
        return {"all": all_yes + failed, "yes": share + failed}

    def told(self, media: Tensor, context: MediaContext) -> list[list[dict[str, Any]]] | None:
        """What was answered about these samples, if they are the ones that were asked about last:
        {"question", "answer" (None: it failed), "counted" (after parents and `binary`), "zeroed" (a
        parent is no)} of each question of each sample.
        """
        assert context.meta is not None
        lists = [self.questions(meta) for meta in context.meta]
        if _digest(self._frames(media), lists) != self._asked:
            return None
        return [
            self._said(questions, row)
            for questions, row in zip(lists, self.last_answers, strict=True)
        ]

    def _ask(
        self, media: Tensor, prompts: list[str], context: MediaContext | None
    ) -> tuple[list[Sequence[Question]], list[list[float]]]:
        """Each sample's questions and answers. What was asked last is not asked again: a judge is
        dear, and may not repeat itself."""
        assert context is not None and context.meta is not None
        for prompt, meta in zip(prompts, context.meta, strict=True):
            if wrong := self.complaint(meta):
                raise ValueError(f'the prompt "{prompt}" {wrong}')
        lists, shown = [self.questions(meta) for meta in context.meta], self._frames(media)
        asked = _digest(shown, lists)
        if asked != self._asked or not self.remembers:
            self.problem = None
            self.last_answers = self._answers(shown, lists, context.meta)
            self._asked = asked
        return lists, self.last_answers

    def _frames(self, media: Tensor) -> Tensor:
        """(B, frames, 3, H, W): what is asked about, the middles of `frames` equal stretches."""
        videos = media.detach() if media.ndim == 5 else media.detach()[:, None]
        count = min(self.settings.frames, videos.shape[1])
        return videos[:, [(2 * i + 1) * videos.shape[1] // (2 * count) for i in range(count)]]

    def _answers(
        self, shown: Tensor, lists: list[Sequence[Question]], metas: list[dict[str, Any]]
    ) -> list[list[float]]:
        """Of (B, frames, 3, H, W), each sample's answers, the mean over its frames."""
        pictures, owner = (
            frames_of(shown),
            [i for i in range(len(shown)) for _ in range(shown.shape[1])],
        )
        by_code = _Code(
            pictures, [lists[i] for i in owner], [metas[i] for i in owner], self._detector
        )
        asked = [
            (p, q)
            for p, i in enumerate(owner)
            for q, question in enumerate(lists[i])
            if question.get("check", "vlm") == "vlm"
        ]
        said = dict(
            zip(
                asked,
                self._judge(pictures, [(p, lists[owner[p]][q]["question"]) for p, q in asked]),
                strict=True,
            )
        )
        out = []
        for i, questions in enumerate(lists):
            rows = [p for p, sample in enumerate(owner) if sample == i]
            answers = [
                [said[p, q] if (p, q) in said else by_code(p, question) for p in rows]
                for q, question in enumerate(questions)
            ]
            out.append([sum(values) / len(values) for values in answers])
        return out

    def _judge(self, pictures: Tensor, asked: list[tuple[int, str]]) -> list[float]:
        """The answerer's opinion of (picture, question) pairs."""
        out: list[float] = []
        for start in range(0, len(asked), self.settings.chunk):
            part = asked[start : start + self.settings.chunk]
            answers = self.answerer.answer(
                pictures[[p for p, _ in part]], [text for _, text in part]
            )
            if (
                not isinstance(answers, Tensor)
                or answers.shape != (len(part),)
                or bool(((answers < 0) | (answers > 1)).any())
            ):
                wanted = f"a tensor ({len(part)},) in [0, 1], NaN where it failed"
                raise RewardBug(
                    f'"{self.settings.answerer}" answered {answers!r}; expected {wanted}'
                )
            self.problem = self.problem or getattr(self.answerer, "problem", None)
            out += answers.float().tolist()
        return out

    def _detector(self, device: Any) -> Any:
        if self.geneval is None:
            self.geneval = load("geneval", **self.settings.geneval_settings)
        return self.geneval.to(device)

    def _counted(self, questions: Sequence[Question], answers: list[float]) -> list[float]:
        """Answers with those zeroed whose parents are no; a zeroed question is a no to its own
        children."""
        out: list[float] = []
        for question, answer in zip(questions, answers, strict=True):
            value = (
                float(answer >= YES) if self.settings.binary and not math.isnan(answer) else answer
            )
            out.append(
                0.0
                if any(out[parent] < YES for parent in _parents(question))
                and not math.isnan(answer)
                else value
            )
        return out

    def _said(self, questions: Sequence[Question], answers: list[float]) -> list[dict[str, Any]]:
        counted = self._counted(questions, answers)
        return [
            {
                "question": question["question"],
                "answer": _number(answer),
                "counted": _number(own),
                "zeroed": any(counted[parent] < YES for parent in _parents(question)),
            }
            for question, answer, own in zip(questions, answers, counted, strict=True)
        ]

    def _write(
        self,
        prompts: list[str],
        lists: list[Sequence[Question]],
        answers: list[list[float]],
        scores: list[float],
    ) -> None:
        path = Path(self.settings.log).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for prompt, questions, row, score in zip(prompts, lists, answers, scores, strict=True):
                line = {
                    "prompt": prompt,
                    "score": _number(score),
                    "answers": self._said(questions, row),
                }
                file.write(json.dumps(line) + "\n")


class _Code:
    """Answers in code about (n, 3, H, W) pictures, each with its questions; what is needed of all
    pictures is detected once."""

    def __init__(
        self,
        pictures: Tensor,
        lists: list[Sequence[Question]],
        metas: list[dict[str, Any]],
        detector: Callable[[Any], Any],
    ):
        self.pictures = pictures
        checks = {question.get("check", "vlm") for questions in lists for question in questions}
        self.shapes = verify.detect(pictures) if checks & SHAPES.keys() else []
        self.geneval: list[networks_detector.Detections] = []
        if "geneval" in checks:
            asked = [
                [q.get("args", {}) for q in questions if q.get("check") == "geneval"]
                for questions in lists
            ]
            needed = [
                {
                    "tag": meta.get("tag"),
                    "include": [clause for args in every for clause in args.get("include", [])],
                }
                for every, meta in zip(asked, metas, strict=True)
            ]
            self.geneval = detector(pictures.device).detect(pictures, needed)

    def __call__(self, picture: int, question: Question) -> float:
        name, args = question["check"], question.get("args", {})
        if name in SHAPES:
            return float(SHAPES[name](self.shapes[picture], **args))
        if name == "geneval":
            return float(geneval(self.geneval[picture], **args))
        answer = float(_own(name)(self.pictures[picture], **args))
        if answer < 0 or answer > 1:
            raise RewardBug(
                f'{name} answered {answer:g} to "{question["question"]}"; expected a number in'
                " [0, 1]"
            )
        return answer


def shapes_count(
    objects: list[verify.Found], *, count: int, shape: str | None = None, color: str | None = None
) -> bool:
    return sum(shape in (None, o.shape) and color in (None, o.color) for o in objects) == count


def shapes_position(objects: list[verify.Found], *, include: list[dict[str, Any]]) -> bool:
    named = [
        o
        for o in objects
        if any(o.shape == c["shape"] and c["color"] in (None, o.color) for c in include)
    ]
    return verify.partial(named, include) == 1.0


def geneval(
    found: networks_detector.Detections,
    *,
    include: Sequence[Mapping[str, Any]] = (),
    exclude: Sequence[Mapping[str, Any]] = (),
    reading: Literal["strict", "official"] = "strict",
) -> bool:
    return (
        networks_detector.strict(found, include)
        if reading == "strict"
        else networks_detector.official(found, include, exclude)
    )


SHAPES: dict[str, Callable[..., bool]] = {
    "shapes_count": shapes_count,
    "shapes_position": shapes_position,
}


def complaint(questions: Any, *, judged: bool) -> str | None:
    """What is wrong with a checklist, as the end of a sentence; None if it can be answered. judged:
    whether there is an answerer."""
    if not isinstance(questions, list) or not questions:
        return (
            f'has checklist={questions!r}, which should be a list of questions {{"question": "Is'
            ' there a dog?", "weight": 1.0}'
        )
    for number, question in enumerate(questions):
        if (
            not isinstance(question, Mapping)
            or not isinstance(question.get("question"), str)
            or not question["question"].strip()
        ):
            return (
                f'has {question!r} in its checklist, which should be like {{"question": "Is there a'
                ' dog?", "weight": 1.0}'
            )
        text, weight, check = (
            question["question"],
            question.get("weight", 1.0),
            question.get("check", "vlm"),
        )
        if (
            isinstance(weight, bool)
            or not isinstance(weight, int | float)
            or not (math.isfinite(weight) and weight >= 0)
        ):
            return (
                f'gives the question "{text}" the weight {weight!r}, which should be a number from'
                " 0 on"
            )
        if any(
            isinstance(parent, bool) or not isinstance(parent, int) or not 0 <= parent < number
            for parent in _parents(question)
        ):
            return (
                f'gives the question "{text}" the parent {question["parent"]!r}, which should be'
                " the place, from 0, of an earlier one"
            )
        if check == "vlm" and not judged:
            return (
                f'asks a judge "{text}", and none is set; set reward.checklist.answerer=vlm_yesno,'
                ' or give the question a "check"'
            )
        known = ["vlm", *SHAPES, "geneval"]
        if not isinstance(check, str) or (check not in known and ".py:" not in check):
            return (
                f"has the check {check!r} for the question"
                f' "{text}"{did_you_mean(str(check), known)}'
            )
        if wrong := _misfit(check, question.get("args", {})):
            return f'cannot check "{text}": {wrong}'
    if not sum(question.get("weight", 1.0) for question in questions):
        return "has a checklist whose weights are all 0"
    return None


def _misfit(check: str, args: Any) -> str | None:
    """Why a check cannot be called with args; None if it can."""
    if not isinstance(args, Mapping):
        return f'args={args!r} should be a mapping, as {{"count": 2}}'
    if check == "vlm":
        return None
    try:
        function = _own(check) if ".py:" in check else {**SHAPES, "geneval": geneval}[check]
    except ValueError as error:
        return str(error)
    try:
        inspect.signature(function).bind(None, **args)
    except TypeError as error:
        return f"{check} does not take args={dict(args)!r}: {error}"
    except ValueError:  # a function of another language, which does not tell
        return None
    return None


def _digest(shown: Tensor, lists: list[Sequence[Question]]) -> str:
    """Which pictures are asked which questions."""
    digest = hashlib.sha256(shown.cpu().contiguous().numpy().tobytes())
    digest.update(repr((shown.shape, lists)).encode())
    return digest.hexdigest()


def _parents(question: Question) -> list[Any]:
    parent = question.get("parent")
    return [] if parent is None else list(parent) if isinstance(parent, list | tuple) else [parent]


def _mean(questions: Sequence[Question], counted: list[float]) -> float:
    """Weighted mean; NaN if an answer failed, whatever its weight."""
    weights = [float(question.get("weight", 1.0)) for question in questions]
    return sum(w * a for w, a in zip(weights, counted, strict=True)) / sum(weights)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)


@cache
def _own(name: str) -> Callable[..., Any]:
    """The function behind "path/to/file.py:function"."""
    place, _, member = name.rpartition(":")
    path = Path(place).expanduser()
    found = user_file(path, what=f'check "{name}"').get(member)
    if not callable(found):
        raise ValueError(f'check "{name}": {path.name} has no function "{member}"')
    return found


def _load_answerer(value: Any, settings: dict[str, Any]) -> Any:
    if value is None:
        if settings:
            raise ValueError(
                f"reward.checklist.answerer_settings={settings} but no answerer; set"
                " reward.checklist.answerer=vlm_yesno"
            )
        return None
    answerer = load_inner(value, settings, reward="checklist", setting="answerer")
    if not callable(getattr(answerer, "answer", None)):
        raise ValueError(
            f"reward.checklist.answerer={value}: it answers no questions; choose vlm_yesno or"
            " vqascore"
        )
    return answerer


REWARD = Checklist
