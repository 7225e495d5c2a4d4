"""CLIPScore: cosine between image and prompt under any CLIP of open_clip or transformers.

Published CLIP rewards differ in how a picture reaches the network more than in the network, so the
transform is a setting: "tensor" follows the model's own preprocessing on float tensors (batched,
differentiable), "pil" is that preprocessing itself, picture by picture, "tv_bilinear" is
DiffusionNFT's (torchvision's bilinear resize of the float tensor, centre crop). On a photo they are
57 dB ("tensor") and 39 dB ("tv_bilinear") from "pil". A preset names what one paper's code does; no
two of them agree.

Departures from those codes: a video is the mean over its frames (Flow-Factory takes the first);
fp32 everywhere (ImageReward's package and CLIPScore's own code run in fp16 on CUDA); pictures are
rounded to bytes by default also where DiffusionNFT does not (rounding=False: as it does);
DiffusionNFT's logit over 100 is the cosine itself.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor, nn
from torchvision.transforms import Compose, InterpolationMode, Normalize
from torchvision.transforms.functional import resize

from flowrl.rewards.core.pictures import by_pil, cropped, normalized, pil_cropped, rounded
from flowrl.rewards.core.settings import PictureSettings
from flowrl.rewards.core.sizes import of_open_clip
from flowrl.rewards.core.weights import fetch_open_clip, path_of, unfetched
from flowrl.rewards.networks.clip import HubClip, OpenClip, TwoTowers
from flowrl.runtime import hub
from flowrl.runtime.registry import did_you_mean
from flowrl.shapes.clip import SOURCE as SHAPES

SCHEMES = ("hf-hub:", "local-dir:")  # beginnings of names that open_clip reads
VIT_L14 = "openai/clip-vit-large-patch14"
NUMBERS = {  # hub name -> number of weights, for CLIPs that transformers loads
    VIT_L14: 427_616_513,
    "openai/clip-vit-large-patch14-336": 427_944_193,
    "openai/clip-vit-base-patch16": 149_620_737,
    "openai/clip-vit-base-patch32": 151_277_313,
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": 986_109_441,
}
# Settings that a preset fixes. dance_grpo: the 378-pixel DFN5B weights in open_clip's plain
# ViT-H-14, so at 224 pixels (position embeddings are resized) and with another activation than in
# training; mix_grpo: the same weights in their own architecture.
PRESETS: dict[str, dict[str, Any]] = {
    "nft": {"model": VIT_L14, "transform": "tv_bilinear"},
    "flow_factory": {"model": VIT_L14, "transform": "pil"},
    "mix_grpo": {"model": "ViT-H-14-378-quickgelu", "pretrained": "dfn5b", "transform": "pil"},
    "dance_grpo": {
        "model": "ViT-H-14",
        "pretrained": "apple/DFN5B-CLIP-ViT-H-14-378",
        "transform": "pil",
    },
    "imagereward": {"model": "ViT-L-14-quickgelu", "pretrained": "openai", "transform": "pil"},
    "hessel": {
        "model": "ViT-B-32-quickgelu",
        "pretrained": "openai",
        "transform": "pil",
        "scale": "hessel",
        "prefix": "A photo depicts ",
    },
    "shapes": {"model": SHAPES, "pretrained": None, "transform": "tensor"},
}


class Settings(PictureSettings):
    preset: (
        Literal["nft", "flow_factory", "mix_grpo", "dance_grpo", "imagereward", "hessel", "shapes"]
        | None
    ) = pydantic.Field(
        None,
        description=(
            "A published CLIP reward, or that of the shapes world; it fixes model, weights,"
            " transform, scale and prefix."
        ),
    )
    model: str = pydantic.Field(
        "ViT-B-32",
        description=(
            'The CLIP: a model of open_clip (its name, "hf-hub:owner/repo", "local-dir:/path") or'
            ' of transformers ("owner/repo", a folder).'
        ),
    )
    pretrained: str | None = pydantic.Field(
        "laion2b_s34b_b79k",
        description=(
            "Weights of open_clip: a tag, a file, or owner/repo of the hub; null: random weights,"
            " for shape tests only. With a preset: the place of its weights on this machine, a file"
            " (a folder for nft and flow_factory)."
        ),
    )
    transform: Literal["tensor", "pil", "tv_bilinear"] = pydantic.Field(
        "tensor", description="How pictures reach the network."
    )
    scale: Literal["cosine", "hessel"] = pydantic.Field(
        "cosine",
        description=(
            "Scale of the score: the cosine, or CLIPScore's own 2.5 * max(cosine, 0) (hessel)."
        ),
    )
    prefix: str = pydantic.Field("", description="Text that is put before every prompt.")


class Clip(TwoTowers):
    """Cosine of image and text embeddings, in [-1, 1]; for a video, the mean over its frames.

    Trained models give 0.15 to 0.45.
    """

    Settings = Settings
    name = "clip"
    scale = "cosine of image and prompt embeddings, in [-1, 1]"
    remedy = "transform=tensor, rounding=False and no preset"

    def __init__(self, settings: Any = None):
        super().__init__(_resolved(Settings() if settings is None else settings))
        s = self.settings
        _refuse_unused_weights(s)
        if _of_transformers(s.model):
            setting = "pretrained" if s.preset else "model"
            self.towers = HubClip(s.model, reward="clip", setting=setting)
            self.transform = _transform(s.transform, self.towers.side[0])
        else:
            model, preprocess, tokenizer = _open_clip(s)
            self.towers = OpenClip(model, tokenizer)
            self.transform = _open_clip_transform(s.transform, preprocess, min(self.towers.side))
        self.prefix = s.prefix
        self.range = (-1.0, 1.0)
        if s.scale == "hessel":
            self.scale = "2.5 * max(cosine of image and prompt embeddings, 0)"
            self.range = (0.0, 2.5)
        self.differentiable = s.transform != "pil" and not s.rounding

    @classmethod
    def network_bytes(cls, settings: Any) -> float | None:
        resolved = _resolved(settings)
        # a preset fixes the network, wherever its weights lie
        return bytes_of(PRESETS[settings.preset]["model"] if settings.preset else resolved.model)

    def pixels(self, frames: Tensor) -> Tensor:
        return self.transform(rounded(frames) if self.settings.rounding else frames)

    def value(self, cosine: Tensor) -> Tensor:
        return 2.5 * cosine.clamp(min=0) if self.settings.scale == "hessel" else cosine


def bytes_of(model: str) -> float | None:
    """Bytes of a CLIP in fp32, computed without its weights; None: not known."""
    if _of_transformers(model):
        numbers = NUMBERS.get(hub.split(model)[0])
        return None if numbers is None else 4.0 * numbers
    _check_name(model)
    return of_open_clip(model)


def _resolved(s: Settings) -> Settings:
    """The settings with those of the preset; raises ValueError where others contradict it."""
    if s.preset is None:
        return s
    fixed = {"scale": "cosine", "prefix": "", "pretrained": None, **PRESETS[s.preset]}
    given = {key: getattr(s, key) for key in s.model_fields_set & fixed.keys()}
    clashes = [
        f"{key}={value!r}"
        for key, value in sorted(given.items())
        if key != "pretrained" and value != fixed[key]
    ]
    if clashes:
        raise ValueError(
            f"clip.preset={s.preset} fixes what {', '.join(clashes)} would change; leave it out, or"
            " the preset"
        )
    if given.get("pretrained"):
        fixed["model" if _of_transformers(fixed["model"]) else "pretrained"] = given["pretrained"]
    return s.model_copy(update=fixed)


def _refuse_unused_weights(s: Settings) -> None:
    given = s.pretrained and "pretrained" in s.model_fields_set
    if given and (":" in s.model or _of_transformers(s.model)):
        raise ValueError(
            f'pretrained={s.pretrained} would not be used: the CLIP "{s.model}" has weights of'
            " its own; leave it out"
        )


def _of_transformers(model: str) -> bool:
    """Whether transformers loads a model, and not open_clip.

    open_clip's names hold a "/" only in its old spelling (ViT-B/32) and after "hf-hub:" or
    "local-dir:".
    """
    import open_clip

    return (
        ("/" in model or os.path.isdir(model))
        and ":" not in model
        and model.replace("/", "-") not in open_clip.list_models()
    )


def _open_clip(s: Settings) -> tuple[nn.Module, Compose, Any]:
    """(network, its preprocessing of PIL images, tokenizer)."""
    import open_clip

    _check_source(s)
    weights = _weights(s)
    try:
        model, _, preprocess = open_clip.create_model_and_transforms(
            s.model, pretrained=weights, precision="fp32", **_published_preprocessing(s)
        )
        return model, preprocess, open_clip.get_tokenizer(s.model)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        if s.model.startswith("hf-hub:"):
            source, folder = s.model.removeprefix("hf-hub:"), "local-dir:/path/to/the folder"
            raise unfetched(source, None, "clip", "model", error, put=folder) from error
        raise ValueError(
            f'CLIP "{s.model}" with pretrained="{weights}" could not be loaded: {error}'
        ) from error


def _weights(s: Settings) -> str | None:
    """open_clip's tag, or a file; fetched where it is not on this machine."""
    import open_clip

    weights = None if ":" in s.model else s.pretrained
    if weights in open_clip.list_pretrained_tags_by_model(s.model):
        fetch_open_clip(s.model, weights, reward="clip", setting="pretrained")
    elif weights and not os.path.isfile(weights):
        file = "open_clip_pytorch_model.bin"
        return str(path_of(weights, file, reward="clip", setting="pretrained"))
    return weights


def _published_preprocessing(s: Settings) -> dict[str, Any]:
    """The preprocessing that belongs to a preset's tag: its weights may be given as a file."""
    import open_clip

    tag = s.preset and PRESETS[s.preset]["pretrained"]
    published = open_clip.get_pretrained_cfg(s.model, tag) if tag else {}
    keys = ("mean", "std", "interpolation", "resize_mode")
    return {f"image_{key}": published[key] for key in keys if key in published}


def _check_source(s: Settings) -> None:
    """Check names before anything is downloaded; raise ValueError with the nearest valid ones."""
    import open_clip

    model, weights = s.model, s.pretrained
    _check_name(model)
    elsewhere = weights is None or os.path.exists(weights) or _is_hub_name(weights)
    if elsewhere or model.startswith(SCHEMES):
        return
    tags = open_clip.list_pretrained_tags_by_model(model)
    if weights not in tags:
        raise ValueError(
            f'CLIP model "{model}" has no weights "{weights}" and no such file'
            f" exists{did_you_mean(weights, tags)}"
        )
    _check_activation(model, weights)


def _check_name(model: str) -> None:
    import open_clip

    known = open_clip.list_models()
    if not model.startswith(SCHEMES) and model not in known:
        raise ValueError(f'unknown CLIP model "{model}"{did_you_mean(model, known)}')


def _is_hub_name(source: str) -> bool:
    return source.count("/") == 1 and not source.startswith((".", "/", "~"))


def _check_activation(model: str, weights: str) -> None:
    import open_clip

    quick = bool(open_clip.get_pretrained_cfg(model, weights).get("quick_gelu", False))
    if quick != bool(open_clip.get_model_config(model).get("quick_gelu", False)):
        other = model.removesuffix("-quickgelu") if not quick else f"{model}-quickgelu"
        raise ValueError(
            f'weights "{weights}" were trained with another activation than "{model}" has; use'
            f" model={other}"
        )


def _transform(kind: str, side: int) -> Callable[[Tensor], Tensor]:
    """Function from (n, 3, H, W) in [0, 1] to the input of a CLIP of transformers; kind "pil" does
    as its processor does."""
    if kind == "tv_bilinear":
        return lambda frames: normalized(cropped(frames, side, InterpolationMode.BILINEAR))
    resize_and_crop = pil_cropped if kind == "pil" else cropped
    return lambda frames: normalized(resize_and_crop(frames, side, floor=True))


def _open_clip_transform(kind: str, preprocess: Compose, side: int) -> Callable[[Tensor], Tensor]:
    """Function from (n, 3, H, W) in [0, 1] to the input of an open_clip model with this
    preprocessing."""
    if kind == "pil":
        return partial(by_pil, to_tensor=preprocess)
    if kind == "tensor":
        return _on_tensors(preprocess)
    normalize = next(step for step in preprocess.transforms if isinstance(step, Normalize))
    return lambda frames: normalize(cropped(frames, side, InterpolationMode.BILINEAR))


def _on_tensors(preprocess: Compose) -> Compose:
    """open_clip's preprocessing for float tensors (n, 3, H, W).

    Overshoots of a bicubic resize are clamped before they are normalised, as PIL does.
    """
    steps: list[Callable[[Tensor], Tensor]] = []
    for step in copy.deepcopy(preprocess.transforms):
        if type(step).__name__ == "ResizeKeepRatio":  # this step is written for PIL only
            steps.append(partial(_resize_keep_ratio, step))
        elif isinstance(step, Normalize):
            steps += [partial(torch.clamp, min=0, max=1), step]
        elif isinstance(step, nn.Module):  # resize, crop, pad; the others turn PIL into tensors
            # PIL fills with bytes, and our pictures are in [0, 1]
            vars(step)["fill"] = getattr(step, "fill", 0) / 255
            steps.append(step)
    return Compose(steps)


def _resize_keep_ratio(step: Any, frames: Tensor) -> Tensor:
    """open_clip's ResizeKeepRatio: fills (longest 0) or fits into (longest 1) its size."""
    height, width = frames.shape[-2:]
    ratios = height / step.size[0], width / step.size[1]
    ratio = max(ratios) * step.longest + min(ratios) * (1 - step.longest)
    size = [round(height / ratio), round(width / ratio)]
    return resize(frames, size, step.interpolation, antialias=True)


REWARD = Clip
