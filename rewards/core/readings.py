"""Two readings of a verdict, and the score that a setting makes of them."""

from __future__ import annotations

from typing import Literal

import pydantic
from torch import Tensor

from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import Settings as Base
from flowrl.types import MediaContext


class Settings(Base):
    reading: Literal["partial", "strict", "both"] = pydantic.Field(
        "both",
        description=(
            "How a verdict becomes a score: credit for each part that is right (partial), 1 if all"
            " is right and nothing else is there (strict), or the mean of the two (both)."
        ),
    )


class Readings(Reward):
    """A verifier whose parts are "partial" and "strict", in [0, 1] each, and maybe others."""

    Settings = Settings
    range = (0.0, 1.0)
    networks = False

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        parts = self.parts(media, prompts, context)
        if self.settings.reading == "both":
            return (parts["partial"] + parts["strict"]) / 2
        return parts[self.settings.reading]
