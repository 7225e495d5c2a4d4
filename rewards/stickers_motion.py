"""Does a video of the stickers world show the motion that its prompt asks for?"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowrl.rewards.core.readings import Settings as Base
from flowrl.rewards.core.verified import Verified
from flowrl.scenes.grammar import Motion
from flowrl.scenes.stickers import motions, verify
from flowrl.types import MediaContext


class Settings(Base):
    """How a verdict becomes a score."""


class StickersMotion(Verified):
    """Agreement of a video with its motion, in [0, 1]; see flowrl.scenes.stickers.motions."""

    name = "stickers_motion"
    Settings = Settings
    kind = Motion
    scale = (
        "0 to 1: product of number, persistence and direction of the objects (partial), 1 only when"
        " all are right (strict)"
    )
    video = "only"

    def verdicts(
        self, media: Tensor, asked: list[Any], context: MediaContext | None
    ) -> list[dict[str, float]]:
        """Parts: number, persistence and direction."""
        found, frames = verify.detect(media.flatten(0, 1)), media.shape[1]
        videos = (found[i : i + frames] for i in range(0, len(found), frames))
        return [motions.verdict(*row) for row in zip(videos, asked, strict=True)]


REWARD = StickersMotion
