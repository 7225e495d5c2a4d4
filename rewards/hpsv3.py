"""HPSv3 (arXiv:2508.03789): a human preference score from Qwen2-VL-7B with a Gaussian head.

Reference: github.com/MizzenAI/HPSv3, `hpsv3/inference.py` and `hpsv3/model/qwen2vl_trainer.py`. The
network reads the picture at 200,704 pixels (sides of whole 28) and a long rubric with the prompt in
it; at the token <|Reward|> its last hidden state gives (mu, log sigma) of a normal distribution of
human preference. The reward is mu; evaluation shows "sigma" too. The rubric belongs to the model
and is read from a file. Departures are those of networks/vlm.py.
"""

from __future__ import annotations

from typing import Any

import pydantic
import torch
from torch import Tensor

from flowrl.rewards.core.pictures import rated
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.weights import path_of, template, tensors
from flowrl.rewards.networks import vlm
from flowrl.types import MediaContext

# hub name -> number of weights, without language head
NUMBERS = {"Qwen/Qwen2-VL-7B-Instruct": 7_746_378_240}
RUBRIC = "0393599dad45a971"  # first digits of the text's sha256
ORIGIN = (
    "the literal INSTRUCTION of hpsv3/dataset/data_collator_qwen.py in github.com/MizzenAI/HPSv3,"
    " with its empty first and last lines"
)


class Settings(vlm.Settings):
    weights: str = pydantic.Field(
        "MizzenAI/HPSv3",
        description="Weights: HPSv3.safetensors, its folder, or its hub repository.",
    )
    base: vlm.Tuned = "Qwen/Qwen2-VL-7B-Instruct"
    template: str | None = pydantic.Field(
        None, description=f"Text file with the model's rubric: {ORIGIN}."
    )


class HPSv3(Reward):
    """Mean of HPSv3's preference distribution, about -5 to 13; for a video, the mean over
    frames."""

    Settings = Settings
    name = "hpsv3"
    networks = NUMBERS
    scale = "mean human preference (mu) by HPSv3, about -5 to 13"
    quality = True
    reads_prompt = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        rubric = template(s.template, sha256=RUBRIC, reward="hpsv3", origin=ORIGIN)
        self.rubric = rubric + vlm.SUFFIX
        path = path_of(s.weights, "HPSv3.safetensors", reward="hpsv3")
        state = tensors(path, under="model")
        self.head = vlm.ranknet(state, "rm_head.", path=path)
        own = vlm.backbone_state(state)
        self.vlm = vlm.load_vlm(s.base, own, dtype=s.dtype, path=path, reward="hpsv3")

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        return self._gaussian(media, prompts)[:, 0]

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        return {"sigma": self._gaussian(media, prompts)[:, 1]}

    def _gaussian(self, media: Tensor, prompts: list[str]) -> Tensor:
        """mu and sigma, (B, 2) fp32."""
        texts = [self.rubric.format(text_prompt=prompt) for prompt in prompts]

        def rate(frames: Tensor, rows: Tensor) -> Tensor:
            pictures = vlm.fitted(frames, by="pil" if self.settings.rounding else "float")
            visuals = [[picture] for picture in pictures.split(1)]
            found = self.head(self.vlm.hidden(visuals, [texts[i] for i in rows.tolist()])[:, 0])
            return torch.stack([found[:, 0], found[:, 1].exp()], 1)

        return rated(self, media, rate)


REWARD = HPSv3
