"""Rewards that read a stickers world's media and judge them by the sentence that asked for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl.rewards.core.readings import Readings
from flowrl.scenes.grammar import Sentence, read
from flowrl.scenes.stickers.prompts import WORLD
from flowrl.types import MediaContext


class Verified(Readings):
    """Agreement of media with their sentence, in [0, 1]; a subclass says how it is judged."""

    kind: ClassVar[type[Sentence]]  # sentences that it judges
    reads_prompt = True

    def verdicts(
        self, media: Tensor, asked: list[Any], context: MediaContext | None
    ) -> list[dict[str, float]]:
        """Judge media by sentences (B) -> "partial", "strict" and named parts of each."""
        raise NotImplementedError(f"{type(self).__name__} does not define verdicts")

    def complaint(self, meta: Mapping[str, Any]) -> str | None:
        try:
            read(meta["prompt"], WORLD, self.kind)
        except ValueError as error:
            return f"cannot be judged: {error}"
        return super().complaint(meta)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """Both readings and the named parts, (B,) each."""
        asked = [read(prompt, WORLD, self.kind) for prompt in prompts]
        found = self.verdicts(media, asked, context)
        return {
            name: torch.tensor([row[name] for row in found], device=media.device)
            for name in found[0]
        }
