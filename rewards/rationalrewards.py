"""RationalRewards (TIGER-AI-Lab, arXiv:2604.11626).

A judge that writes a critique, then a score from 1 to 4 for each aspect, and a better prompt.

References: Flow-Factory a0b2bc5 (rewards/rational_rewards_t2i.py, rational_rewards_edit.py),
RationalRewards 44e27ab. Departures:
* A critique without any score is NaN, as is one that was cut before its summary or names an aspect
  without giving it a score or N/A. In the references the first is 0, and of the others the
  remaining aspects count.
* One critique serves score, `parts` and `refine`, while it is kept.
* The refined request may have several lines; in the references only the text beside its heading
  counts.
* A prompt that contains "<image>" stays text; in the references it is cut apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor

from flowrl.rewards.core.source import Settings as SourceSettings
from flowrl.rewards.core.source import Sourced
from flowrl.rewards.judge import replies
from flowrl.rewards.judge.client import Message, NoReply
from flowrl.rewards.judge.client import Settings as JudgeSettings
from flowrl.rewards.judge.completion import Reply
from flowrl.rewards.judge.replies import UnreadableReply
from flowrl.rewards.judge.reward import Scores, WritingJudge, interleaved, read_template, user
from flowrl.types import MediaContext

# First digits of the sha256 of the whole text with {prompt} (or {request}) and <image> in place.
# Each text has two spellings: in t2i the authors' evaluation has one line less.
TEXTS = {
    "t2i": ("5f652289b3e82ae1", "733d99af3f475d0c"),
    "edit": ("62c8c0b86030e891", "4e37c1d385fd4691"),
}
SYSTEMS = {"t2i": ("2fa66ca8679e6eed",), "edit": ("5463ca34f3c70f45",)}
ASPECTS = {
    task: [name for name in replies.ASPECTS if task == "edit" or name != "image_faithfulness"]
    for task in TEXTS
}


class Settings(SourceSettings, JudgeSettings):
    task: Literal["t2i", "edit"] = pydantic.Field(
        "t2i",
        description="Task that is judged: text to image, or an edit beside the picture before it.",
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
        False,
        description="Whether both texts are your own; they are then not compared with the model's.",
    )
    temperature: float = pydantic.Field(
        0.1, ge=0, description="Sampling temperature of the replies."
    )
    max_tokens: int = pydantic.Field(
        2048, ge=1, description="Most tokens of a reply; the authors refine prompts with 20480."
    )


class RationalRewards(Sourced, WritingJudge):
    """(m - 1) / 3, where m is the mean of the aspects' scores, each clamped to [1, 4].

    An aspect that is N/A does not count.
    """

    Settings = Settings
    name = "rationalrewards"
    scale = "0 to 1: the mean of aspect scores from 1 to 4, less 1, over 3"
    range = (0.0, 1.0)
    quality = True
    video = "no"

    def __init__(self, settings: Any = None):
        given = self.Settings() if settings is None else settings
        task = given.task
        model = given.model or f"RationalRewards-8B-{'T2I' if task == 't2i' else 'Edit'}"
        super().__init__(given.model_copy(update={"model": model}))
        self.aspects = ASPECTS[task]
        self.declare_source(task == "edit", "task=edit")
        images = 2 if task == "edit" else 1
        self.template = self._text("template", "the user message", TEXTS[task], images=images)
        self.system = self._text("system", "the system prompt", SYSTEMS[task], places=False)

    def _text(
        self,
        setting: str,
        what: str,
        sha256: Sequence[str],
        *,
        places: bool = True,
        images: int | None = None,
    ) -> str:
        """The text of the file that a setting names; places, images: as for read_template."""
        s = self.settings
        return read_template(
            getattr(s, setting),
            reward=self.name,
            setting=setting,
            origin=f"{what} of Flow-Factory's rewards/rational_rewards_{s.task}.py",
            sha256=() if s.own_template else sha256,
            places=places,
            images=images,
        )

    def ask(
        self, media: Tensor, prompts: list[str], context: MediaContext | None
    ) -> list[Scores | NoReply]:
        return self.judge.ask_all(self._questions(media, prompts, context), self.read)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """The score of each aspect, 1 to 4; NaN where it is N/A."""
        return self.parts_of(media, prompts, context)

    @torch.no_grad()
    def refine(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> list[str | None]:
        """The judge's rewritten prompt for each sample, for a new generation; None: it gave
        none."""
        found = self.judge.ask_all(self._questions(media, prompts, context), _refined)
        return [None if isinstance(request, NoReply) else request for request in found]

    def _questions(
        self, media: Tensor, prompts: list[str], context: MediaContext | None
    ) -> list[list[Message]]:
        """The messages for each sample: system prompt, and template with its pictures."""
        shown = [self.sources(media, context), media] if self.settings.task == "edit" else [media]
        system = {"role": "system", "content": self.system}
        questions = []
        for row, prompt in enumerate(prompts):
            pictures = [part for images in shown for part in self.pictures(images[row])]
            questions.append([system, user(*interleaved(self.template, prompt, pictures))])
        return questions

    def read(self, reply: Reply) -> Scores:
        """The scores of the aspects that count, and "score"."""
        stated = replies.aspects(reply.text, cut=reply.cut)
        found = {name: score for name, score in stated.items() if name in self.aspects}
        if not found:
            raise UnreadableReply(
                f"none of the aspects {', '.join(self.aspects)} has a score in the reply"
                f" {replies.shown(reply.text)}"
            )
        return {"score": (sum(found.values()) / len(found) - 1) / 3, **found}


def _refined(reply: Reply) -> str | None:
    if reply.cut:  # the request is the last part of a critique, so it was cut
        raise UnreadableReply("the refined request is not whole")
    return replies.refined_request(reply.text)


REWARD = RationalRewards
