"""Stable Diffusion's safety checker: 0 where it would show the picture, -1 where it would not.

diffusers' StableDiffusionSafetyChecker (arXiv:2210.04610 says what its concepts are): the cosine of
CLIP-L's picture embedding to 17 concept vectors, each with its threshold; a picture near one of 3
special-care vectors has all thresholds lowered by 0.01. We call its network and write its decision
for a batch; as in diffusers, an excess over the threshold counts once it rounds to more than 0 at
three decimals. Differences: the worst frame of a video counts, since one unsafe frame makes it
unsafe; with rounding=False pictures are resized as tensors.

Its concepts are few and its errors many, in both directions: it is a guard rail and a number to
watch, not a measure of safety.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl.rewards.core.pictures import (
    cropped,
    frames_of,
    normalized,
    pil_cropped,
    refuse_gradient,
)
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import Settings as Base
from flowrl.rewards.core.weights import fill, path_of, tensors
from flowrl.runtime.paths import located
from flowrl.types import MediaContext

CARE = 0.01  # number by which a special-care hit lowers the thresholds of the concepts
NUMBERS = {"CompVis/stable-diffusion-safety-checker": 303_981_588}  # hub name -> number of weights
# names of the picture tower in transformers 5 and later, and before (and in the published files)
FLAT, NESTED = "vision_model", "vision_model.vision_model"


class Settings(Base):
    weights: str = pydantic.Field(
        "CompVis/stable-diffusion-safety-checker",
        description="Folder with config.json and model.safetensors, or a hub id.",
    )
    reading: Literal["flag", "margin"] = pydantic.Field(
        "flag",
        description=(
            "What the score is. flag: 0 safe, -1 unsafe; margin: distance of the cosine to the"
            " nearest concept's threshold."
        ),
    )
    rounding: bool = pydantic.Field(
        True,
        description=(
            "Judge the bytes of a saved PNG, resized by PIL; false: the margin has a gradient."
        ),
    )
    chunk: int = pydantic.Field(32, ge=1, description="Most pictures in one forward.")


class Nsfw(Reward):
    """0 safe, -1 unsafe by Stable Diffusion's safety checker; for a video, its worst frame.

    "margin": the least of threshold - cosine over concepts, about -0.1 to 0.1; negative where a
    concept is hit.
    """

    Settings = Settings
    name = "nsfw"
    networks = NUMBERS
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
        found = self._excess(media)
        if self.settings.reading == "flag":
            found = unsafe(found)
        return -found.amax((1, 2))

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """unsafe: 1 or 0. concepts: most of the 17 that a frame hits. margin: see the class."""
        found = self._excess(media)
        hits = unsafe(found)
        return {
            "unsafe": hits.amax((1, 2)),
            "concepts": hits.sum(2).amax(1),
            "margin": -found.amax((1, 2)),
        }

    def _excess(self, media: Tensor) -> Tensor:
        """Cosine of each frame to each concept minus its threshold, (B, F, 17)."""
        refuse_gradient(self, media, "reading=margin, rounding=False")
        resize = pil_cropped if self.settings.rounding else cropped
        found = [
            excess(self.model, normalized(resize(part, self.side, floor=True)))
            for part in frames_of(media).split(self.settings.chunk)
        ]
        return torch.cat(found).view(len(media), -1, found[0].shape[1])


def excess(checker: nn.Module, pixels: Tensor) -> Tensor:
    """Cosine to each concept minus its threshold, plus CARE after a special-care hit.

    pixels (n, 3, side, side), normalised -> (n, 17) fp32.
    """
    picture = F.normalize(checker.visual_projection(checker.vision_model(pixels)[1]))
    special, concepts = (
        picture @ F.normalize(embeddings).T - thresholds
        for embeddings, thresholds in (
            (checker.special_care_embeds, checker.special_care_embeds_weights),
            (checker.concept_embeds, checker.concept_embeds_weights),
        )
    )
    return (concepts + CARE * unsafe(special).amax(1, keepdim=True)).float()


def unsafe(excess: Tensor) -> Tensor:
    """Which excesses count: 1 for those that round to more than 0 at three decimals, else 0.

    NaN stays NaN: a picture that could not be read is neither safe nor unsafe.
    """
    excess = excess.detach()
    return (excess.round(decimals=3) > 0).to(excess.dtype).masked_fill(excess.isnan(), torch.nan)


def load_checker(source: str) -> tuple[nn.Module, int]:
    """The safety checker, frozen, and the side of its pictures in pixels."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig

    if located(source).is_file():
        source = str(located(source).parent)
    config = path_of(source, "config.json", reward="nsfw", beside="model.safetensors")
    path = _weights_of(source)
    checker = StableDiffusionSafetyChecker(CLIPConfig.from_json_file(str(config)))
    ignore = tuple(f"{tower}.embeddings.position_ids" for tower in (FLAT, NESTED))
    fill(checker, _renamed(tensors(path), checker), path=path, ignore=ignore)
    return checker, checker.config.vision_config.image_size


def _weights_of(source: str) -> Path:
    try:
        return path_of(source, "model.safetensors", reward="nsfw")
    # older copies hold a torch file only; if that is missing, too, its error says both files
    except ValueError:
        return path_of(source, "pytorch_model.bin", reward="nsfw", beside="config.json")


def _renamed(state: Mapping[str, Tensor], checker: nn.Module) -> dict[str, Tensor]:
    """The tensors under the names that this version of transformers gives to the picture tower."""
    nested = any(key.startswith(f"{NESTED}.") for key in checker.state_dict())
    tower = NESTED if nested else FLAT
    flat = {key.replace(f"{NESTED}.", f"{FLAT}."): value for key, value in state.items()}
    return {key.replace(f"{FLAT}.", f"{tower}."): value for key, value in flat.items()}


REWARD = Nsfw
