"""Rewards that read a small world's media and judge them by the sentence that asked for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl.rewards.core.readings import Readings
from flowrl.rewards.core.readings import Settings as ReadingSettings
from flowrl.rewards.core.source import Settings as SourceSettings
from flowrl.rewards.core.source import Sourced
from flowrl.scenes.edits import Edits
from flowrl.scenes.grammar import Edit, Language, Motion, Sentence, read
from flowrl.scenes.motions import Motions, verdict
from flowrl.types import MediaContext


class Verified(Readings):
    """Agreement of media with their sentence, in [0, 1]; a subclass says how it is judged."""

    language: ClassVar[Language]  # that the sentences are written in
    kind: ClassVar[type[Sentence]]  # sentences that it judges
    reads_prompt = True

    def verdicts(
        self, media: Tensor, asked: list[Any], context: MediaContext | None
    ) -> list[dict[str, float]]:
        """Judge media by sentences (B) -> "partial", "strict" and named parts of each."""
        raise NotImplementedError(f"{type(self).__name__} does not define verdicts")

    def complaint(self, meta: Mapping[str, Any]) -> str | None:
        try:
            read(meta["prompt"], self.language, self.kind)
        except ValueError as error:
            return f"cannot be judged: {error}"
        return super().complaint(meta)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """Both readings and the named parts, (B,) each."""
        asked = [read(prompt, self.language, self.kind) for prompt in prompts]
        found = self.verdicts(media, asked, context)
        return {
            name: torch.tensor([row[name] for row in found], device=media.device)
            for name in found[0]
        }


class EditSettings(ReadingSettings, SourceSettings):
    """How a verdict becomes a score, and where the source is."""


class VerifiedEdit(Verified, Sourced):
    """Agreement of a result with its instruction and source, in [0, 1]; a copy of the source
    scores 0. See flowrl.scenes.edits."""

    Settings = EditSettings
    edits: ClassVar[Edits]  # those of its world
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
        detect = self.edits.world.detect
        before = [detect(source[None])[0] for source in self.sources(media, context)]
        rows = zip(before, detect(media), asked, strict=True)
        return [self.edits.verdict(*row) for row in rows]


class VerifiedMotion(Verified):
    """Agreement of a video with its motion, in [0, 1]; see flowrl.scenes.motions."""

    Settings = ReadingSettings
    motions: ClassVar[Motions]  # those of its world
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
        found, frames = self.motions.world.detect(media.flatten(0, 1)), media.shape[1]
        videos = (found[i : i + frames] for i in range(0, len(found), frames))
        return [verdict(*row) for row in zip(videos, asked, strict=True)]
