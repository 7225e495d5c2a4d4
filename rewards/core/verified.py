"""Rewards that read a stickers world's media and judge them by the sentence that asked for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic
import torch
from torch import Tensor

from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import Settings as Base
from flowrl.scenes.grammar import Sentence, read
from flowrl.scenes.stickers.prompts import WORLD
from flowrl.types import MediaContext


class Settings(Base):
    reading: Literal["partial", "strict", "both"] = pydantic.Field(
        "both",
        description=(
            "How a verdict becomes a score: credit for what is right (partial), 1 if all is right"
            " and nothing else is there (strict), or the mean of the two (both)."
        ),
    )


class Verified(Reward):
    """Agreement of media with their sentence, in [0, 1]; a subclass says how it is judged."""

    Settings = Settings
    kind: ClassVar[type[Sentence]]  # sentences that it judges
    networks = False
    range = (0.0, 1.0)
    reads_prompt = True

    def verdicts(
        self, media: Tensor, asked: list[Any], context: MediaContext | None
    ) -> list[dict[str, float]]:
        """Judge media by sentences (B) -> "partial", "strict" and named parts of each."""
        raise NotImplementedError(f"{type(self).__name__} does not define verdicts")

    def complaint(self, meta: Mapping[str, Any]) -> str | None:
        try:
            read(meta["prompt"], WORLD, self.kind)
        except ValueError as error:
            return f"cannot be judged: {error}"
        return super().complaint(meta)

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        parts = self.parts(media, prompts, context)
        if self.settings.reading == "both":
            return (parts["partial"] + parts["strict"]) / 2
        return parts[self.settings.reading]

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """Both readings and the named parts, (B,) each."""
        asked = [read(prompt, WORLD, self.kind) for prompt in prompts]
        found = self.verdicts(media, asked, context)
        return {
            name: torch.tensor([row[name] for row in found], device=media.device)
            for name in found[0]
        }
