"""CLIPScore: cosine between image and prompt under any open_clip model.

Published CLIP rewards differ in the picture's way to the network more than in the network, so the transform is a setting:
"tensor" follows the model's own preprocessing on float tensors (batched, differentiable), "pil" is that preprocessing itself, picture by
picture, "tv_bilinear" is DiffusionNFT's (torchvision's bilinear resize of the float tensor, centre crop).
"""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor

from flowrl.media import to_pil, to_uint8
from flowrl.registry import did_you_mean
from flowrl.rewards._base import Reward
from flowrl.rewards._base import Settings as Base
from flowrl.types import MediaContext


class Settings(Base):
    model: str = pydantic.Field("ViT-B-32", description='An open_clip model name, "hf-hub:owner/repo" or "local-dir:/path".')
    pretrained: str | None = pydantic.Field(
        "laion2b_s34b_b79k", description="Weights: an open_clip tag or a file; null: random weights, for shape tests only."
    )
    transform: Literal["tensor", "pil", "tv_bilinear"] = pydantic.Field("tensor", description="How pictures reach the network.")
    rounding: bool = pydantic.Field(True, description="Score what a saved PNG would show; false lets the gradient through.")
    chunk: int = pydantic.Field(64, ge=1, description="Most pictures in one forward.")


class Clip(Reward):
    """Cosine of the projected image and text embeddings, in [-1, 1] (trained models: 0.15 to 0.45); of a video, the mean over frames."""

    Settings = Settings
    name = "clip"
    scale = "cosine of image and prompt embeddings, in [-1, 1]"

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        import open_clip

        s = self.settings
        _check_source(open_clip, s)
        weights = None if ":" in s.model else s.pretrained
        try:
            self.model, _, self.preprocess = open_clip.create_model_and_transforms(s.model, pretrained=weights, precision="fp32")
        except (OSError, RuntimeError) as error:
            what = f'CLIP "{s.model}" with pretrained="{s.pretrained}" could not be loaded'
            raise ValueError(f"{what}: {error} Without a network, give a file: pretrained=/path/to/weights") from error
        self.model.eval().requires_grad_(False)
        self.tokenizer = open_clip.get_tokenizer(s.model)
        side = self.model.visual.image_size
        side = side if isinstance(side, int) else min(side)
        self.on_tensors = _tensor_transform(self.preprocess, side if s.transform == "tv_bilinear" else 0)
        self.differentiable = s.transform != "pil" and not s.rounding

    def __call__(self, media: Tensor, prompts: list[str], context: MediaContext | None = None) -> Tensor:
        if media.requires_grad and torch.is_grad_enabled() and not self.differentiable:
            now = f"transform={self.settings.transform}, rounding={self.settings.rounding}"
            raise ValueError(f"clip with {now} gives no gradient; load it with transform=tensor, rounding=False")
        frames = media.reshape(-1, *media.shape[-3:])
        image = torch.cat([self.model.encode_image(self._pixels(part), normalize=True) for part in frames.split(self.settings.chunk)])
        image = image.view(len(media), -1, image.shape[-1])  # (B, F, d)
        distinct = list(dict.fromkeys(prompts))
        tokens = self.tokenizer(distinct).to(media.device)
        text = torch.cat([self.model.encode_text(part, normalize=True) for part in tokens.split(self.settings.chunk)])
        text = text[[distinct.index(p) for p in prompts]]
        return (image * text[:, None]).sum(-1).mean(1).float()

    def _pixels(self, frames: Tensor) -> Tensor:
        """(n, 3, H, W) in [0, 1] -> the network's normalised input."""
        if self.settings.transform == "pil":
            return torch.stack([self.preprocess(image) for image in to_pil(frames)]).to(frames.device)
        return self.on_tensors(to_uint8(frames).float() / 255 if self.settings.rounding else frames)


def _tensor_transform(preprocess, side: int):
    """The model's own preprocessing (side == 0) or a bilinear resize and crop to side, for float tensors (n, 3, H, W)."""
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize

    steps: list[Any] = []
    for step in copy.deepcopy(preprocess.transforms):
        if type(step).__name__ == "ResizeKeepRatio":  # written for PIL only
            steps.append(partial(_resize_keep_ratio, size=step.size, longest=step.longest, interpolation=step.interpolation))
        elif isinstance(step, torch.nn.Module):  # resize, crop, pad, normalise; the others turn PIL into tensors
            vars(step)["fill"] = getattr(step, "fill", 0) / 255  # padding: bytes for PIL, [0, 1] here
            steps.append(step)
    if side:
        normalize = next(step for step in steps if isinstance(step, Normalize))
        steps = [Resize(side, InterpolationMode.BILINEAR, antialias=True), CenterCrop(side), normalize]
    return Compose(steps)


def _resize_keep_ratio(frames: Tensor, *, size: tuple[int, int], longest: float, interpolation) -> Tensor:
    """open_clip's resize that fills (longest 0) or fits into (longest 1) size = (height, width)."""
    from torchvision.transforms.functional import resize

    ratios = [got / want for got, want in zip(frames.shape[-2:], size, strict=True)]
    ratio = max(ratios) * longest + min(ratios) * (1 - longest)
    return resize(frames, [round(side / ratio) for side in frames.shape[-2:]], interpolation, antialias=True)


def _check_source(open_clip, settings: Settings) -> None:
    """Names are checked before anything is downloaded; ValueError with the nearest valid ones."""
    model, weights = settings.model, settings.pretrained
    if model.startswith(("hf-hub:", "local-dir:")):
        return
    if model not in open_clip.list_models():
        raise ValueError(f'unknown CLIP model "{model}"{did_you_mean(model, open_clip.list_models())}')
    tags = open_clip.list_pretrained_tags_by_model(model)
    if weights is None or os.path.isfile(weights):
        return
    if weights not in tags:
        raise ValueError(f'CLIP model "{model}" has no weights "{weights}" and no such file exists{did_you_mean(weights, tags)}')
    quick = bool(open_clip.get_pretrained_cfg(model, weights).get("quick_gelu", False))
    if quick != bool(open_clip.get_model_config(model).get("quick_gelu", False)):
        other = model.removesuffix("-quickgelu") if not quick else f"{model}-quickgelu"
        raise ValueError(f'weights "{weights}" were trained with another activation than "{model}" has; use model={other}')


REWARD = Clip
