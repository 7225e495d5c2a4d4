"""Any image reward as a video reward: frames are scored as pictures, and the scores become one.

It follows the video rewards of Flow-Factory (mean over frames) and the judges' frame sampling
(Pref-GRPO: a count, evenly spread with the first and the last). A mean
hides one broken frame; `min` and `softmin` do not.
"""

from __future__ import annotations

from typing import Any, Literal

import pydantic
import torch
from torch import Tensor

from flowrl.rewards.core.score import take
from flowrl.rewards.core.settings import Settings as Base
from flowrl.rewards.core.wrap import Around
from flowrl.types import MediaContext

WHOLE = ("reference",)  # rewards that compare a whole video with one of as many frames
Pool = Literal["mean", "min", "softmin", "max", "first", "last"]


class Settings(Base):
    reward: Any = pydantic.Field(
        None,
        description="Name of the image reward; Python may also give a loaded one, or a function.",
    )
    reward_settings: dict[str, Any] = pydantic.Field(
        default_factory=dict, description="Settings of the image reward."
    )
    frames: int = pydantic.Field(
        8,
        ge=1,
        description=(
            "How many frames are scored, evenly spread, with the first and the last; 1: the first."
        ),
    )
    pool: Pool = pydantic.Field(
        "mean", description="How the frames' scores become one; softmin leans on the worst ones."
    )
    temperature: float = pydantic.Field(
        0.1,
        gt=0,
        description=(
            "Temperature of softmin, in units of the image reward: near 0 it is the minimum, when"
            " large the mean."
        ),
    )


class Video(Around):
    """An image reward over some frames of a video, on the image reward's own scale.

    For an image, it is that reward itself.
    """

    Settings = Settings
    name = "video"
    scale = "that of the image reward, pooled over frames"

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        what = getattr(self.inner, "name", type(self.inner).__name__)
        whole = what in WHOLE or self.needs & {"group", "actions", "reference"}
        if whole or not callable(self.inner) or self.inner.video == "only":
            raise ValueError(
                f'reward.video.reward: "{what}" does not score single pictures; put it outside (for'
                " example win_rate with judge=video), or use it on its own"
            )
        self.video = "yes"
        self.differentiable, self.range = self.inner.differentiable, self.inner.range
        self.scale = f"{self.inner.scale} ({s.pool} over frames)"

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        if media.ndim == 4:
            values = self.inner(media, prompts, context)
        else:
            frames, texts, columns = self._pictures(media, prompts, context)
            values = self._pooled(self.inner(frames, texts, columns), len(media))
        self.problem = self.inner.problem
        return values

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """The image reward's own readings, pooled as its score is."""
        if media.ndim == 4:
            return self.inner.parts(media, prompts, context)
        frames, texts, columns = self._pictures(media, prompts, context)
        return {
            name: self._pooled(values, len(media))
            for name, values in self.inner.parts(frames, texts, columns).items()
        }

    def chosen(self, count: int) -> list[int]:
        """Which of `count` frames are scored, in order."""
        s = self.settings
        if s.pool in ("first", "last"):
            return [0 if s.pool == "first" else count - 1]
        places = torch.linspace(0, count - 1, min(s.frames, count), dtype=torch.float64)
        return places.round().long().tolist()

    def _pictures(
        self, media: Tensor, prompts: list[str], context: MediaContext | None
    ) -> tuple[Tensor, list[str], MediaContext | None]:
        """Take the chosen frames of (B, F, 3, H, W) -> (B * n, 3, H, W), their prompts and columns.

        Frames of a sample are next to each other.
        """
        places = self.chosen(media.shape[1])
        rows = torch.arange(len(media)).repeat_interleave(len(places))
        columns = None if context is None else take(context, rows)
        return media[:, places].flatten(0, 1), [prompts[row] for row in rows], columns

    def _pooled(self, values: Tensor, size: int) -> Tensor:
        """Pool scores (B * n,) -> (B,) fp32; NaN where the score of a frame is NaN or inf: a
        failure."""
        values = values.float().view(size, -1)
        values = values.masked_fill(~values.isfinite(), torch.nan)
        match self.settings.pool:
            case "min":
                return values.amin(1)
            case "max":
                return values.amax(1)
            case "softmin":
                return softmin(values, self.settings.temperature)
            case _:  # mean; for first and last, which choose one frame, it is that frame's score
                return values.mean(1)


def softmin(values: Tensor, temperature: float) -> Tensor:
    """Mean of each row weighted by softmax(-value / temperature): (B, n) -> (B,).

    It lies between the lowest value and the mean.
    """
    return ((-values / temperature).softmax(1) * values).sum(1)


REWARD = Video
