"""Was a picture of the stickers world edited as its prompt says, and nothing else in it changed?"""

from __future__ import annotations

from flowrl.rewards.core.verified import EditSettings, VerifiedEdit
from flowrl.scenes.stickers.scenes import BACKGROUNDS
from flowrl.scenes.stickers.world import EDITS


class Settings(EditSettings):
    """How a verdict becomes a score, and where the source is."""


class StickersEdit(VerifiedEdit):
    name = "stickers_edit"
    Settings = Settings
    edits, language = EDITS, EDITS.world.language
    backgrounds = BACKGROUNDS.values()


REWARD = StickersEdit
