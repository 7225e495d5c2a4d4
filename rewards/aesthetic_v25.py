"""Aesthetic Predictor v2.5: a linear head on a picture's SigLIP embedding.

5.5 and above is very good; the prompt is not read. SigLIP so400m's vision tower at 384 x 384, its
pooled output (1152) at unit length, then linear layers 1152-1024-128-64-16-1 without activations:
they are one affine map, and are collapsed into one here (in fp64). Written from a description of
the model; no line comes from github.com/discus0434/aesthetic-predictor-v2-5, whose code and head
are AGPL-3.0 (so we neither ship nor fetch the head).

Departures: fp32 by default, where the reference runs in bfloat16 on CUDA (scores move by about
0.02; dtype=bfloat16 does the same). With rounding=False the resize is torchvision's on floats
instead of PIL's on bytes (57 dB apart on a photo), and a gradient passes.
"""

from __future__ import annotations

from typing import Any, Literal

import pydantic
import torch
from torch import Tensor, nn

from flowrl.rewards.core.pictures import HALF, normalized, pil_stretched, rated, stretched
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import PictureSettings
from flowrl.rewards.core.weights import fill, network, path_of, tensors
from flowrl.rewards.networks.clip import affine, linears, warn_unpublished
from flowrl.types import MediaContext

# hub name -> number of weights in the picture tower
NUMBERS = {"google/siglip-so400m-patch14-384": 428_225_600}
# Outputs of the published head for the inputs of networks.clip.probe.
PUBLISHED = (3.618320, 2.672634, 2.709308)


class Settings(PictureSettings):
    weights: str | None = pydantic.Field(
        None, description="The head's file, aesthetic_predictor_v2_5.pth."
    )
    backbone: str = pydantic.Field(
        "google/siglip-so400m-patch14-384",
        description="A folder with SigLIP, or its name on the hub.",
    )
    dtype: Literal["float32", "bfloat16"] = pydantic.Field(
        "float32", description="Type of the numbers in which the network computes."
    )
    chunk: int = pydantic.Field(32, ge=1, description="Most pictures in one forward.")


class AestheticV25(Reward):
    """Predicted rating of a picture, about 1 to 10; for a video, the mean over its frames."""

    Settings = Settings
    name = "aesthetic_v25"
    networks = NUMBERS
    scale = "predicted rating of about 1 to 10; 5.5 and above is very good"
    quality = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        if s.weights is None:
            raise ValueError(
                "reward aesthetic_v25 needs its head aesthetic_predictor_v2_5.pth (AGPL-3.0):"
                " download it from https://github.com/discus0434/aesthetic-predictor-v2-5 and set"
                " reward.aesthetic_v25.weights=/path/to/it"
            )
        self.dtype = getattr(torch, s.dtype)
        self.backbone = _picture_tower(s.backbone).to(self.dtype)
        self.head = _head(s.weights, self.backbone.config.hidden_size)

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        return rated(self, media, self._rate)

    def _rate(self, frames: Tensor, rows: Tensor) -> Tensor:
        """Ratings of pictures: (n, 3, H, W) in [0, 1] -> (n,) fp32."""
        resize = pil_stretched if self.settings.rounding else stretched
        pixels = normalized(resize(frames, self.backbone.config.image_size), HALF, HALF)
        pooled = self.backbone(pixel_values=pixels.to(self.dtype)).pooler_output
        return self.head(nn.functional.normalize(pooled.float(), dim=-1))[:, 0]


def _picture_tower(source: str) -> nn.Module:
    from transformers import SiglipVisionModel as Tower

    other_tower = ("text_model.", "logit_scale", "logit_bias")
    return network(Tower, source, reward="aesthetic_v25", setting="backbone", ignore=other_tower)


def _head(source: str, width: int) -> nn.Linear:
    """The head's file as one affine map of a unit embedding."""
    path = path_of(source, "aesthetic_predictor_v2_5.pth", reward="aesthetic_v25")
    module = nn.ModuleDict({"scoring_head": linears(width, (0, 2, 4, 6, 8))})
    head = affine(fill(module, tensors(path), path=path)["scoring_head"], width)
    warn_unpublished("aesthetic_v25", head, PUBLISHED, path)
    return head


REWARD = AestheticV25
