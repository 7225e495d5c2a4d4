"""Was a picture of the stickers world edited as its prompt says, and nothing else in it changed?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl.rewards.core.readings import Settings as ReadingSettings
from flowrl.rewards.core.source import Settings as SourceSettings
from flowrl.rewards.core.source import Sourced
from flowrl.rewards.core.verified import Verified
from flowrl.scenes.grammar import Edit
from flowrl.scenes.stickers import edits, verify
from flowrl.types import MediaContext


class Settings(ReadingSettings, SourceSettings):
    """How a verdict becomes a score, and where the source is."""


class StickersEdit(Verified, Sourced):
    """Agreement of a result with its instruction and source, in [0, 1]; a copy of the source
    scores 0. See flowrl.scenes.stickers.edits."""

    name = "stickers_edit"
    Settings = Settings
    kind = Edit
    scale = (
        "0 to 1: what should change did, times what should not did not (partial), 1 only when both"
        " are fully right (strict)"
    )
    video = "no"

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        self.declare_source(True)

    def verdicts(
        self, media: Tensor, asked: list[Any], context: MediaContext | None
    ) -> list[dict[str, float]]:
        """Parts: changed and kept."""
        sources = torch.cat([verify.to_world(s[None]) for s in self.sources(media, context)])
        before, after = verify.detect(sources), verify.detect(media)
        return [edits.verdict(*row) for row in zip(before, after, asked, strict=True)]


REWARD = StickersEdit
