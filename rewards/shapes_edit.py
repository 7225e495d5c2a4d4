"""Was a picture of the shapes world edited as its prompt says, and nothing else in it changed?"""

from __future__ import annotations

from flowrl.rewards.core.verified import VerifiedEdit
from flowrl.scenes.shapes import EDITS


class ShapesEdit(VerifiedEdit):
    name = "shapes_edit"
    edits, language = EDITS, EDITS.world.language


REWARD = ShapesEdit
