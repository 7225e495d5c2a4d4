"""Expected grade of a vision-language model, over 5 (Edit-R1, arXiv:2510.16888).

It is the mean of the digits 0 to 5 under the probabilities of the model's first token, which is
dense and needs no parsing. Reference: PKU-YuanGroup/Edit-R1 4217f25, reward_server. Departures: the
reference reads all six logits inside vLLM; a server reports the 20 likeliest tokens only, so a
digit beyond them counts as 0, and without any digit among them the sample is NaN (in the reference
0). Pictures are sent as PNG (in the reference as JPEG of quality 75).
"""

from __future__ import annotations

from typing import Any

import pydantic
from torch import Tensor

from flowrl.rewards.core.source import Settings as SourceSettings
from flowrl.rewards.core.source import Sourced
from flowrl.rewards.judge.client import NoReply, text
from flowrl.rewards.judge.client import Settings as JudgeSettings
from flowrl.rewards.judge.completion import Reply
from flowrl.rewards.judge.replies import digit_mean
from flowrl.rewards.judge.reward import PLACE, JudgeReward, Scores, filled, user
from flowrl.types import MediaContext

ASK = (
    'How well does this image show "{prompt}"? Answer with one digit, from 0 (not at all) to 5'
    " (completely)."
)
ASK_EDIT = (
    'The first image was edited into the second, with the instruction "{prompt}". How well does the'
    " second follow it and keep the rest? Answer with one digit, from 0 (not at all) to 5"
    " (completely)."
)


class Settings(SourceSettings, JudgeSettings):
    model: str = pydantic.Field(
        "Qwen2.5-VL-32B-Instruct", description="The model's name on that server."
    )
    edit: bool = pydantic.Field(False, description="Show the picture before editing first.")
    question: str | None = pydantic.Field(
        None,
        description=(
            "Question with {prompt}, and with {requirement} for the value of that key in a"
            " prompt's meta; null: a plain question."
        ),
    )
    top: int = pydantic.Field(5, ge=1, le=9, description="The best grade; the worst is 0.")
    frames: int = pydantic.Field(8, ge=1, description="Frames of a video that are shown.")
    max_tokens: int = pydantic.Field(
        1, ge=1, description="Most tokens of a reply; only the first counts."
    )


class VlmLogit(Sourced, JudgeReward):
    """Expectation of the first token over the digits 0 to `top`, divided by `top`."""

    Settings = Settings
    name = "vlm_logit"
    scale = "expected grade from 0 to 5 over the first token, divided by 5"
    range = (0.0, 1.0)
    fields = {"logprobs": True, "top_logprobs": 20}

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        self.scale = f"expected grade from 0 to {s.top} over the first token, divided by {s.top}"
        self.question = s.question or (ASK_EDIT if s.edit else ASK)
        self.reads_prompt = bool(PLACE.search(self.question))
        if "{requirement}" in self.question:
            self.needs, self.reads = frozenset({"meta"}), frozenset({"requirement"})
        self.declare_source(s.edit, "edit=true")
        if s.question is None and s.top != 5:
            raise ValueError(
                f"reward.vlm_logit.top={s.top}: the plain question asks for 0 to 5; write your own"
                " into reward.vlm_logit.question"
            )

    def ask(
        self, media: Tensor, prompts: list[str], context: MediaContext | None
    ) -> list[Scores | NoReply]:
        s = self.settings
        before = self.sources(media, context) if s.edit else None
        questions = []
        for row, prompt in enumerate(prompts):
            shown = [] if before is None else self.pictures(before[row])
            shown += self.pictures(media[row], s.frames)
            questions.append([user(*shown, text(self._words(row, prompt, context)))])

        def read(reply: Reply) -> Scores:
            return {"score": digit_mean(reply.first, s.top) / s.top}

        return self.judge.ask_all(questions, read)

    def _words(self, row: int, prompt: str, context: MediaContext | None) -> str:
        """The question about a sample."""
        if "requirement" not in self.reads:
            return filled(self.question, prompt)
        meta = context.meta[row] if context is not None and context.meta is not None else {}
        if "requirement" not in meta:
            raise ValueError(
                f'reward.vlm_logit.question holds {{requirement}}, and the meta of "{prompt}" has'
                ' none; give every prompt a "requirement"'
            )
        return str(meta["requirement"]).join(
            filled(piece, prompt) for piece in self.question.split("{requirement}")
        )


REWARD = VlmLogit
