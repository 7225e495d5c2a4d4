"""Was a picture of the stickers world edited as its prompt says, and nothing else in it changed?"""

from __future__ import annotations

from flowrl.rewards.core.verified import VerifiedEdit
from flowrl.scenes.stickers.world import EDITS


class StickersEdit(VerifiedEdit):
    name = "stickers_edit"
    edits, language = EDITS, EDITS.world.language


REWARD = StickersEdit
