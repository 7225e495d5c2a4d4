"""VideoAlign's VideoReward (arXiv:2501.13918): visual quality, motion quality and text alignment of
a video, from Qwen2-VL-2B with LoRA.

Reference: github.com/KwaiVGI/VideoAlign, `inference.py`, `trainer.py`, `vision_process.py`,
`utils.py`. Frames sampled at 2 a second pass the network with a rubric that holds three tokens, one
an aspect; a linear head without bias gives a number at each, which is z-scored with constants from
the checkpoint's model_config.json. "Overall" is the sum of the three. The rubric belongs to the
model and is read from a file.

Frames are resized as the reference does (bytes, torchvision's bicubic, an area between 128 * 28 *
28 and 448 * 448), but come from tensors: the reference's peers go through an mp4 file, whose losses
are not repeated here. The head runs in fp32 on the network's bf16 states; the reference's bf16 head
rounds a score of 3 to steps of 1/64. The other departures are those of `_vlm`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor, nn

from flowrl.rewards.core import pictures
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.weights import fill, path_of, template, tensors
from flowrl.rewards.networks import vlm as networks_vlm
from flowrl.types import MediaContext

DIMS = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{dim}_reward|>" for dim in DIMS)
RUBRIC = "fdb6309bac618dd0"
ORIGIN = (
    "the literal DETAILED_PROMPT_WITH_SPECIAL_TOKEN of prompt_template.py in"
    " github.com/KwaiVGI/VideoAlign, with its empty first line"
)
Z_SCORE = {
    "VQ_mean": 3.6757,
    "VQ_std": 2.2476,
    "MQ_mean": 1.1646,
    "MQ_std": 1.3811,
    "TA_mean": 2.8105,
    "TA_std": 2.5121,
}
LOW = 128 * 28 * 28  # smallest area of a frame, vision_process.py's VIDEO_MIN_PIXELS


class Settings(networks_vlm.Settings):
    weights: str = pydantic.Field(
        "KwaiVGI/VideoReward",
        description="Folder with model_config.json and checkpoint-*, or its hub repository.",
    )
    base: str = pydantic.Field(
        "Qwen/Qwen2-VL-2B-Instruct",
        description=(
            "Configuration, tokenizer and chat template of the tuned model; no weights of it."
        ),
    )
    template: str | None = pydantic.Field(
        None, description=f"Text file with the model's rubric: {ORIGIN}."
    )
    dims: tuple[Literal["VQ", "MQ", "TA"], ...] = pydantic.Field(
        DIMS, min_length=1, description="Aspects whose sum is the reward."
    )
    z_score: bool = pydantic.Field(
        True,
        description=(
            "Subtract each aspect's mean over the reference's videos and divide by its deviation."
        ),
    )
    clip_fps: float = pydantic.Field(
        16.0, gt=0, description="Frames a second of the videos that are scored."
    )
    fps: float | None = pydantic.Field(
        None, gt=0, description="Frames a second that the network sees; null: the checkpoint's (2)."
    )
    max_pixels: int | None = pydantic.Field(
        None, ge=LOW, description="Largest area of a frame; null: the checkpoint's (200704)."
    )
    chunk: int = pydantic.Field(2, ge=1, description="Most videos in one forward.")


class VideoAlign(Reward):
    """Sum of z-scored visual quality, motion quality and text alignment; 0 is the average of the
    reference's videos."""

    Settings = Settings
    name = "videoalign"
    scale = (
        "sum of z-scored visual quality, motion quality and text alignment by VideoReward; 0 is"
        " average"
    )
    quality = True
    reads_prompt = True
    video = "only"

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        self.rubric = template(s.template, sha256=RUBRIC, reward="videoalign", origin=ORIGIN)
        folder = path_of(s.weights, reward="videoalign")
        config, path = _checkpoint(folder)
        state = {
            key.removeprefix("base_model.model."): value for key, value in tensors(path).items()
        }
        self.vlm = _load(s, state, config.get("peft_lora_config", {}), path)
        head = state.get("rm_head.weight", torch.empty(0, 0))
        if head.shape[0] not in (1, 3):
            raise ValueError(
                f"{path} holds no head rm_head.weight with 1 or 3 rows (shape: {tuple(head.shape)})"
            )
        self.head = fill(
            nn.Linear(*head.shape[::-1], bias=False), {"weight": head.float()}, path=path
        )
        data, constants = (
            config.get("data_config", {}),
            Z_SCORE | (config.get("inference_config") or {}),
        )
        self.fps, self.max_pixels = (
            s.fps or data.get("fps", 2.0),
            s.max_pixels or data.get("max_frame_pixels", networks_vlm.PIXELS),
        )
        self.constants = torch.tensor(
            [[constants[f"{dim}_{which}"] for dim in DIMS] for which in ("mean", "std")]
        )
        self.scale = (
            f"sum of {'z-scored' if s.z_score else 'raw'} {', '.join(s.dims)} by VideoReward"
        )
        self.differentiable = not s.rounding

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        return self._aspects(media, prompts)[
            :, [DIMS.index(dim) for dim in self.settings.dims]
        ].sum(1)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        return dict(zip(DIMS, self._aspects(media, prompts).unbind(1), strict=True))

    def _aspects(self, media: Tensor, prompts: list[str]) -> Tensor:
        """(B, 3) fp32: VQ, MQ, TA, z-scored unless the settings say otherwise."""
        pictures.refuse_gradient(self, media)
        frames = media[:, sampled(media.shape[1], self.settings.clip_fps, self.fps)]
        out = []
        for start in range(0, len(media), self.settings.chunk):
            rows = slice(start, start + self.settings.chunk)
            videos = [
                [
                    networks_vlm.fitted(
                        video,
                        low=LOW,
                        high=self.max_pixels,
                        by="bytes" if self.settings.rounding else "float",
                    )
                ]
                for video in frames[rows]
            ]
            states = self.vlm.hidden(
                videos,
                [self.rubric.format(text_prompt=prompt) for prompt in prompts[rows]],
                kind="video",
            )
            values = self.head(states)  # (n, 3, k): a head of three rows has one for each token
            out.append(values[..., 0] if values.shape[-1] == 1 else values.diagonal(dim1=1, dim2=2))
        mean, std = self.constants.to(media.device) if self.settings.z_score else (0.0, 1.0)
        return (torch.cat(out) - mean) / std


def sampled(count: int, clip_fps: float, fps: float) -> list[int]:
    """Which of `count` frames the network sees: evenly spread with both ends, an even number of
    them, at least 4 where there are 4.

    As `smart_nframes` of the reference (qwen-vl-utils), whose largest number is 768.
    """
    if count < 2:
        raise ValueError(f"videoalign needs at least 2 frames, and the video has {count}")
    most = min(768, count) // 2 * 2
    number = round(min(max(count / clip_fps * fps, 4), most) / 2) * 2
    return torch.linspace(0, count - 1, number).round().long().tolist()


def _checkpoint(folder: Path) -> tuple[dict[str, Any], Path]:
    """model_config.json and the weights of the last checkpoint of a folder laid out as
    KwaiVGI/VideoReward."""
    found = {
        int(path.name.rpartition("-")[2]): path
        for path in folder.glob("checkpoint-*")
        if path.name.rpartition("-")[2].isdigit()
    }
    files = (
        [found[max(found)] / name for name in ("model.pth", "model.safetensors")] if found else []
    )
    files = [file for file in files if file.is_file()]
    if not files or not (folder / "model_config.json").is_file():
        raise ValueError(
            f"reward.videoalign.weights={folder}: expected model_config.json and"
            " checkpoint-<step>/model.pth in it"
        )
    return json.loads((folder / "model_config.json").read_text()), files[0]


def _load(
    s: Settings, state: Mapping[str, Tensor], lora: Mapping[str, Any], path: Path
) -> networks_vlm.Vlm:
    """The network with its LoRA beside the base weights, not merged: bf16 would round a small
    difference away."""
    from peft import LoraConfig, inject_adapter_in_model

    own = networks_vlm.backbone_state(state)
    plain = {
        key.replace(".base_layer.", "."): value for key, value in own.items() if ".lora_" not in key
    }
    vlm = networks_vlm.load_vlm(
        s.base, plain, tokens=TOKENS, dtype=s.dtype, path=path, reward="videoalign"
    )
    targets = [
        key.removesuffix(".lora_A.default.weight")
        for key in own
        if key.endswith(".lora_A.default.weight")
    ]
    if not targets:
        return vlm
    rank = lora.get("lora_r", 64)
    config = LoraConfig(
        r=rank,
        lora_alpha=lora.get("lora_alpha", 2 * rank),
        use_rslora=lora.get("use_rslora", False),
        target_modules=targets,
    )
    inject_adapter_in_model(config, vlm.backbone)
    fill(vlm.backbone.to(networks_vlm.DTYPES[s.dtype]), own, path=path)
    return vlm


REWARD = VideoAlign
