"""RationalRewards (TIGER-AI-Lab, arXiv:2604.11626): a critique first, then a score from 1 to 4 for
each aspect; and a better prompt.

References: Flow-Factory a0b2bc5 (rewards/rational_rewards_t2i.py, rational_rewards_edit.py),
RationalRewards 44e27ab. Departures:
* A critique without any score is NaN; there it is 0. So is one that was cut before its summary, or
  names an aspect without a score or N/A for it; there the other aspects count.
* One critique serves score, `parts` and `refine`, while it is kept (`cache`).
* The refined request may have several lines; there only what stands beside its heading counts.
* A prompt that contains "<image>" stays text; there it is cut apart.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor

from flowrl.rewards.core import source
from flowrl.rewards.judge import client
from flowrl.rewards.judge import replies as judge_replies
from flowrl.rewards.judge.client import Failed, Message
from flowrl.rewards.judge.completion import Reply
from flowrl.rewards.judge.replies import Unreadable
from flowrl.rewards.judge.reward import JudgeReward, Scores, interleaved, read_template, user
from flowrl.types import MediaContext

# The whole text with {prompt} (or {request}) and <image> in place. Two spellings of t2i: the
# authors' evaluation has one line less.
TEXTS = {
    "t2i": ("5f652289b3e82ae1", "733d99af3f475d0c"),
    "edit": ("62c8c0b86030e891", "4e37c1d385fd4691"),
}
SYSTEMS = {"t2i": ("2fa66ca8679e6eed",), "edit": ("5463ca34f3c70f45",)}
ASPECTS = {
    task: [name for name in judge_replies.ASPECTS if task == "edit" or name != "image_faithfulness"]
    for task in TEXTS
}


class Settings(source.Settings, client.Settings):
    task: Literal["t2i", "edit"] = pydantic.Field(
        "t2i", description="Text to image, or an edit judged beside the picture before it."
    )
    model: str | None = pydantic.Field(  # type: ignore[assignment]
        None,
        description=(
            "The model's name on that server; null: RationalRewards-8B-T2I or"
            " RationalRewards-8B-Edit."
        ),
    )
    template: str | None = pydantic.Field(
        None,
        description="Text file with the model's question: {prompt}, and <image> for each picture.",
    )
    system: str | None = pydantic.Field(
        None, description="Text file with the model's system prompt."
    )
    own_template: bool = pydantic.Field(
        False, description="Both texts are your own: they are not compared with the model's."
    )
    aspects: (
        list[
            Literal["text_faithfulness", "image_faithfulness", "physical_quality", "text_rendering"]
        ]
        | None
    ) = pydantic.Field(
        None, min_length=1, description="Aspects that are averaged; null: all of the task."
    )
    temperature: float = pydantic.Field(
        0.1, ge=0, description="Sampling temperature of the replies."
    )
    max_tokens: int = pydantic.Field(
        2048, ge=1, description="Longest reply, in tokens; the authors refine prompts with 20480."
    )


class RationalRewards(source.Sourced, JudgeReward):
    """(m - 1) / 3, m the mean of the aspects' scores, each clamped to [1, 4]; an aspect that is N/A
    does not count."""

    Settings = Settings
    name = "rationalrewards"
    scale = "0 to 1: the mean of aspect scores from 1 to 4, less 1, over 3"
    range = (0.0, 1.0)
    quality = True
    video = "no"

    def __init__(self, settings: Any = None):
        given = self.Settings() if settings is None else settings
        task = given.task
        super().__init__(
            given.model_copy(
                update={
                    "model": (
                        given.model or f"RationalRewards-8B-{'T2I' if task == 't2i' else 'Edit'}"
                    )
                }
            )
        )
        s = self.settings
        self.aspects = list(s.aspects or ASPECTS[task])
        if unknown := [name for name in self.aspects if name not in ASPECTS[task]]:
            raise ValueError(
                f"reward.rationalrewards.aspects: {unknown[0]} is no aspect of task={task}; choose"
                f" from {', '.join(ASPECTS[task])}"
            )
        self.declare_source(task == "edit", "task=edit")
        origin = f"the user message of Flow-Factory's rewards/rational_rewards_{task}.py"
        self.template = read_template(
            s.template,
            reward=self.name,
            setting="template",
            origin=origin,
            sha256=() if s.own_template else TEXTS[task],
            images=2 if task == "edit" else 1,
        )
        origin = f"the system prompt of Flow-Factory's rewards/rational_rewards_{task}.py"
        self.system = read_template(
            s.system,
            reward=self.name,
            setting="system",
            origin=origin,
            sha256=() if s.own_template else SYSTEMS[task],
            places=False,
        )

    def ask(
        self, media: Tensor, prompts: list[str], context: MediaContext | None
    ) -> list[Scores | Failed]:
        return self.judge.ask_all(self._questions(media, prompts, context), self._read)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """The score of each aspect, 1 to 4; NaN where it is N/A."""
        return self.parts_of(media, prompts, context)

    @torch.no_grad()
    def refine(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> list[str | None]:
        """The judge's rewritten prompt for each sample, to generate once more with; None where it
        offers none."""

        def read(reply: Reply) -> str | None:
            if reply.cut:  # the request is the last of a critique
                raise Unreadable("the refined request is not whole")
            return judge_replies.refined_request(reply.text)

        replies = self.judge.ask_all(self._questions(media, prompts, context), read)
        return [None if isinstance(reply, Failed) else reply for reply in replies]

    def read_reply(self, text: str) -> float:
        """The score that a reply of this text gives; NaN where it gives none."""
        try:
            return self._read(Reply(text=text, tokens=None))["score"]
        except Unreadable:
            return math.nan

    def _questions(
        self, media: Tensor, prompts: list[str], context: MediaContext | None
    ) -> list[list[Message]]:
        shown = [self.sources(media, context), media] if self.settings.task == "edit" else [media]
        system = {"role": "system", "content": self.system}
        return [
            [
                system,
                user(
                    *interleaved(
                        self.template,
                        prompt,
                        [part for images in shown for part in self.pictures(images[row])],
                    )
                ),
            ]
            for row, prompt in enumerate(prompts)
        ]

    def _read(self, reply: Reply) -> Scores:
        found = {
            name: score
            for name, score in judge_replies.aspects(reply.text, cut=reply.cut).items()
            if name in self.aspects
        }
        if not found:
            raise Unreadable(
                f"none of the aspects {', '.join(self.aspects)} has a score in the reply"
                f" {judge_replies.shown(reply.text)}"
            )
        return {"score": (sum(found.values()) / len(found) - 1) / 3, **found}


REWARD = RationalRewards
