"""Tiling and grid artefacts: a watch for pictures that repeat themselves.

Log it with weight 0 beside the reward that is trained on. Policies that hack a reward are known to
fill the picture with copies of what the reward likes, and to show the grid of the network's patches
(8 pixels of the autoencoder, 16 with patches of two latents). It has three readings of the luma,
each 0 to 1 and near 0 where nothing repeats:

* repetition: the highest peak of the autocorrelation away from zero. At each lag only the overlap
  is compared, so that any exact tiling gives 1 (two copies of one object on an empty ground: 0.5 to
  1). A peak is measured against its surroundings, so that an edge or a stripe, which resembles
  itself along its own direction, gives none. Detail between 3 and 9 pixels of the picture reduced
  to 128 is compared.
* pattern: the share of fine detail that is one block of p x p pixels, repeated. A classical
  seasonal decomposition: a moving average over one period is taken out, the rest is averaged by
  phase, and the variance of those means is compared with all variance, minus what chance gives.
* seams: the same share for the mean step from each column, or row, to the next: block borders,
  though their steps differ from block to block. Steps saturate at a few levels, so that a faint
  grid shows beside strong edges; pictures that were JPEG files have 0.5 to 0.9.

pattern and seams are the largest over the periods that fit four times into the picture. Whatever
repeats counts, wanted or not: a tray of coins has repetition 0.3. Small pictures have few periods:
by chance seams reaches 0.1 at 256 pixels, 0.2 at 128, 0.5 at 64. The rise over a training run is
what warns.
"""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.rewards.core.pictures import frames_of, mean_of_frames
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import Settings as Base
from flowrl.rewards.sharpness import AT_ONCE, HALF_A_LEVEL, luma
from flowrl.types import MediaContext

SIDE = 128  # repetition is measured on a picture whose shorter side has at most this many pixels
STEP = 4 / 255  # step between neighbours that counts half in seams


class Settings(Base):
    reading: Literal["worst", "repetition", "pattern", "seams"] = pydantic.Field(
        "worst", description="Which reading is the score; worst: the largest of the three."
    )
    periods: tuple[Annotated[int, pydantic.Field(ge=4, multiple_of=2)], ...] = pydantic.Field(
        (8, 16), min_length=1, description="Periods in pixels that pattern and seams look for."
    )


class Tiling(Reward):
    """How much a picture repeats itself, 0 to 1: the largest of repetition, pattern and seams.

    A video gets the largest of their means over frames. Photos that were never JPEG files are below
    0.2, and pictures that repeat exactly give 1. Higher is worse: as a penalty, give it a negative
    weight.
    """

    Settings = Settings
    name = "tiling"
    networks = False
    scale = (
        "how much the picture repeats itself: below 0.2 photos, 1 exact copies or a pure grid;"
        " higher is worse"
    )
    range = (0.0, 1.0)
    differentiable = True

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        found = self.parts(media, prompts)
        if self.settings.reading == "worst":
            return torch.stack(list(found.values())).amax(0)
        return found[self.settings.reading]

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        periods = self._periods(media)
        columns: dict[str, list[Tensor]] = {"repetition": [], "pattern": [], "seams": []}
        for part in frames_of(media).split(AT_ONCE):
            y = luma(part)
            columns["repetition"].append(repetition(y))
            columns["pattern"].append(torch.stack([pattern(y, p) for p in periods]).amax(0))
            columns["seams"].append(torch.stack([seams(y, p) for p in periods]).amax(0))
        return {name: mean_of_frames(torch.cat(values), media) for name, values in columns.items()}

    def _periods(self, media: Tensor) -> list[int]:
        """Periods that fit four times into the pictures; none -> ValueError."""
        height, width = media.shape[-2:]
        periods = [p for p in self.settings.periods if 4 * p <= min(height, width)]
        if not periods:
            least = 4 * min(self.settings.periods)
            raise ValueError(
                f"tiling needs pictures of at least {least} x {least} pixels (4 periods); these are"
                f" {width} x {height}"
            )
        return periods


def repetition(y: Tensor) -> Tensor:
    """Luma (n, H, W) -> (n,): the largest (r - v) / (1 - v) over all lags.

    r: autocorrelation at a lag, v: its largest value around that lag, on the square 1/16 of a side
    away. Lags are 1/8 to 1/2 of a side in either direction.
    """
    y = _shrunk(y)
    height, width = y.shape[-2:]
    r = autocorrelation(_band(y))
    v = _around(r, max(1, min(height, width) // 16))
    rows, columns = (torch.fft.fftfreq(n, 1 / n, device=y.device).abs() for n in r.shape[-2:])
    allowed = (rows[:, None] >= height / 8) | (columns >= width / 8)
    allowed &= (rows[:, None] <= height / 2) & (columns <= width / 2)
    # min=0.1, because r - v is rounding and no peak where the surroundings themselves are near 1
    # (an edge seen along its own direction)
    peak = (r - v) / (1 - v).clamp(min=0.1)
    return peak[:, allowed].amax(1).clamp(min=0)


def _shrunk(y: Tensor) -> Tensor:
    """Luma (n, H, W), reduced to a shorter side of at most SIDE pixels."""
    shrink = SIDE / min(y.shape[-2:])
    if shrink >= 1:
        return y
    size = [round(side * shrink) for side in y.shape[-2:]]
    return F.interpolate(y[:, None], size=size, mode="bilinear", antialias=True)[:, 0]


def autocorrelation(x: Tensor) -> Tensor:
    """(n, h, w) of mean about 0 -> (n, 2h, 2w): cosine of x and x shifted, where they overlap.

    Negative lags are at the end, as the Fourier transform orders them. Half a byte level of
    contrast is added to the norms, so that a flat picture has none.
    """
    size = (2 * x.shape[-2], 2 * x.shape[-1])
    energy = x.square() + HALF_A_LEVEL**2
    shifted, ones = torch.fft.rfft2(energy, s=size), torch.fft.rfft2(torch.ones_like(x), s=size)
    one = torch.fft.irfft2(shifted * ones.conj(), s=size)
    other = torch.fft.irfft2(ones * shifted.conj(), s=size)
    dot = torch.fft.irfft2(torch.fft.rfft2(x, s=size).abs().square(), s=size)
    # floor for lags with next to no overlap
    least = 1e-6 * energy.sum((1, 2), keepdim=True).square()
    return dot / torch.maximum(one * other, least).sqrt()


def pattern(y: Tensor, period: int) -> Tensor:
    """Luma (n, H, W) -> (n,): share of detail's variance that repeats in both directions."""
    detail = _detrended(y, period)
    rows, columns = (torch.arange(side, device=y.device) % period for side in detail.shape[-2:])
    phase = (rows[:, None] * period + columns).flatten()
    return _between(detail.flatten(1), phase, period**2, HALF_A_LEVEL**2)


def seams(y: Tensor, period: int) -> Tensor:
    """Luma (n, H, W) -> (n,): share of the mean step to the next column that repeats.

    The larger of the shares for columns and for rows is returned.
    """
    shares = []
    for turned in (y, y.transpose(1, 2)):
        step = turned.diff(dim=2).abs()
        profile = _detrended((step / (step + STEP)).mean(1, keepdim=True), period)[:, 0]
        phase = torch.arange(profile.shape[1], device=y.device) % period
        shares.append(_between(profile, phase, period, 1e-6))
    return torch.stack(shares).amax(0)


def _between(values: Tensor, phase: Tensor, phases: int, floor: float) -> Tensor:
    """(n, N) values in groups by phase (N,) -> (n,): share of variance that the groups explain.

    R2 is the variance of the group means over all variance + floor; the share is the adjusted R2 of
    a regression on the phase, 1 - (1 - R2) (N - 1) / (N - phases), at least 0.
    """
    count = values.shape[1]
    values = values - values.mean(1, keepdim=True)
    sums = values.new_zeros(len(values), phases).index_add(1, phase, values)
    between = (sums.square() / torch.bincount(phase, minlength=phases)).sum(1)
    share = between / (values.square().sum(1) + count * floor)
    return (1 - (1 - share) * (count - 1) / (count - phases)).clamp(min=0)


def _detrended(y: Tensor, period: int) -> Tensor:
    """(n, H, W) minus its moving average over one (even) period, along axes longer than 1.

    The average is centred; borders that it does not reach are cut off.
    """
    kernel = y.new_ones(period + 1) / period
    kernel[[0, -1]] /= 2
    trend, edge = y[:, None], period // 2
    if y.shape[1] > 1:
        trend, y = F.conv2d(trend, kernel.view(1, 1, -1, 1)), y[:, edge:-edge]
    return y[:, :, edge:-edge] - F.conv2d(trend, kernel.view(1, 1, 1, -1))[:, 0]


def _band(y: Tensor) -> Tensor:
    """(n, H, W) -> (n, H - 8, W - 8): mean over 3 x 3 minus mean over 9 x 9 pixels."""
    fine, coarse = F.avg_pool2d(y[:, None], 3, 1), F.avg_pool2d(y[:, None], 9, 1)
    return (fine[..., 3:-3, 3:-3] - coarse)[:, 0]


def _around(r: Tensor, reach: int) -> Tensor:
    """The largest r on the border of the square of half side `reach` around each lag.

    (n, h, w) -> (n, h, w); lags wrap around.
    """
    height, width = r.shape[-2:]
    wrapped = F.pad(r[:, None], (reach,) * 4, mode="circular")
    across = F.max_pool2d(wrapped, (1, 2 * reach + 1), 1)[:, 0]
    down = F.max_pool2d(wrapped, (2 * reach + 1, 1), 1)[:, 0]
    sides = across[:, :height], across[:, 2 * reach :], down[:, :, :width], down[:, :, 2 * reach :]
    return torch.stack(sides).amax(0)


REWARD = Tiling
