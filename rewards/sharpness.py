"""Sharpness of a picture: a watch for oversharpening and for blur.

Log it with weight 0 beside the reward that is trained on. It has two readings. "laplacian": the
variance of the Laplacian (Pech-Pacheco et al. 2000, the common focus measure), on a log scale. It
differs from OpenCV's usual one-liner in two ways: log10(1 + variance), and border pixels, which
lack a neighbour, are left out. "high_frequency": the share of the spectrum's energy above half the
Nyquist frequency. Both grow when a picture is oversharpened or gets noisy, and both depend on the
number of pixels: compare pictures of one size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor

from flowrl.rewards.core.pictures import frames_of, mean_of_frames
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import Settings as Base
from flowrl.types import MediaContext

AT_ONCE = 16  # frames in memory at a time
HALF_A_LEVEL = 0.5 / 255  # contrast below the rounding of a saved picture counts as none


class Settings(Base):
    reading: Literal["laplacian", "high_frequency"] = pydantic.Field(
        "laplacian", description="Which of the two readings is the score."
    )


class Sharpness(Reward):
    """log10(1 + variance of the Laplacian of luma in 0..255); higher is sharper.

    A video gets the mean over its frames. Typical values are 0 for a flat picture, 0.5 to 1.5 for
    blurred photos, 2 to 3.5 for photos of 512 px, 4.7 for uniform noise, and 6.0 for a checkerboard
    of single pixels.
    """

    Settings = Settings
    name = "sharpness"
    networks = False
    scale = (
        "log10(1 + variance of the Laplacian of luma in 0..255): 0 flat, 0.5 to 1.5 blurred, 2 to"
        " 3.5 photos, 4.7 noise"
    )
    differentiable = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        self.range = (0.0, math.inf if self.settings.reading == "laplacian" else 1.0)
        if self.settings.reading == "high_frequency":
            self.scale = "share of the energy above half the Nyquist frequency, 0 to 1"

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        return self._read(media, READINGS[self.settings.reading])

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        return {name: self._read(media, reading) for name, reading in READINGS.items()}

    def _read(self, media: Tensor, reading: Callable[[Tensor], Tensor]) -> Tensor:
        height, width = media.shape[-2:]
        if min(height, width) < 3:
            raise ValueError(
                f"sharpness needs pictures of at least 3 x 3 pixels; these are {width} x {height}"
            )
        chunks = frames_of(media).split(AT_ONCE)
        return mean_of_frames(torch.cat([reading(luma(part)) for part in chunks]), media)


def luma(frames: Tensor) -> Tensor:
    """(n, 3, H, W) in [0, 1] -> (n, H, W): Rec. 601 luma, as PIL's "L" and OpenCV's grey."""
    red, green, blue = frames.float().unbind(1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def laplacian(y: Tensor) -> Tensor:
    """(n, H, W) in [0, 1] -> (n,): log10(1 + variance of the 4-neighbour Laplacian).

    The variance is over interior pixels, in byte levels.
    """
    inner = (
        y[:, :-2, 1:-1] + y[:, 2:, 1:-1] + y[:, 1:-1, :-2] + y[:, 1:-1, 2:] - 4 * y[:, 1:-1, 1:-1]
    )
    return torch.log10(1 + (255 * inner).flatten(1).var(1, correction=0))


def high_frequency(y: Tensor) -> Tensor:
    """(n, H, W) in [0, 1] -> (n,): share of the energy at 1/4 cycle a pixel and above.

    The mean's energy is left out. A Hann window keeps the jump between opposite borders, which the
    Fourier transform takes for an edge, out of the spectrum.
    """
    height, width = y.shape[-2:]
    window = _hann(height, y)[:, None] * _hann(width, y)
    inner = window * (y - (window * y).sum((1, 2), keepdim=True) / window.sum())
    energy = torch.fft.fft2(inner).abs().square()
    rows, columns = (torch.fft.fftfreq(side, device=y.device) for side in (height, width))
    high = rows[:, None].square() + columns.square() >= 0.25**2
    # energy of a contrast of half a level, by Parseval's theorem
    floor = height * width * (HALF_A_LEVEL * window).square().sum()
    return energy[:, high].sum(1) / (energy.sum((1, 2)) + floor)


def _hann(side: int, like: Tensor) -> Tensor:
    """A symmetric Hann window of this length without its two zeros."""
    return torch.hann_window(side + 2, periodic=False, device=like.device)[1:-1]


READINGS = {"laplacian": laplacian, "high_frequency": high_frequency}
REWARD = Sharpness
