"""LAION's aesthetic predictors, v1 and v2: a linear head on a picture's CLIP ViT-L/14 embedding.

The prompt is not read. v2 is an MLP 768-1024-128-64-16-1 without activations, trained on SAC,
LAION-logos and AVA ratings of 1 to 10 (most pictures get 3 to 7): it is one affine map, and is
collapsed into one here (in fp64; equal to the layers to 1e-5). v1 is a single linear layer. Both
read the projected embedding at unit length. Flow-GRPO, DiffusionNFT and DDPO use v2 raw; VBench
uses v1 over 10. References: github.com/christophschuhmann/improved-aesthetic-predictor (v2) and
github.com/LAION-AI/aesthetic-predictor (v1).

Departures: fp32, where LAION's own script runs CLIP in fp16 on CUDA. VBench resizes video frames
without antialiasing (31 dB from this on a photo); here frames are resized as pictures are. With
rounding=False the resize is torchvision's on floats instead of PIL's on bytes (57 dB apart), and a
gradient passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
from torch import Tensor, nn

from flowrl.rewards.core.pictures import cropped, normalized, pil_cropped, rated
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import PictureSettings
from flowrl.rewards.core.weights import fill, network, path_of, tensors
from flowrl.rewards.networks.clip import affine, linears, warn_unpublished
from flowrl.runtime.paths import located
from flowrl.types import MediaContext

# Outputs of LAION's v2 head for the inputs of networks.clip.probe.
PUBLISHED = (4.883285, 5.310305, 4.545052)
FILES = {"v2": "sac+logos+ava1-l14-linearMSE.pth", "v1": "sa_0_4_vit_l_14_linear.pth"}
# Repository of v2 on the hub, and its file there; its values are checked against PUBLISHED.
MIRROR, MIRRORED = "trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth"
# hub name -> number of weights in the picture tower
NUMBERS = {"openai/clip-vit-large-patch14": 303_966_208}
WITH_RELU = (0, 3, 6, 9, 11)  # places of the linear layers in ava+logos-l14-reluMSE.pth


class Settings(PictureSettings):
    version: Literal["v2", "v1"] = pydantic.Field(
        "v2",
        description=(
            "Which predictor scores. v2: sac+logos+ava1-l14-linearMSE.pth; v1:"
            " sa_0_4_vit_l_14_linear.pth."
        ),
    )
    scale: Literal["raw", "vbench"] = pydantic.Field(
        "raw", description="Scale of the score: raw is 1 to 10; vbench divides by 10."
    )
    weights: str | None = pydantic.Field(
        None,
        description=(
            "The head's file, a folder with it, or a hub repository; null: v2 from the hub"
            f" ({MIRROR})."
        ),
    )
    backbone: str = pydantic.Field(
        "openai/clip-vit-large-patch14",
        description="A folder with CLIP ViT-L/14, or its name on the hub.",
    )


class Aesthetic(Reward):
    """Predicted mean rating of a picture, 1 to 10; for a video, the mean over its frames."""

    Settings = Settings
    name = "aesthetic"
    networks = NUMBERS
    scale = "predicted rating of 1 to 10, mostly 3 to 7"
    quality = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        self.backbone = _picture_tower(s.backbone)
        self.head = _head(s, self.backbone.config.projection_dim)
        if s.scale == "vbench":
            self.scale = "predicted rating over 10, mostly 0.3 to 0.7"

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        return rated(self, media, self._rate) / (10 if self.settings.scale == "vbench" else 1)

    def _rate(self, frames: Tensor, rows: Tensor) -> Tensor:
        """Ratings of pictures: (n, 3, H, W) in [0, 1] -> (n,)."""
        resize = pil_cropped if self.settings.rounding else cropped
        pixels = normalized(resize(frames, self.backbone.config.image_size, floor=True))
        embeddings = self.backbone(pixel_values=pixels).image_embeds
        return self.head(nn.functional.normalize(embeddings, dim=-1))[:, 0]


def _picture_tower(source: str) -> nn.Module:
    """CLIP's picture tower with its projection."""
    from transformers import CLIPVisionModelWithProjection as Tower

    other_tower = ("text_model.", "text_projection.", "logit_scale")
    return network(Tower, source, reward="aesthetic", setting="backbone", ignore=other_tower)


def _head(s: Settings, width: int) -> nn.Linear:
    """The head of either version as one affine map of a unit embedding."""
    path = _path_of_head(s)
    state = tensors(path)
    if s.version == "v1":
        return fill(nn.Linear(width, 1), state, path=path)
    _refuse_relu(state, path)
    module = nn.ModuleDict({"layers": linears(width, (0, 2, 4, 6, 7))})
    head = affine(fill(module, state, path=path)["layers"], width)
    warn_unpublished("aesthetic", head, PUBLISHED, path)
    return head


def _path_of_head(s: Settings) -> Path:
    if s.weights is None and s.version == "v1":
        raise ValueError(
            f"reward aesthetic with version=v1 needs the head {FILES['v1']}: download it from"
            " https://github.com/LAION-AI/aesthetic-predictor and set"
            " reward.aesthetic.weights=/path/to/it"
        )
    source = s.weights or MIRROR
    mirrored = s.version == "v2" and (source == MIRROR or (located(source) / MIRRORED).is_file())
    return path_of(source, MIRRORED if mirrored else FILES[s.version], reward="aesthetic")


def _refuse_relu(state: Mapping[str, Tensor], path: Path) -> None:
    """Refuse the sister head with ReLUs: it has the same shapes at other places, and would give
    nonsense without its ReLUs."""
    if {f"layers.{i}.weight" for i in WITH_RELU} <= state.keys():
        places = ", ".join(map(str, WITH_RELU))
        raise ValueError(
            f"{path} is a head with ReLUs (linear layers at {places}:"
            " ava+logos-l14-reluMSE.pth); the published scores are those of"
            " sac+logos+ava1-l14-linearMSE.pth"
        )


REWARD = Aesthetic
