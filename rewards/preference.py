"""A Bradley-Terry head on CLIP features: one score for each aspect, as in VisionPrefer.

VisionPrefer is arXiv:2404.15100. scripts/embedded/train_preference.py trains a head on pairs.
Without settings it is the head of the shapes world, trained on synthetic preferences, and nothing
is fetched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pydantic
import torch
from torch import Tensor

from flowrl.rewards.core.pictures import frames_of, mean_of_frames, refuse_gradient
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import PictureSettings
from flowrl.rewards.core.weights import path_of
from flowrl.rewards.networks.bradley_terry import (
    EMBEDDED,
    Backbone,
    backbone_bytes,
    load_head,
)
from flowrl.runtime.paths import located
from flowrl.runtime.registry import did_you_mean
from flowrl.types import MediaContext


class Settings(PictureSettings):
    weights: str | None = pydantic.Field(
        None,
        description=(
            "Folder (or hub repository) of a head, config.json and head.safetensors; null: the head"
            " of the shapes world."
        ),
    )
    aspect: str | dict[str, float] | None = pydantic.Field(
        None,
        description=(
            "Aspect that is the score, or aspect -> weight for several; null: the mean over all"
            " aspects."
        ),
    )
    backbone: str | None = pydantic.Field(
        None,
        description=(
            "Another place of the CLIP that the head names, given as clip.model is; it must be the"
            " same network."
        ),
    )
    pretrained: str | None = pydantic.Field(
        None, description="Weights of that backbone, given as clip.pretrained is; null: its own."
    )


class Preference(Reward):
    """Log-odds: sigmoid(score(a) - score(b)) is the probability that a is preferred to b.

    The score of a video is the mean over its frames. The zero is arbitrary, and scores of different
    prompts cannot be compared in general.
    """

    Settings = Settings
    name = "preference"
    scale = "log-odds: the sigmoid of a difference is the probability of being preferred"
    quality = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        folder = path_of(s.weights, reward="preference") if s.weights else EMBEDDED
        self.head, self.config = load_head(folder)
        self.weights = self._weights_of(s.aspect)
        self.backbone = self._load_backbone()
        self.reads_prompt = self.config.features != ["image"]

    @classmethod
    def network_bytes(cls, settings: Any) -> float | None:
        folder = located(settings.weights) if settings.weights else EMBEDDED
        if settings.backbone is None and not folder.is_dir():
            return None  # the head says which CLIP it reads
        return backbone_bytes(settings.backbone or load_head(folder)[1].model)

    def _load_backbone(self) -> Backbone:
        """The CLIP of the settings, else that of the head; one that does not fit -> ValueError."""
        s, trained = self.settings, (self.config.model, self.config.pretrained)
        if s.pretrained and not s.backbone:
            raise ValueError(
                f"reward.preference.pretrained={s.pretrained} goes with reward.preference.backbone,"
                " which is not set"
            )
        model, pretrained = (s.backbone, s.pretrained) if s.backbone else trained
        backbone = Backbone(model, pretrained, rounding=s.rounding, chunk=s.chunk)
        if backbone.width != self.config.width:
            raise ValueError(
                f'the CLIP "{model}" embeds into {backbone.width} numbers, and the head of'
                f" {s.weights or 'the shapes world'} reads {self.config.width}: it was trained on"
                f" {' '.join(filter(None, trained))}"
            )
        return backbone

    def inner_rewards(self) -> list[Reward]:
        return [self.backbone]

    def expect(self, prompts: Sequence[str]) -> None:
        if self.reads_prompt:
            self.backbone.expect(prompts)

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        parts = self.parts(media, prompts, context)
        return torch.stack([weight * parts[name] for name, weight in self.weights.items()]).sum(0)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """Every aspect of the head, whatever the settings ask for: name -> (B,) log-odds."""
        refuse_gradient(self, media)
        image = self.backbone.pictures(frames_of(media))
        if self.reads_prompt:
            text = self.backbone.prompts(prompts, media.device)
            text = text.repeat_interleave(len(image) // len(prompts), 0)  # one row for each frame
        else:
            text = torch.zeros_like(image)
        scores = self.head(self.head.inputs(image, text))
        names = self.config.aspects
        return {name: mean_of_frames(scores[:, i], media) for i, name in enumerate(names)}

    def _weights_of(self, aspect: str | dict[str, float] | None) -> dict[str, float]:
        """The weight of each aspect of the head that counts."""
        names = self.config.aspects
        if aspect is None:
            return dict.fromkeys(names, 1 / len(names))
        weights = {aspect: 1.0} if isinstance(aspect, str) else aspect
        for name, weight in weights.items():
            _check_weight(name, weight, names)
        if not weights:
            raise ValueError(
                f"reward.preference.aspect is empty; give one of {', '.join(names)}, or a weight"
                " for some of them"
            )
        return weights


def _check_weight(name: str, weight: float, names: Sequence[str]) -> None:
    if name not in names:
        raise ValueError(
            f'reward.preference.aspect: the head has no aspect "{name}"{did_you_mean(name, names)}'
        )
    if not math.isfinite(weight):
        raise ValueError(f"reward.preference.aspect.{name}={weight} is not a finite number")


REWARD = Preference
