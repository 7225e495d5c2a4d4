"""Cheap detectors of a hacked reward, read on the samples that are trained on (watch.detectors).

A policy that exploits a reward tends to oversharpen, to burn colours, to repeat patterns, to draw
the same picture for every noise, and to leave what the base model draws. Nothing is trained on
these numbers; flowrl/training/watch/watch.py makes metrics of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.data.media import media_kind
from flowrl.rewards.core.pictures import frames_of
from flowrl.rewards.core.reward import load

THUMB = 16  # pixels a side of the pictures that diversity compares
CELLS = 4  # cells a side of the grid whose colours drift compares
REWARDS = ("sharpness", "saturation", "tiling")  # detectors that are rewards, too


class Detectors:
    """Reads numbers off samples: name -> (n,), or (n, D) for drift; means over frames of videos."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(dict.fromkeys(names))
        self.rewards = {name: load(name) for name in self.names if name in REWARDS}
        self.whole_groups = "diversity" in self.names

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError where media (n, ...) of this shape are no pictures."""
        if media_kind(shape) == "arrays":
            raise ValueError(
                f"watch.detectors={','.join(self.names)} read pictures or videos, and a sample of"
                f" this model has shape {shape[1:]}; leave watch.detectors out"
            )

    @torch.no_grad()
    def __call__(self, media: Tensor, group: Tensor) -> dict[str, Tensor]:
        """Read media (n, 3, H, W) or (n, F, 3, H, W) in [0, 1] of samples in groups (n,); others
        raise ValueError. A number is NaN where a pixel is not finite."""
        self.check(tuple(media.shape))
        known = media.flatten(1).isfinite().all(1)
        seen, members = media[known].float().clamp(0, 1), group.to(media.device)[known]
        out: dict[str, Tensor] = {}
        for name in self.names:
            if name in self.rewards:
                found = self.rewards[name](seen, [""] * len(seen))
            else:
                found = diversity(seen, members) if name == "diversity" else features(seen)
            out[name] = found.new_full((len(media), *found.shape[1:]), math.nan)
            out[name][known] = found
        return out


def diversity(media: Tensor, group: Tensor) -> Tensor:
    """Mean distance of each sample to the others of its group -> (n,); NaN where it is alone.

    A distance is the root mean square difference of pictures of 16 x 16 pixels: 0 equal, 1 black
    against white. The mean over a group is its mean pairwise distance.
    """
    small = F.adaptive_avg_pool2d(frames_of(media), THUMB).reshape(len(media), -1)
    out = small.new_full((len(small),), math.nan)
    for g in group.unique():
        members = torch.nonzero(group == g).flatten()
        if len(members) > 1:
            between = (small[members, None] - small[None, members]).square().mean(2).sqrt()
            out[members] = between.sum(1) / (len(members) - 1)
    return out


def features(media: Tensor) -> Tensor:
    """The features that drift compares, (n, 96): mean and standard deviation of the three colours
    in each cell of a grid of 4 x 4."""
    frames = frames_of(media)
    mean = F.adaptive_avg_pool2d(frames, CELLS)
    spread = F.adaptive_avg_pool2d(frames.square(), CELLS) - mean.square()
    found = torch.cat([mean, spread.clamp(min=0).sqrt()], 1).flatten(1)
    return found.view(len(media), -1, found.shape[1]).mean(1)
