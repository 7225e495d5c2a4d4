"""A prompt as a weighted list of yes/no questions, answered by a judge of pictures or by code.

meta["checklist"] is a list of {"question": str, "weight": float, "parent": None | index |
[indices], "check": "vlm" | name, "args": {...}}. The score is the weighted mean of the answers,
where a question counts 0 when a parent, an earlier question, is below 0.5 (DPG-Bench, ELLA
arXiv:2403.05135, dpg_bench/compute_dpg_bench.py; "parent" is its dependency, counted from 0 here).
An answer that failed makes its sample NaN.

Judges are rewards that offer answer(media (n, 3, H, W), questions) -> (n,) in [0, 1], NaN where
answering failed: vlm_yesno, vqascore. Code functions:
* shapes_count {"count": n, "shape": ..., "color": ...}: exactly n objects of that shape and colour,
  either may be left open, in the shapes world;
* shapes_position {"include": [clause, clause with a position]}: the relation holds between all
  objects of the two clauses;
* geneval {"include": [...], "exclude": [...], "reading": "strict" | "official"}: that verdict on
  GenEval's detections;
* path/to/file.py:function: your own, function(image (3, H, W), **args) -> a number in [0, 1].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor

from flowrl.data import checklists
from flowrl.rewards.core.failures import RewardBug
from flowrl.rewards.core.pictures import frames_of
from flowrl.rewards.core.questions import InCode, Question, check_of, complaint, parents
from flowrl.rewards.core.reward import SHOWN, Reward, entered, forgetful, load, network_bytes
from flowrl.rewards.core.settings import Settings as Base
from flowrl.rewards.core.wrap import inner_bytes, load_inner
from flowrl.rewards.networks import detector
from flowrl.runtime.paths import located
from flowrl.runtime.store import lines
from flowrl.shapes import verify
from flowrl.types import MediaContext

AT_ONCE = 64  # most pairs of picture and question in one call of the answerer
YES = 0.5  # least answer that is a yes


class Settings(Base):
    questions: Literal["given", "shapes", "geneval"] = pydantic.Field(
        "given",
        description=(
            "Source of the questions. given: each prompt's checklist; shapes, geneval: questions"
            " written from the prompt's include clauses."
        ),
    )
    answerer: Any = pydantic.Field(
        None,
        description=(
            "Reward that answers questions of check vlm: vlm_yesno or vqascore; null: no question"
            " needs one."
        ),
    )
    answerer_settings: dict[str, Any] = pydantic.Field({}, description="Settings of the answerer.")
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
            "Number of frames of a video, evenly spaced, about which each question is asked;"
            " answers are averaged."
        ),
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
        self.verifies = frozenset(() if self.answerer else SHOWN)
        self.geneval: Any = None  # reward whose detector answers in code
        if s.questions == "geneval" and self.answerer is None:
            self.geneval = load("geneval", **s.geneval_settings)
        # Answers about the samples scored last, before parents zeroed any, and a hash of the
        # samples.
        self.last_answers: list[list[float]] = []
        self._asked = ""
        self.remembers = True

    @classmethod
    def network_bytes(cls, settings: Any) -> float | None:
        if settings.questions == "given":
            return None  # a prompt's questions may ask for GenEval's detector
        if settings.answerer is not None:
            return inner_bytes(settings.answerer, settings.answerer_settings)
        geneval = settings.questions == "geneval"
        return network_bytes("geneval", **settings.geneval_settings) if geneval else 0.0

    def uncached(self) -> AbstractContextManager[None]:
        return entered([forgetful(self), super().uncached()])

    def expect(self, prompts: Sequence[str]) -> None:
        """Do nothing: the answerer gets the checklists' questions, and not these texts."""

    def inner_rewards(self) -> list[Reward]:
        return [reward for reward in (self.answerer, self.geneval) if isinstance(reward, Reward)]

    def complaint(self, meta: Mapping[str, Any]) -> str | None:
        if self.settings.questions == "given":
            return complaint(meta.get("checklist"), judged=self.answerer is not None)
        if self.settings.questions == "shapes":
            return verify.complaint(meta.get("include"))
        return detector.complaint(meta)

    def questions(self, meta: Mapping[str, Any]) -> Sequence[Question]:
        """The checklist of a prompt."""
        by: checklists.By = "code" if self.answerer is None else "vlm"
        if self.settings.questions == "shapes":
            return checklists.from_shapes(dict(meta), by)
        if self.settings.questions == "geneval":
            return checklists.from_geneval(dict(meta), by)
        return meta["checklist"]

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        lists, answers = self._ask(media, prompts, context)
        scores = [
            _mean(questions, self._counted(questions, row))
            for questions, row in zip(lists, answers, strict=True)
        ]
        if self.settings.log:
            self._write(zip(prompts, lists, answers, scores, strict=True))
        return torch.tensor(scores, dtype=torch.float32, device=media.device)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """all: 1 if every question is answered yes; yes: their share, without weights or parents.

        NaN where an answer failed.
        """
        _, answers = self._ask(media, prompts, context)
        every, share = [], []
        for row in answers:
            failed = any(map(math.isnan, row))
            yes = [answer >= YES for answer in row]
            every.append(math.nan if failed else float(all(yes)))
            share.append(math.nan if failed else sum(yes) / len(yes))
        device = media.device
        return {
            "all": torch.tensor(every, device=device),
            "yes": torch.tensor(share, device=device),
        }

    def told(self, media: Tensor, context: MediaContext) -> list[list[dict[str, Any]]] | None:
        """Answers about these samples; None unless they are the samples that were scored last.

        Each question of each sample has {"question", "answer" (None: it failed), "counted" (after
        parents and `binary`), "zeroed" (a parent is no)}.
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
        """Each sample's questions and answers.

        The latest questions are not asked again: a judge costs time, and may not repeat itself.
        """
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
        """The frames (B, frames, 3, H, W) that are shown: the middles of `frames` equal
        stretches."""
        videos = media.detach() if media.ndim == 5 else media.detach()[:, None]
        count = min(self.settings.frames, videos.shape[1])
        return videos[:, [(2 * i + 1) * videos.shape[1] // (2 * count) for i in range(count)]]

    def _answers(
        self, shown: Tensor, lists: list[Sequence[Question]], metas: list[dict[str, Any]]
    ) -> list[list[float]]:
        """Each sample's answers, the mean over its frames; shown: (B, frames, 3, H, W)."""
        pictures, frames = frames_of(shown), shown.shape[1]
        owner = [i for i in range(len(shown)) for _ in range(frames)]  # sample of each picture
        by_picture = [lists[i] for i in owner]
        by_code = InCode(pictures, by_picture, [metas[i] for i in owner], self._on_device)
        said = self._judged(pictures, by_picture)
        out = []
        for i, questions in enumerate(lists):
            places = range(i * frames, (i + 1) * frames)
            answers = [
                [said[p, q] if (p, q) in said else by_code(p, question) for p in places]
                for q, question in enumerate(questions)
            ]
            out.append([sum(values) / frames for values in answers])
        return out

    def _judged(
        self, pictures: Tensor, lists: list[Sequence[Question]]
    ) -> dict[tuple[int, int], float]:
        """Answers of the answerer to the questions for it: (picture, question) -> answer."""
        asked = [
            (p, q)
            for p, questions in enumerate(lists)
            for q, question in enumerate(questions)
            if check_of(question) == "vlm"
        ]
        out: list[float] = []
        for start in range(0, len(asked), AT_ONCE):
            part = asked[start : start + AT_ONCE]
            texts = [lists[p][q]["question"] for p, q in part]
            out += self._judge(pictures[[p for p, _ in part]], texts)
        return dict(zip(asked, out, strict=True))

    def _judge(self, pictures: Tensor, texts: list[str]) -> list[float]:
        """Ask one question about each of n pictures (n, 3, H, W) -> n answers."""
        answers = self.answerer.answer(pictures, texts)
        if (
            not isinstance(answers, Tensor)
            or answers.shape != (len(texts),)
            or bool(((answers < 0) | (answers > 1)).any())
        ):
            wanted = f"a tensor ({len(texts)},) in [0, 1], NaN where it failed"
            raise RewardBug(f'"{self.settings.answerer}" answered {answers!r}; expected {wanted}')
        self.problem = self.problem or getattr(self.answerer, "problem", None)
        return answers.float().tolist()

    def _on_device(self, device: torch.device) -> Any:
        """The geneval reward, loaded when the first question needs it."""
        if self.geneval is None:
            self.geneval = load("geneval", **self.settings.geneval_settings)
        return self.geneval.to(device)

    def _counted(self, questions: Sequence[Question], answers: list[float]) -> list[float]:
        """The answers, with 0 for each whose parent is no; it is then a no to its children."""
        out: list[float] = []
        for question, answer in zip(questions, answers, strict=True):
            if math.isnan(answer):
                out.append(answer)
            elif any(out[parent] < YES for parent in parents(question)):
                out.append(0.0)
            else:
                out.append(float(answer >= YES) if self.settings.binary else answer)
        return out

    def _said(self, questions: Sequence[Question], answers: list[float]) -> list[dict[str, Any]]:
        """A sample's answers, in the form that `told` and the log have."""
        counted = self._counted(questions, answers)
        return [
            {
                "question": question["question"],
                "answer": _number(answer),
                "counted": _number(own),
                "zeroed": any(counted[parent] < YES for parent in parents(question)),
            }
            for question, answer, own in zip(questions, answers, counted, strict=True)
        ]

    def _write(self, samples: Iterable[tuple[str, Sequence[Question], list[float], float]]) -> None:
        """Write a line for each sample: prompt, questions, answers, score."""
        rows = []
        for prompt, questions, answers, score in samples:
            said = self._said(questions, answers)
            rows.append({"prompt": prompt, "score": _number(score), "answers": said})
        lines.append(located(self.settings.log), rows)


def _digest(shown: Tensor, lists: list[Sequence[Question]]) -> str:
    """A hash of the pictures and the questions that are asked about them."""
    digest = hashlib.sha256(shown.cpu().contiguous().numpy().tobytes())
    digest.update(repr((shown.shape, lists)).encode())
    return digest.hexdigest()


def _mean(questions: Sequence[Question], counted: list[float]) -> float:
    """Weighted mean; NaN if an answer failed, whatever its weight."""
    weights = [float(question.get("weight", 1.0)) for question in questions]
    return sum(w * a for w, a in zip(weights, counted, strict=True)) / sum(weights)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)


def _load_answerer(value: Any, settings: dict[str, Any]) -> Any:
    """The judge that `answerer` names; None: questions are answered in code alone."""
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
            f"reward.checklist.answerer={value}: it does not answer questions; choose vlm_yesno or"
            " vqascore"
        )
    return answerer


REWARD = Checklist
