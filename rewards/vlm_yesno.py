"""P(Yes) of a vision-language model about a picture.

It is the probability of "Yes" against "No" at the first token of the reply. Reference: Flow-Factory
a0b2bc5, rewards/vllm_evaluate.py (question="Is it a beautiful image?", instruction="" is its
default, which does not read the caption). Departures: a reply without either word among its likely
first tokens is NaN (in the reference 0); a video is shown as evenly spaced frames in one question
(in the reference by its first frame).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pydantic
import torch
from torch import Tensor

from flowrl.rewards.judge.client import Message, NoReply, text
from flowrl.rewards.judge.client import Settings as JudgeSettings
from flowrl.rewards.judge.completion import Reply
from flowrl.rewards.judge.replies import yes_share
from flowrl.rewards.judge.reward import PLACE, JudgeReward, Scores, filled, user
from flowrl.types import MediaContext


class Settings(JudgeSettings):
    model: str = pydantic.Field(
        "Qwen2.5-VL-7B-Instruct", description="The model's name on that server."
    )
    question: str = pydantic.Field(
        'Does this image show "{prompt}"?',
        description="Question that is asked, with {prompt} where the caption goes.",
    )
    instruction: str = pydantic.Field(
        "Answer Yes or No.", description="Text that is added to every question."
    )
    variants: bool = pydantic.Field(
        False,
        description=(
            "Count yes, YES and other spellings, too; false: exactly the tokens Yes and No."
        ),
    )
    frames: int = pydantic.Field(8, ge=1, description="Frames of a video that are shown.")
    max_tokens: int = pydantic.Field(
        1, ge=1, description="Most tokens of a reply; only the first counts."
    )


class VlmYesNo(JudgeReward):
    """P(Yes) / (P(Yes) + P(No)) for the question about each sample; `answer` asks other ones."""

    Settings = Settings
    name = "vlm_yesno"
    scale = "probability of Yes against No, 0 to 1"
    range = (0.0, 1.0)
    fields = {"logprobs": True, "top_logprobs": 20}

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        self.reads_prompt = bool(PLACE.search(self.settings.question))

    def ask(
        self, media: Tensor, prompts: list[str], context: MediaContext | None
    ) -> list[Scores | NoReply]:
        return self._asked(media, [filled(self.settings.question, prompt) for prompt in prompts])

    @torch.no_grad()
    def answer(self, media: Tensor, questions: Sequence[str]) -> Tensor:
        """Ask a question about each of (n, 3, H, W) or (n, F, 3, H, W), fp32 in [0, 1] -> (n,)
        fp32.

        The answer is P(yes) in [0, 1], NaN where asking failed.
        """
        return self.scores(self._asked(media, questions), media)

    def _asked(self, media: Tensor, questions: Sequence[str]) -> list[Scores | NoReply]:
        s = self.settings

        def read(reply: Reply) -> Scores:
            return {"score": yes_share(reply.first, variants=s.variants)}

        def messages(sample: Tensor, question: str) -> list[Message]:
            words = f"{question} {s.instruction}".strip()
            return [user(*self.pictures(sample, s.frames), text(words))]

        asked = [messages(*pair) for pair in zip(media, questions, strict=True)]
        return self.judge.ask_all(asked, read)


REWARD = VlmYesNo
