"""Does a picture of the shapes world show what its prompt says?

It gives GenEval's two readings of a verifier (flowrl.shapes.verify).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flowrl.rewards.core.readings import Readings
from flowrl.rewards.core.readings import Settings as Base
from flowrl.rewards.core.reward import SHOWN
from flowrl.shapes import verify
from flowrl.types import MediaContext


class Settings(Base):
    """How a verdict becomes a score."""


class Shapes(Readings):
    """Agreement of a picture with its prompt's clauses, in [0, 1]; 1 when it shows exactly these.

    It reads meta["include"] of the prompt.
    """

    Settings = Settings
    name = "shapes"
    scale = (
        "0 to 1: share of the prompt's clauses that hold (partial), 1 only when all hold and"
        " nothing else is in the picture (strict)"
    )
    needs = frozenset({"meta"})
    reads = frozenset({"include"})
    verifies = frozenset(SHOWN)
    video = "no"

    def complaint(self, meta: Mapping[str, Any]) -> str | None:
        return verify.complaint(meta.get("include"))

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """Both readings: {"partial": (B,), "strict": (B,)}."""
        assert context is not None and context.meta is not None
        for prompt, meta in zip(prompts, context.meta, strict=True):
            if complaint := verify.complaint(meta.get("include")):
                raise ValueError(
                    f'the prompt "{prompt}" {complaint}; the shapes reward is for data=shapes'
                )
        clauses = [meta["include"] for meta in context.meta]
        readings = [
            (verify.partial(objects, include), float(verify.strict(objects, include)))
            for objects, include in zip(verify.detect(media), clauses, strict=True)
        ]
        values = torch.tensor(readings, dtype=torch.float32, device=media.device)
        return {"partial": values[:, 0], "strict": values[:, 1]}


REWARD = Shapes
