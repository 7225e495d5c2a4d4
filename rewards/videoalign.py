"""VideoAlign's VideoReward (arXiv:2501.13918), Qwen2-VL-2B with LoRA.

It rates visual quality, motion quality and text alignment of a video. Reference:
github.com/KwaiVGI/VideoAlign, `inference.py`, `trainer.py`, `vision_process.py`, `utils.py`. Frames
sampled at 2 a second pass the network with a rubric that holds three tokens, one an aspect; a
linear head without bias gives a number at each, which is z-scored with constants from the
checkpoint's model_config.json. "Overall" is the sum of the three. The rubric belongs to the model
and is read from a file.

Frames are resized as the reference does (bytes, torchvision's bicubic, an area between 128 * 28 *
28 and 448 * 448), but come from tensors: the reference's peers go through an mp4 file, whose losses
are not repeated here. The head runs in fp32 on the network's bf16 states; the reference's bf16 head
rounds a score of 3 to steps of 1/64. The other departures are those of
`flowrl.rewards.networks.vlm`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor, nn

from flowrl.rewards.core.pictures import in_chunks, refuse_gradient
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.weights import fill, path_of, template, tensors
from flowrl.rewards.networks import vlm
from flowrl.types import MediaContext

# hub name -> number of weights, without language head and LoRA, whose rank the checkpoint states
NUMBERS = {"Qwen/Qwen2-VL-2B-Instruct": 2_208_985_600}
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


class Settings(vlm.Settings):
    weights: str = pydantic.Field(
        "KwaiVGI/VideoReward",
        description="Folder with model_config.json and checkpoint-*, or its hub repository.",
    )
    base: vlm.Tuned = "Qwen/Qwen2-VL-2B-Instruct"
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
    """Sum of z-scored visual quality, motion quality and text alignment.

    0 is the average of the reference's videos.
    """

    Settings = Settings
    name = "videoalign"
    networks = NUMBERS
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
        config, path = _checkpoint(path_of(s.weights, reward="videoalign"))
        found = tensors(path)
        state = {key.removeprefix("base_model.model."): value for key, value in found.items()}
        self.vlm = _load_vlm(s, state, config.get("peft_lora_config", {}), path)
        self.head = _load_head(state, path)
        data = config.get("data_config", {})
        self.fps = s.fps or data.get("fps", 2.0)
        self.max_pixels = s.max_pixels or data.get("max_frame_pixels", vlm.PIXELS)
        self.constants = _z_scores(config)
        kind = "z-scored" if s.z_score else "raw"
        self.scale = f"sum of {kind} {', '.join(s.dims)} by VideoReward"

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        columns = [DIMS.index(dim) for dim in self.settings.dims]
        return self._aspects(media, prompts)[:, columns].sum(1)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        return dict(zip(DIMS, self._aspects(media, prompts).unbind(1), strict=True))

    def _aspects(self, media: Tensor, prompts: list[str]) -> Tensor:
        """VQ, MQ and TA of each video, (B, 3) fp32, z-scored unless the settings say otherwise."""
        refuse_gradient(self, media)
        s = self.settings
        frames = media[:, sampled(media.shape[1], s.clip_fps, self.fps)]
        mean, std = self.constants.to(media.device) if s.z_score else (0.0, 1.0)
        return (in_chunks(self._raw, frames, prompts, chunk=s.chunk) - mean) / std

    def _raw(self, videos: Tensor, prompts: list[str]) -> Tensor:
        """Outputs of the head at the three tokens, (n, 3)."""
        by: Literal["bytes", "float"] = "bytes" if self.settings.rounding else "float"
        fitted = [[vlm.fitted(video, low=LOW, high=self.max_pixels, by=by)] for video in videos]
        texts = [self.rubric.format(text_prompt=prompt) for prompt in prompts]
        values = self.head(self.vlm.hidden(fitted, texts, kind="video"))  # (n, 3, k)
        if values.shape[-1] == 1:
            return values[..., 0]
        return values.diagonal(dim1=1, dim2=2)  # a head of three rows has one for each token


def sampled(count: int, clip_fps: float, fps: float) -> list[int]:
    """Which of `count` frames the network sees: evenly spread with both ends.

    Their number is even, and at least 4 where there are 4, as in `smart_nframes` of the reference
    (qwen-vl-utils), whose largest number is 768.
    """
    if count < 2:
        raise ValueError(f"videoalign needs at least 2 frames, and the video has {count}")
    most = min(768, count) // 2 * 2
    number = round(min(max(count / clip_fps * fps, 4), most) / 2) * 2
    return torch.linspace(0, count - 1, number).round().long().tolist()


def _checkpoint(folder: Path) -> tuple[dict[str, Any], Path]:
    """model_config.json and the weights of the last checkpoint, laid out as KwaiVGI/VideoReward."""
    config, last = folder / "model_config.json", _last_step(folder)
    files = [last / name for name in ("model.pth", "model.safetensors")] if last else []
    weights = next((file for file in files if file.is_file()), None)
    if weights is None or not config.is_file():
        raise ValueError(
            f"reward.videoalign.weights={folder}: expected model_config.json and"
            " checkpoint-<step>/model.pth in it"
        )
    return json.loads(config.read_text(encoding="utf-8")), weights


def _last_step(folder: Path) -> Path | None:
    """The checkpoint-<step> with the highest step; None: there are none."""
    steps = [path for path in folder.glob("checkpoint-*") if _step(path).isdigit()]
    return max(steps, key=lambda path: int(_step(path)), default=None)


def _step(path: Path) -> str:
    return path.name.rpartition("-")[2]


def _load_vlm(
    s: Settings, state: Mapping[str, Tensor], lora: Mapping[str, Any], path: Path
) -> vlm.Vlm:
    """The network with its LoRA beside the base weights.

    The LoRA is not merged: bf16 would round a small difference away.
    """
    own = vlm.backbone_state(state)
    plain = {
        key.replace(".base_layer.", "."): value for key, value in own.items() if ".lora_" not in key
    }
    network = vlm.load_vlm(
        s.base, plain, tokens=TOKENS, dtype=s.dtype, path=path, reward="videoalign"
    )
    end = ".lora_A.default.weight"
    targets = [key.removesuffix(end) for key in own if key.endswith(end)]
    if targets:
        _add_lora(network.backbone, targets, lora)
        fill(network.backbone.to(vlm.DTYPES[s.dtype]), own, path=path)
    return network


def _add_lora(backbone: nn.Module, targets: list[str], lora: Mapping[str, Any]) -> None:
    """Add LoRA layers to the backbone. lora: `peft_lora_config` of the checkpoint, which states
    rank and scale."""
    from peft import LoraConfig, inject_adapter_in_model

    rank = lora.get("lora_r", 64)
    config = LoraConfig(
        r=rank,
        lora_alpha=lora.get("lora_alpha", 2 * rank),
        use_rslora=lora.get("use_rslora", False),
        target_modules=targets,
    )
    inject_adapter_in_model(config, backbone)


def _load_head(state: Mapping[str, Tensor], path: Path) -> nn.Module:
    """The linear head without bias, in fp32."""
    head = state.get("rm_head.weight", torch.empty(0, 0))
    if head.shape[0] not in (1, 3):
        raise ValueError(
            f"{path} holds no head rm_head.weight with 1 or 3 rows (shape: {tuple(head.shape)})"
        )
    return fill(nn.Linear(*head.shape[::-1], bias=False), {"weight": head.float()}, path=path)


def _z_scores(config: Mapping[str, Any]) -> Tensor:
    """Mean and deviation of each aspect, (2, 3): the checkpoint's or else the published ones."""
    constants = Z_SCORE | (config.get("inference_config") or {})
    return torch.tensor(
        [[constants[f"{dim}_{which}"] for dim in DIMS] for which in ("mean", "std")]
    )


REWARD = VideoAlign
