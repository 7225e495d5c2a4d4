"""Does a picture of the stickers world show what its prompt says?

The prompt is a sentence of the world's grammar; see flowrl.scenes.stickers.verify.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowrl.rewards.core.readings import Settings as Base
from flowrl.rewards.core.verified import Verified
from flowrl.scenes.grammar import Picture
from flowrl.scenes.stickers import verify
from flowrl.scenes.stickers.prompts import WORLD
from flowrl.scenes.stickers.scenes import BACKGROUNDS
from flowrl.types import MediaContext


class Settings(Base):
    """How a verdict becomes a score."""


class Stickers(Verified):
    """Agreement of a picture with its prompt, in [0, 1]; 1 when it shows exactly that."""

    name = "stickers"
    Settings = Settings
    language, kind = WORLD, Picture
    scale = (
        "0 to 1: share of objects, relation and background that are right (partial), 1 only when"
        " all are and nothing else is in the picture (strict)"
    )
    video = "no"
    backgrounds = BACKGROUNDS.values()

    def verdicts(
        self, media: Tensor, asked: list[Any], context: MediaContext | None
    ) -> list[dict[str, float]]:
        """Parts: partial and strict."""
        return [
            {"partial": verify.partial(own, p), "strict": float(verify.strict(own, p))}
            for own, p in zip(verify.detect(media), asked, strict=True)
        ]


REWARD = Stickers
