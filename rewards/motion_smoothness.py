"""How evenly a video moves, from pixels alone: no optical flow, no network, differentiable.

With m = mean |f_{t+1} - f_t| over interior frames (to both their neighbours) and e = mean |f_t -
(f_{t-1} + f_{t+1}) / 2|, the error of guessing a frame as the mean of its neighbours (half the
second difference):

    relative       1 - e / m   0 to 1: 1 when every pixel keeps its rate of change, 0 when every
                               change is undone in the next frame; 1 - sqrt(3) / 2 = 0.134 for
                               independent Gaussian noise, whatever its strength
    interpolation  1 - e       VBench's motion smoothness, (255 - mean |frame - interpolated
                               frame|) / 255, with the mean of the neighbours in place of the AMT
                               network, and at every interior frame, not only at the odd ones

A frozen video is perfectly smooth, and a model that is paid for smoothness freezes. Therefore the
result is multiplied by m / (m + floor): without motion there is no reward; floor=0 gives VBench's
reading, which pays 1 for a still. This measures pixels, not objects: a sharp edge that moves evenly
is not smooth to the pixels that it flips. A video played backwards scores the same.
"""

from __future__ import annotations

from typing import Any, Literal

import pydantic
import torch
from torch import Tensor

from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import Settings as Base
from flowrl.types import MediaContext


class Settings(Base):
    measure: Literal["relative", "interpolation"] = pydantic.Field(
        "relative",
        description=(
            "What is measured: interpolation error against motion (relative), or the error alone,"
            " as in VBench (interpolation)."
        ),
    )
    floor: float = pydantic.Field(
        0.01,
        ge=0,
        description=(
            "Mean change of a pixel between frames, in [0, 1], at which half of the smoothness is"
            " paid."
        ),
    )

    @pydantic.model_validator(mode="after")
    def _relative_needs_a_floor(self) -> Settings:
        if self.measure == "relative" and not self.floor:
            raise ValueError(
                "measure=relative divides by the motion, so a still needs floor above 0; take"
                " measure=interpolation for floor=0"
            )
        return self


class MotionSmoothness(Reward):
    """Smoothness of the change between frames, in [0, 1]; a frozen video gets 0."""

    Settings = Settings
    name = "motion_smoothness"
    networks = False
    scale = "0 to 1: evenness of the change between frames, 0 for a frozen video"
    range = (0.0, 1.0)
    video = "only"
    differentiable = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        if not self.settings.floor:
            self.scale = (
                "0 to 1: one minus the mean error of guessing a frame from its neighbours, 1 for a"
                " frozen video"
            )

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        motion, error = self._motion_and_error(media)
        floor = self.settings.floor
        if self.settings.measure == "relative":
            return (motion - error) / (motion + floor)
        return (1 - error) * (motion / (motion + floor) if floor else 1)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """dynamic: mean change of a pixel between frames; error: e of the formula; both 0 to 1."""
        return {"dynamic": dynamic_degree(media), "error": self._motion_and_error(media)[1]}

    def _motion_and_error(self, media: Tensor) -> tuple[Tensor, Tensor]:
        """m and e of the formula, (B,) each."""
        if (frames := media.shape[1]) < 3:
            raise ValueError(
                "reward motion_smoothness looks at a frame and its two neighbours; the videos have"
                f" {frames} frames"
            )
        steps = media.flatten(2).diff(dim=1)  # (B, F - 1, pixels)
        before, after = steps[:, :-1], steps[:, 1:]
        motion = (before.abs() + after.abs()) / 2
        return motion.mean((1, 2)), (after - before).abs().mean((1, 2)) / 2


def dynamic_degree(media: Tensor) -> Tensor:
    """Mean change of a pixel between frames, in [0, 1]: (B, F, 3, H, W) -> (B,) fp32."""
    return torch.diff(media, dim=1).abs().mean((1, 2, 3, 4))


REWARD = MotionSmoothness
