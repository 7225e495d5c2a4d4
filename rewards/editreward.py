"""EditReward (arXiv:2509.26346): how well an instruction was carried out on a picture.

The network is MiMo-VL-7B or Qwen2.5-VL-7B. Reference: github.com/TIGER-AI-Lab/EditReward,
`EditReward/inference_edit.py` and `EditReward/model/qwen2_5_vl_trainer.py` (both released
checkpoints are `ranknet_multi_head` with mean pooling). Source and edited picture, 200,704 pixels
each, pass the network twice: once under a rubric for following the instruction, once under one for
visual quality. Each pass has its own head, which gives (mu, log sigma) at the token <|Reward|>; the
pairs are averaged and the reward is the mean mu. The rubrics belong to the model and are read from
files. Departures are those of networks/vlm.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor, nn

from flowrl.rewards.core.pictures import in_chunks, refuse_gradient
from flowrl.rewards.core.source import Settings as SourceSettings
from flowrl.rewards.core.source import Sourced
from flowrl.rewards.core.weights import path_of, template, tensors
from flowrl.rewards.networks import vlm
from flowrl.types import MediaContext

NUMBERS = {  # hub name -> number of weights, without language head
    "XiaomiMiMo/MiMo-VL-7B-SFT-2508": 7_680_509_952,
    "Qwen/Qwen2.5-VL-7B-Instruct": 7_747_169_280,
}
# First digits of the sha256 of the texts, in the order of head_0 and head_1.
RUBRICS = {"following": "da5bfc26898cc8e0", "quality": "89bbc5c2ac1bbea9"}
WHERE = (
    "of EditReward/dataset/prompts.py in github.com/TIGER-AI-Lab/EditReward, with its empty first"
    " line and last line feed"
)
ORIGINS = {key: f"the literal INSTRUCTION_EDIT_{key.upper()} {WHERE}" for key in RUBRICS}


class Settings(SourceSettings, vlm.Settings):
    weights: str = pydantic.Field(
        "TIGER-Lab/EditReward-MiMo-VL-7B-SFT-2508",
        description="Folder with model.pth or model.safetensors, or its hub repository.",
    )
    base: vlm.Tuned = "XiaomiMiMo/MiMo-VL-7B-SFT-2508"
    following: str | None = pydantic.Field(
        None, description=f"Text file with the first head's rubric: {ORIGINS['following']}."
    )
    quality: str | None = pydantic.Field(
        None, description=f"Text file with the second head's rubric: {ORIGINS['quality']}."
    )


class EditReward(Sourced):
    """Mean of two preference distributions, unbounded.

    It needs the picture before the edit; the prompt is the instruction.
    """

    Settings = Settings
    name = "editreward"
    networks = NUMBERS
    scale = "mean (mu) of following the instruction and of visual quality by EditReward, unbounded"
    quality = True
    reads_prompt = True
    video = "no"

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        self.declare_source(True)
        self.rubrics = [_rubric(key, getattr(s, key)) for key in RUBRICS]
        path = _checkpoint(path_of(s.weights, reward="editreward"))
        state = tensors(path, under="model")
        names = [f"rm_heads.head_{i}." for i in range(len(RUBRICS))]
        self.heads = nn.ModuleList([vlm.ranknet(state, name, path=path) for name in names])
        own = vlm.backbone_state(state)
        self.vlm = vlm.load_vlm(s.base, own, dtype=s.dtype, path=path, reward="editreward")

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        return self._heads(media, prompts, context).mean(0)[:, 0]

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        heads = self._heads(media, prompts, context)
        sigma = heads.mean(0)[:, 1].exp()
        return {**{key: heads[i, :, 0] for i, key in enumerate(RUBRICS)}, "sigma": sigma}

    def _heads(self, media: Tensor, prompts: list[str], context: MediaContext | None) -> Tensor:
        """mu and log sigma of each head, (heads, B, 2) fp32."""
        refuse_gradient(self, media)
        sources = self.sources(media, context)
        read = in_chunks(self._read, media, sources, prompts, chunk=self.settings.chunk)
        return read.transpose(0, 1)

    def _read(self, media: Tensor, sources: list[Tensor], prompts: list[str]) -> Tensor:
        """Read edited and source picture of each of n samples -> (n, heads, 2)."""
        by: Literal["pil", "float"] = "pil" if self.settings.rounding else "float"
        before = [vlm.fitted(source[None].to(media), by=by) for source in sources]
        pairs = list(zip(before, vlm.fitted(media, by=by).split(1), strict=True))
        out = []
        for rubric, head in zip(self.rubrics, self.heads, strict=True):
            texts = [rubric.format(text_prompt=prompt) + vlm.SUFFIX for prompt in prompts]
            out.append(head(self.vlm.hidden(pairs, texts)[:, 0]))
        return torch.stack(out, 1)


def _rubric(key: str, path: str | None) -> str:
    origin = ORIGINS[key]
    return template(path, sha256=RUBRICS[key], reward="editreward", setting=key, origin=origin)


def _checkpoint(path: Path) -> Path:
    for file in (path, path / "model.pth", path / "model.safetensors"):
        if file.is_file():
            return file
    raise ValueError(
        f"reward.editreward.weights={path}: the folder holds neither model.pth nor"
        " model.safetensors"
    )


REWARD = EditReward
