"""How a pipeline turns its VAE's output into media: the same numbers in another order and range."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

SAMPLED = 4096  # number of entries by which an order of axes is found
ROUNDED = 2e-2  # share of the range: a pipeline may round its media to bf16 or 8 bits


@dataclass(frozen=True)
class Pixels:
    """media = scale * out + shift, with the axes of a row in another order."""

    image: tuple[int, ...]  # shape of a row of the VAE's output
    media: tuple[int, ...]  # shape of a row of the pipeline's media
    axes: tuple[int, ...]  # axis of image for each axis of media, without axes of length 1
    scale: float  # factor of the values
    shift: float  # added after the scale

    def __call__(self, out: Tensor) -> Tensor:
        """Make media (n, *media) from outputs (n, *image)."""
        long = out.reshape(len(out), *_long(self.image))
        ordered = long.permute(0, *(a + 1 for a in self.axes)).reshape(len(out), *self.media)
        return ordered * self.scale + self.shift

    def inverse(self, media: Tensor) -> Tensor:
        """Make outputs (n, *image) from media (n, *media)."""
        back = [0] * len(self.axes)
        for place, axis in enumerate(self.axes):
            back[axis] = place + 1
        long = media.reshape(len(media), *_long(self.media)).permute(0, *back)
        return ((long - self.shift) / self.scale).reshape(len(media), *self.image)


def fit_pixels(out: Tensor, media: Tensor) -> Pixels | None:
    """Find the map from noise out (n, *image) to media (n, *media); None if it has another form."""
    image, shape = tuple(out.shape[1:]), tuple(media.shape[1:])
    if len(out) != len(media) or sorted(_long(image)) != sorted(_long(shape)):
        return None
    places = torch.randint(media.numel(), (SAMPLED,), generator=torch.Generator().manual_seed(0))
    wanted = media.reshape(-1)[places].double()
    for axes in permutations(range(len(_long(image)))):
        if tuple(_long(image)[a] for a in axes) != _long(shape):
            continue
        ordered = Pixels(image, shape, axes, 1.0, 0.0)(out).reshape(-1)
        found = _line(ordered[places].double(), wanted)
        if found is None:
            continue
        scale, shift = found
        pixels = Pixels(image, shape, axes, scale, shift)
        rows = zip(out.split(1), media.split(1), strict=True)
        if all((pixels(one) - row).abs().max() <= ROUNDED * abs(scale) for one, row in rows):
            return pixels
    return None


def _long(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size > 1)


def _line(x: Tensor, y: Tensor) -> tuple[float, float] | None:
    """Find (scale, shift) with y = scale * x + shift, each (K,); None if there is no such line."""
    matrix = torch.stack([x, torch.ones_like(x)], 1)
    solution = torch.linalg.lstsq(matrix, y[:, None]).solution
    scale, shift = solution.flatten().tolist()
    off = (matrix @ solution - y[:, None]).abs().max().item()
    return (scale, shift) if scale and off <= ROUNDED * abs(scale) else None
