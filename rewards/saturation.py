"""Colour saturation of a picture: a watch for neon colours and burnt-out pixels.

Log it with weight 0 beside the reward that is trained on: aesthetic rewards are known to pull a
policy towards both. A pixel that is nearly black has an HSV saturation (Smith 1978) too, which is
mostly noise; read it together with the share of clipped pixels.
"""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from torch import Tensor

from flowrl.data.media import to_uint8
from flowrl.rewards.core.pictures import frames_of, mean_of_frames, refuse_gradient
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import Settings as Base
from flowrl.types import MediaContext


class Settings(Base):
    reading: Literal["saturation", "clipped"] = pydantic.Field(
        "saturation", description="Which of the two readings is the score."
    )


class Saturation(Reward):
    """Mean HSV saturation in [0, 1]; higher is more colourful; for a video, the mean over frames.

    Grey: 0. Photos: 0.3 to 0.7. Pure red: 1. "clipped" is the share of pixels with a channel at 0
    or 255: most photos are below 0.1; black and white are 1.
    """

    Settings = Settings
    name = "saturation"
    networks = False
    scale = "mean HSV saturation: 0 grey, 0.3 to 0.7 photos, 1 pure colours"
    range = (0.0, 1.0)

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        self.differentiable = self.settings.reading == "saturation"
        if self.settings.reading == "clipped":
            self.scale = "share of pixels with a channel at 0 or 255, 0 to 1"

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        refuse_gradient(self, media, "reading=saturation")
        return mean_of_frames(READINGS[self.settings.reading](frames_of(media)), media)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        frames = frames_of(media)
        return {name: mean_of_frames(read(frames), media) for name, read in READINGS.items()}


def saturation(frames: Tensor) -> Tensor:
    """(n, 3, H, W) in [0, 1] -> (n,): mean of (max - min) / max over pixels; 0 for black."""
    high, low = frames.amax(1), frames.amin(1)
    darkest = 1 / 255  # darkest colour above black that a saved picture can have
    return ((high - low) / high.clamp(min=darkest)).mean((1, 2))


def clipped(frames: Tensor) -> Tensor:
    """(n, 3, H, W) in [0, 1] -> (n,): share of pixels with a channel at 0 or 255; no gradient."""
    levels = to_uint8(frames)
    return ((levels == 0) | (levels == 255)).any(1).float().mean((1, 2))


READINGS = {"saturation": saturation, "clipped": clipped}
REWARD = Saturation
