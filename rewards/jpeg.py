"""JPEG size of a picture (DDPO, arXiv:2305.13301).

It needs no network, and is the classic first test of a training loop.
"""

from __future__ import annotations

import io
from typing import Any, Literal

import pydantic
import torch
from PIL import Image
from torch import Tensor

from flowrl.data.media import to_pil
from flowrl.rewards.core.pictures import frames_of, mean_of_frames
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import Settings as Base
from flowrl.types import MediaContext


class Settings(Base):
    scale: Literal["flow_grpo", "ddpo"] = pydantic.Field(
        "flow_grpo",
        description="Scale of the score: flow_grpo divides kilobytes by 500; ddpo does not.",
    )
    quality: int = pydantic.Field(95, ge=1, le=100, description="JPEG quality given to PIL.")


class Jpeg(Reward):
    """Minus kilobytes (1000 bytes) as a JPEG of quality 95, over 500; for a video, the mean over
    its frames. A weight of -1 makes it DDPO's reward of large files.

    At 512 x 512 a flat grey is 4.7 kB and uniform noise 308 kB: rewards of -0.009 and -0.62.
    """

    Settings = Settings
    name = "jpeg"
    networks = False
    scale = "minus kilobytes at JPEG quality 95, divided by 500"

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        divisor, over = (500, ", divided by 500") if s.scale == "flow_grpo" else (1, "")
        self.factor = -1 / divisor
        self.scale = f"minus kilobytes at JPEG quality {s.quality}{over}"

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        images = to_pil(frames_of(media))
        kilobytes = [jpeg_bytes(image, self.settings.quality) / 1000 for image in images]
        return (self.factor * mean_of_frames(torch.tensor(kilobytes), media)).to(media.device)


def jpeg_bytes(image: Image.Image, quality: int) -> int:
    """Length of the JPEG file that PIL writes."""
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=quality)
    return buffer.tell()


REWARD = Jpeg
