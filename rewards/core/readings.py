"""Two readings of a verdict, and the score that a setting makes of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import ClassVar, Literal

import pydantic
import torch
from torch import Tensor

from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import Settings as Base
from flowrl.types import MediaContext

logger = logging.getLogger("flowrl")
NEAR = 0.25  # most difference of a channel from a background, for a picture that lies on it


class Settings(Base):
    reading: Literal["partial", "strict", "both"] = pydantic.Field(
        "both",
        description=(
            "How a verdict becomes a score: credit for each part that is right (partial), 1 if all"
            " is right and nothing else is there (strict), or the mean of the two (both)."
        ),
    )


class Readings(Reward):
    """A verifier whose parts are "partial" and "strict", in [0, 1] each, and maybe others.

    It warns once where pictures are not from its small world, and cannot be right.
    """

    Settings = Settings
    range = (0.0, 1.0)
    networks = False
    backgrounds: ClassVar[Iterable[tuple[float, float, float]]] = ((1.0, 1.0, 1.0),)  # its world's
    warned = False

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        others = 0 if self.warned else int((~on_background(media, self.backgrounds)).sum())
        if others:
            self.warned = True
            logger.warning(
                f'reward "{self.name}": {others} of {len(media)} samples are not from its small'
                " world, since most of their pixels show none of its backgrounds; it can judge no"
                " others"
            )
        parts = self.parts(media, prompts, context)
        if self.settings.reading == "both":
            return (parts["partial"] + parts["strict"]) / 2
        return parts[self.settings.reading]


def on_background(media: Tensor, backgrounds: Iterable[tuple[float, float, float]]) -> Tensor:
    """Whether the median colour of each of (B, ..., 3, H, W) media is nearly one of a world's
    backgrounds -> (B,) bool; of a video that of its pixels in all frames."""
    pixels = media.float().flatten(-2).movedim(-2, 1).flatten(2)  # (B, 3, pixels)
    # contiguous, since torch 2.15 says NaN of expanded media
    middle = pixels.contiguous().median(2).values
    away = middle[:, None] - torch.tensor([*backgrounds], device=media.device)
    return (away.abs().amax(2) <= NEAR).any(1)
