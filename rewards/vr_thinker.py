"""A video judge that may ask for more frames before it answers (VR-Thinker, arXiv:2510.10518).

It first sees a few frames of each video. A reply that calls select_frames with frame numbers gets
those frames; a reply with an answer ends the dialogue. The reference's formats are read:
<tool_call>{"name": "select_frames", "arguments": {"target_frames": [...]}}</tool_call> and
<answer>TA = 1, VQ = 0, MQ = 2, OA = 1</answer>, 1 and 2 for the better video, 0 for a tie;
\\boxed{1} too, as in its training code. Without a template, instructions of our own ask any
vision-language model for the same formats; with mode=pointwise for grades 1 to 5.

Reference: qunzhongwang/VideoSearch-Reasoner d2abc21
(grpo_train/openrlhf/trainer/ppo_utils/experience_maker.py) and the model card of
qunwang13/vr-thinker. Departures:
* The reference forgets what a request showed after a number of turns; here a request holds at most
  `images` pictures: the oldest are left out first, the opening frames never.
* A request that cannot be served (numbers out of range, too many, not readable) is answered with
  the reason, as in the reference; frame 0, for which the reference shows the last frame without a
  word, is out of range.
* No final answer within `turns` replies is NaN; in the reference the provisional answer counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor

from flowrl.rewards.judge.client import Ask, Message, NoReply, text
from flowrl.rewards.judge.client import Settings as JudgeSettings
from flowrl.rewards.judge.completion import Reply
from flowrl.rewards.judge.replies import (
    UnreadableReply,
    final_answer,
    frame_request,
    labelled_scores,
    shown,
)
from flowrl.rewards.judge.reward import (
    PairJudge,
    Scores,
    filled,
    needed,
    read_template,
    spaced,
    user,
)
from flowrl.types import MediaContext

WORKSPACE = 48  # frames of each video that can be asked for, evenly spaced
MOST = 8  # frames that one reply may ask for
LABELS = ("TA", "VQ", "MQ", "OA")  # text alignment, visual quality, motion quality, overall

PAIR = """Two videos were made for the same caption: {prompt}

You see {initial} frames of each, first those of Video 1, then those of Video 2. There are more: \
frames 1 to {first} belong to Video 1,
frames {second} to {total} to Video 2, in the order of time.

Judge which video is better in text alignment (TA), visual quality (VQ), motion quality (MQ) and \
overall (OA). If the frames you have seen
are not enough, ask for up to {most} others by their numbers, with nothing after it:
<tool_call>{"name": "select_frames", "arguments": {"target_frames": [3, 7]}}</tool_call>
You may reply {turns} times in all. When you are sure, answer with 1 for Video 1, 2 for Video 2 \
and 0 for a tie:
<answer>TA = 1, VQ = 0, MQ = 2, OA = 1</answer>"""

POINT = """A video was made for this caption: {prompt}

You see {initial} of its frames. There are more: frames 1 to {total}, in the order of time.

Grade its text alignment (TA), visual quality (VQ), motion quality (MQ) and overall quality (OA), \
each from 1 (bad) to 5 (excellent). If the
frames you have seen are not enough, ask for up to {most} others by their numbers, with nothing \
after it:
<tool_call>{"name": "select_frames", "arguments": {"target_frames": [3, 7]}}</tool_call>
You may reply {turns} times in all. When you are sure, answer:
<answer>TA = 4, VQ = 3, MQ = 3, OA = 3.5</answer>"""


class Settings(JudgeSettings):
    model: str = pydantic.Field("vr-thinker", description="The model's name on that server.")
    mode: Literal["pointwise", "pairwise"] = pydantic.Field(
        "pairwise",
        description="Whether the judge grades one video, or says which of two is better.",
    )
    template: str | None = pydantic.Field(
        None,
        description=(
            "Text file with the model's own instructions, {prompt} where the caption goes; null:"
            " instructions of ours."
        ),
    )
    initial: int = pydantic.Field(
        4, ge=1, description="Frames of each video that are shown at first."
    )
    images: int = pydantic.Field(
        24, ge=2, description="Most pictures in one request to the server."
    )
    turns: int = pydantic.Field(6, ge=1, description="Most replies in one dialogue.")
    max_tokens: int = pydantic.Field(2048, ge=1, description="Most tokens of a reply.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A reply that was not final, and the frames that the judge saw next."""

    reply: str  # the judge's text
    message: str  # answer to that text
    frames: list[int]  # places of the frames that were shown with that answer


class VrThinker(PairJudge):
    """pointwise: the overall grade from 1 to 5, divided by 5.

    pairwise: no score alone; `compare` says which of two is better.
    """

    Settings = Settings
    name = "vr_thinker"
    scale = "probability that the first video is better: 1, 0.5 or 0"
    video = "only"
    quality = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        self.pair = s.mode == "pairwise"
        if self.pair:
            self.grades, self.range, self.template = _preference, (0.0, 1.0), PAIR
            self.only_compares("mode=pairwise", "set mode=pointwise")
        else:
            self.grades, self.range, self.template = _grades, (0.2, 1.0), POINT
            self.scale = "overall grade from 1 to 5, divided by 5"
        self.most = self._most()
        if s.template:
            origin = "the instructions on the model card of qunwang13/vr-thinker"
            self.template = read_template(
                s.template, reward=self.name, setting="template", origin=origin
            )

    def _most(self) -> int:
        """Frames that one reply may ask for: no more than a request has room for."""
        s = self.settings
        opening = s.initial * (2 if self.pair else 1)
        if s.images <= opening:
            raise ValueError(
                f"reward.vr_thinker.images={s.images}: {opening} pictures are shown at first, so"
                f" none could be asked for; set images above {opening}, or initial lower"
            )
        return min(MOST, s.images - opening)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """The grades of a pointwise judge, 1 to 5."""
        return {} if self.pair else self.parts_of(media, prompts, context)

    def read(self, reply: Reply) -> Scores | None:
        return final_answer(reply.finished, self.grades)

    # --- dialogues

    def asked(
        self, videos: list[Tensor], prompts: list[str], context: MediaContext | None
    ) -> list[Scores | NoReply]:
        """Hold one dialogue about each sample, side by side. videos: one or two of (n, F, 3, H,
        W)."""
        s = self.settings
        # frames are numbered from 1: those of the first video, then those of the second
        places = [spaced(video.shape[1], WORKSPACE) for video in videos]
        opening: list[int] = []
        start = 1
        for place in places:
            opening += [start + i for i in spaced(len(place), s.initial)]
            start += len(place)
        jobs = []
        for row, prompt in enumerate(prompts):
            parts = [video[row, place] for video, place in zip(videos, places, strict=True)]
            words = self._instructions(prompt, first=len(places[0]), total=start - 1)
            jobs.append(partial(self._dialogue, torch.cat(parts), words, opening))
        return self.judge.run(jobs)

    def _instructions(self, prompt: str, *, first: int, total: int) -> str:
        """The template with its numbers filled in; first: number of frames of Video 1."""
        s = self.settings
        numbers = {
            "initial": min(s.initial, first),
            "first": first,
            "second": first + 1,
            "total": total,
            "most": self.most,
            "turns": s.turns,
        }
        words = self.template
        for name, number in numbers.items():
            words = words.replace(f"{{{name}}}", str(number))
        return filled(words, prompt)

    def _dialogue(self, frames: Tensor, words: str, opening: list[int], ask: Ask) -> Scores:
        """Ask reply by reply until there is an answer; none within `turns` -> UnreadableReply.

        frames: (N, 3, H, W), numbered from 1.
        """
        turns = self.settings.turns
        show = cache(lambda number: self.pictures(frames[number - 1])[0])
        rounds: list[Round] = []
        for turn in range(turns):
            reply = ask(self._messages(words, opening, rounds, show)).finished
            outcome = self._outcome(reply, len(frames))
            if isinstance(outcome, dict):
                return outcome
            if turn == turns - 2:
                message = f"{outcome.message} This is your last reply: give the answer now."
                outcome = replace(outcome, message=message)
            rounds.append(outcome)
        raise UnreadableReply(
            f"no answer in turns={turns} replies; the last is {shown(rounds[-1].reply)}"
        )

    def _outcome(self, reply: str, total: int) -> Scores | Round:
        """The scores of a final reply, or the answer to one that is not final."""
        try:
            scores = final_answer(reply, self.grades)
            if scores is not None:
                return scores
            asked = frame_request(reply) or []
            message = self._served(asked, total)
        except UnreadableReply as error:
            return Round(reply=reply, message=f"That could not be read: {error}.", frames=[])
        except _NotServed as error:
            return Round(reply=reply, message=str(error), frames=[])
        return Round(reply=reply, message=message, frames=asked)

    def _served(self, asked: list[int], total: int) -> str:
        """The answer to a request for some of `total` frames; one not served -> _NotServed."""
        if not asked:
            raise _NotServed(
                "Ask for frames by a tool call, or give the answer between <answer> and </answer>."
            )
        if outside := [number for number in asked if not 1 <= number <= total]:
            raise _NotServed(f"There are frames 1 to {total}; {outside[0]} is out of range.")
        if len(asked) > self.most:
            raise _NotServed(f"{len(asked)} frames are too many; ask for {self.most} at most.")
        return f"After selecting frames: Here are the selected frames {', '.join(map(str, asked))}."

    def _messages(
        self,
        words: str,
        opening: list[int],
        rounds: list[Round],
        show: Callable[[int], dict[str, Any]],
    ) -> list[Message]:
        """The dialogue so far, with the opening frames and the newest pictures that fit."""
        messages = [user(*map(show, opening), text(words))]
        room = self.settings.images - len(opening)
        for place, past in enumerate(rounds):
            newer = sum(len(later.frames) for later in rounds[place + 1 :])
            fits = max(0, room - newer)
            kept = past.frames[-fits:] if fits else []
            gone = [str(number) for number in past.frames if number not in kept]
            message = past.message + (
                f" (Frames {', '.join(gone)} are no longer shown.)" if gone else ""
            )
            messages += [
                {"role": "assistant", "content": past.reply},
                user(text(message), *map(show, kept)),
            ]
        return messages


class _NotServed(Exception):
    """Why a request for frames is not served, said to the judge."""


def _preference(answer: str) -> Scores:
    """ "TA = 1, ..., OA = 2" -> P(first is better) for each; "score" is the overall one."""
    # no limit, because "1/2" is a choice and no scale
    found = labelled_scores(answer, LABELS, 0, math.inf)
    needed(found, ["OA"], answer)
    if odd := [label for label, value in found.items() if value not in (0, 1, 2)]:
        raise UnreadableReply(f"{odd[0]} = {found[odd[0]]:g} is neither 0, 1 nor 2")
    meaning = {0: 0.5, 1: 1.0, 2: 0.0}
    shares = {label.lower(): meaning[int(value)] for label, value in found.items()}
    return {"score": shares["oa"], **shares}


def _grades(answer: str) -> Scores:
    """ "TA = 4, ..., OA = 3.5" -> each grade; "score" is the overall one over 5."""
    found = labelled_scores(answer, LABELS, 1, 5)
    score = needed(found, ["OA"], answer)[0] / 5
    return {"score": score, **{label.lower(): value for label, value in found.items()}}


REWARD = VrThinker
