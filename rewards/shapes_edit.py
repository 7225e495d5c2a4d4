"""Was a picture of the shapes world edited as its prompt says, and nothing else in it changed?"""

from __future__ import annotations

from flowrl.rewards.core.verified import EditSettings, VerifiedEdit
from flowrl.scenes.shapes import EDITS


class Settings(EditSettings):
    """How a verdict becomes a score, and where the source is."""


class ShapesEdit(VerifiedEdit):
    name = "shapes_edit"
    Settings = Settings
    edits, language = EDITS, EDITS.world.language


REWARD = ShapesEdit
