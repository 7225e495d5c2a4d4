"""Does a video of the stickers world show the motion that its prompt asks for?"""

from __future__ import annotations

from flowrl.rewards.core.readings import Settings as Base
from flowrl.rewards.core.verified import VerifiedMotion
from flowrl.scenes.stickers.scenes import BACKGROUNDS
from flowrl.scenes.stickers.world import MOTIONS


class Settings(Base):
    """How a verdict becomes a score."""


class StickersMotion(VerifiedMotion):
    name = "stickers_motion"
    Settings = Settings
    motions, language = MOTIONS, MOTIONS.world.language
    backgrounds = BACKGROUNDS.values()


REWARD = StickersMotion
