"""DINOv2 (arXiv:2304.07193): a vector for what a picture shows, which no text has shaped.

Pictures are prepared as for the published evaluations, and as the processor of transformers does:
shortest side to 256 (bicubic), the middle 224 x 224, ImageNet's mean and deviation. The vector is
that of the class token. Departure: bytes are resized as floats, by torchvision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.transforms import functional as F

from flowrl.rewards.core import weights
from flowrl.rewards.core.pictures import cropped, normalized, rounded

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHORTEST, SIDE = 256, 224


class Dino(nn.Module):
    """A Dinov2Model of transformers, from a folder or by a hub's name."""

    def __init__(self, source: str, *, chunk: int = 64):
        super().__init__()
        from transformers import Dinov2Model

        self.model = weights.network(Dinov2Model, source, reward="dino")
        self.chunk = chunk

    def forward(self, frames: Tensor) -> Tensor:
        """Features of pictures: (n, 3, H, W) in [0, 1] -> (n, d)."""
        return torch.cat([self._tokens(part) for part in frames.split(self.chunk)])

    def _tokens(self, frames: Tensor) -> Tensor:
        pixels = F.center_crop(cropped(rounded(frames), SHORTEST), [SIDE, SIDE])
        return self.model(normalized(pixels, MEAN, STD)).pooler_output
