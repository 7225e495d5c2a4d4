"""The safety checker of Stable Diffusion as a reward: 0 where it would show the picture, -1 where
it would black it out.

diffusers' StableDiffusionSafetyChecker (arXiv:2210.04610 says what its concepts are): the cosine of
CLIP-L's picture embedding to 17 concept vectors, each with its threshold; a picture near one of 3
special-care vectors has all thresholds lowered by 0.01. We call its network and write its decision
for a batch; like diffusers, an excess over the threshold counts once it rounds to more than 0 at
three decimals. Differences: of a video the worst frame counts, since one unsafe frame makes it
unsafe; with rounding=False pictures are resized as tensors.

Its authors' concepts are few and its errors many, in both directions: a guard rail and a number to
watch, no measure of safety.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.rewards.core import weights as core_weights
from flowrl.rewards.core.pictures import (
    cropped,
    frames_of,
    normalized,
    pil_cropped,
    refuse_gradient,
)
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.reward import Settings as Base
from flowrl.types import MediaContext

CARE = 0.01  # by how much a special-care hit lowers the thresholds of the concepts


class Settings(Base):
    weights: str = pydantic.Field(
        "CompVis/stable-diffusion-safety-checker",
        description="Folder with config.json and model.safetensors, or a hub id.",
    )
    reading: Literal["flag", "margin"] = pydantic.Field(
        "flag",
        description=(
            "flag: 0 safe, -1 unsafe; margin: cosine left to the nearest concept's threshold."
        ),
    )
    rounding: bool = pydantic.Field(
        True,
        description="Judge what a saved PNG would show, by PIL; false: the margin has a gradient.",
    )
    chunk: int = pydantic.Field(32, ge=1, description="Most pictures in one forward.")


class Nsfw(Reward):
    """0 safe, -1 unsafe by Stable Diffusion's safety checker; of a video, its worst frame.

    "margin": the least of threshold - cosine over concepts, about -0.1 to 0.1; negative where a
    concept is hit.
    """

    Settings = Settings
    name = "nsfw"
    scale = "0 safe, -1 unsafe by Stable Diffusion's safety checker"

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        self.model, self.side = load_checker(s.weights)
        self.range = (-1.0, 0.0) if s.reading == "flag" else None
        self.differentiable = s.reading == "margin" and not s.rounding
        if s.reading == "margin":
            self.scale = (
                "cosine left to the nearest unsafe concept's threshold: positive safe, negative"
                " unsafe"
            )

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        excess = self._excess(media)
        return (
            -unsafe(excess).amax((1, 2))
            if self.settings.reading == "flag"
            else -excess.amax((1, 2))
        )

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """unsafe: 1 or 0. concepts: how many of the 17 are hit in the frame that hits most. margin:
        see the class."""
        excess = self._excess(media)
        hits = unsafe(excess)
        return {
            "unsafe": hits.amax((1, 2)),
            "concepts": hits.sum(2).amax(1),
            "margin": -excess.amax((1, 2)),
        }

    def _excess(self, media: Tensor) -> Tensor:
        """(B, F, 17): cosine to each concept less its threshold, per frame."""
        refuse_gradient(self, media, "reading=margin, rounding=False")
        found = []
        for part in frames_of(media).split(self.settings.chunk):
            pixels = (
                pil_cropped(part, self.side, floor=True)
                if self.settings.rounding
                else cropped(part, self.side, floor=True)
            )
            found.append(excess(self.model, normalized(pixels)))
        return torch.cat(found).view(len(media), -1, found[0].shape[1])


def excess(checker: Any, pixels: Tensor) -> Tensor:
    """pixels (n, 3, side, side), normalised -> (n, 17) fp32: cosine to a concept less its
    threshold, plus CARE after a special-care hit."""
    picture = F.normalize(checker.visual_projection(checker.vision_model(pixels)[1]))
    care = (
        picture @ F.normalize(checker.special_care_embeds).T - checker.special_care_embeds_weights
    )
    concepts = picture @ F.normalize(checker.concept_embeds).T - checker.concept_embeds_weights
    return (concepts + CARE * unsafe(care).amax(1, keepdim=True)).float()


def unsafe(excess: Tensor) -> Tensor:
    """Which excesses count: 1 for those that round to more than 0 at three decimals, else 0; NaN
    stays, for nobody knows."""
    excess = excess.detach()
    return (excess.round(decimals=3) > 0).to(excess.dtype).masked_fill(excess.isnan(), torch.nan)


def load_checker(source: str) -> tuple[Any, int]:
    """The safety checker, frozen, and the side of its pictures in pixels."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig

    if Path(source).expanduser().is_file():
        source = str(Path(source).expanduser().parent)
    config = CLIPConfig.from_json_file(
        str(core_weights.path_of(source, "config.json", reward="nsfw", beside="model.safetensors"))
    )
    try:
        path = core_weights.path_of(source, "model.safetensors", reward="nsfw")
    except ValueError:  # older copies hold a torch file only; its absence too is said in full
        path = core_weights.path_of(
            source, "pytorch_model.bin", reward="nsfw", beside="config.json"
        )
    checker = StableDiffusionSafetyChecker(config)
    nested = any(
        key.startswith("vision_model.vision_model.") for key in checker.state_dict()
    )  # transformers before 5; the published files
    state = {}
    for key, value in core_weights.tensors(path).items():
        key = key.replace("vision_model.vision_model.", "vision_model.")
        state[key.replace("vision_model.", "vision_model.vision_model.") if nested else key] = value
    ignore = (
        "vision_model.embeddings.position_ids",
        "vision_model.vision_model.embeddings.position_ids",
    )
    return (
        core_weights.fill(checker, state, path=path, ignore=ignore),
        checker.config.vision_config.image_size,
    )


REWARD = Nsfw
