"""PickScore (Pick-a-Pic, arXiv:2305.01569).

A CLIP ViT-H/14 tuned on half a million choices between two pictures of a prompt. With score =
exp(logit_scale) * cos(picture, prompt) and a temperature of 100, scores are 18 to 24; the first of
two pictures of a prompt is preferred with probability sigmoid(score_1 - score_2). Reference:
github.com/yuvalkirstain/PickScore; peers differ in the scale only.

Departures: prompts are padded to 77 tokens and not to the longest of the batch, which leaves an
embedding as it is, since CLIP's text tower looks backwards only. The network is fp32 (no peer casts
it). With rounding=False the resize is torchvision's on floats instead of PIL's on bytes (57 dB
apart on a photo), and a gradient passes.
"""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from torch import Tensor

from flowrl.rewards.core.pictures import cropped, normalized, pil_cropped
from flowrl.rewards.core.settings import PictureSettings
from flowrl.rewards.networks.clip import HubClip, TwoTowers

SCALES = {
    "raw": "exp(logit_scale) * cosine, about 18 to 24",
    "flow_grpo": "PickScore / 26, about 0.7 to 0.92 (Flow-GRPO, DiffusionNFT, Flow-Factory)",
    "mix_grpo": "(PickScore - 18) / 8, about 0 to 0.75 (MixGRPO)",
    "cosine": "cosine of image and prompt embeddings, about 0.18 to 0.24 (DanceGRPO, Pref-GRPO)",
}
NUMBERS = {"yuvalkirstain/PickScore_v1": 986_109_441}  # hub name -> number of weights (CLIP-H)
# scale -> (first, second) of (score - first) / second
AFFINE = {"raw": (0.0, 1.0), "flow_grpo": (0.0, 26.0), "mix_grpo": (18.0, 8.0)}


class Settings(PictureSettings):
    scale: Literal["raw", "flow_grpo", "mix_grpo", "cosine"] = pydantic.Field(
        "raw",
        description=(
            "Scale of the score: exp(logit_scale) * cosine (raw), that over 26 (flow_grpo), (score"
            " - 18) / 8 (mix_grpo), or the bare cosine (cosine)."
        ),
    )
    weights: str = pydantic.Field(
        "yuvalkirstain/PickScore_v1",
        description="A folder with the CLIP model, or its name on the hub.",
    )
    tokenizer: str = pydantic.Field(
        "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        description="A folder with the CLIP tokenizer, or its name on the hub.",
    )


class PickScore(TwoTowers):
    """exp(logit_scale) * cosine of picture and prompt, 18 to 24; for a video, the mean over its
    frames."""

    Settings = Settings
    name = "pickscore"
    networks = NUMBERS
    scale = SCALES["raw"]
    quality = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        self.towers = HubClip(s.weights, reward="pickscore", tokenizer=s.tokenizer)
        self.scale = SCALES[s.scale]
        self.range = (-1.0, 1.0) if s.scale == "cosine" else None

    def pixels(self, frames: Tensor) -> Tensor:
        resize = pil_cropped if self.settings.rounding else cropped
        return normalized(resize(frames, self.towers.side[0], floor=True))

    def value(self, cosine: Tensor) -> Tensor:
        if self.settings.scale == "cosine":
            return cosine
        zero, unit = AFFINE[self.settings.scale]
        return (self.towers.model.logit_scale.exp() * cosine - zero) / unit


REWARD = PickScore
