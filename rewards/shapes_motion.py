"""Does a video of the shapes world show the motion that its prompt asks for?"""

from __future__ import annotations

from flowrl.rewards.core.readings import Settings as Base
from flowrl.rewards.core.verified import VerifiedMotion
from flowrl.scenes.shapes import MOTIONS


class Settings(Base):
    """How a verdict becomes a score."""


class ShapesMotion(VerifiedMotion):
    name = "shapes_motion"
    Settings = Settings
    motions, language = MOTIONS, MOTIONS.world.language


REWARD = ShapesMotion
