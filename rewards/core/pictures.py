"""Ways in which pictures reach a network.

Published scores depend on the resize as much as on the weights, so each way is named and tested.
All take frames (n, 3, H, W) fp32 in [0, 1]. `rounded` gives the values of a saved PNG; without it
the gradient passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from flowrl.data.media import to_pil, to_uint8
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.score import check_media
from flowrl.types import MediaContext

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)

Picture = TypeVar("Picture", Tensor, Image.Image)


def frames_of(media: Tensor) -> Tensor:
    """(B, 3, H, W) or (B, F, 3, H, W) -> (n, 3, H, W), frames of a sample next to each other."""
    return media.reshape(-1, *media.shape[-3:])


def column_of(context: MediaContext | None, name: str, size: int) -> Tensor:
    """Pictures or videos in a context column, one for each of `size` samples.

    Raises ValueError unless they have the form of media, and are finite.
    """
    found = getattr(context, name, None)
    if found is None:
        raise ValueError(f"context.{name} is missing: give MediaContext({name}=...), one a sample")
    try:
        found = check_media(found, [""] * size)
    except ValueError as error:
        raise ValueError(f"context.{name} must be as media are: {error}") from None
    if not bool(found.isfinite().all()):
        raise ValueError(f"context.{name} holds NaN or inf")
    return found


def mean_of_frames(values: Tensor, media: Tensor) -> Tensor:
    """Average the values of frames (n,) over each sample -> (B,) fp32; also (n, k) -> (B, k)."""
    return values.float().view(len(media), -1, *values.shape[1:]).mean(1)


def in_chunks(function: Callable[..., Tensor], *columns: Any, chunk: int) -> Tensor:
    """Call a function with at most `chunk` rows of its arguments at a time, and join the results.

    columns: tensors or lists of the same length n -> (n, ...).
    """
    starts = range(0, len(columns[0]), chunk)
    return torch.cat([function(*(c[i : i + chunk] for c in columns)) for i in starts])


def rated(reward: Reward, media: Tensor, rate: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Mean of a network's ratings over the frames of each sample: (B,) or (B, k) fp32.

    rate: (pictures (n, 3, H, W), at most the setting chunk; the sample of each (n,)) -> (n,) or
    (n, k). Raises ValueError where media ask for a gradient that the reward does not give.
    """
    refuse_gradient(reward, media)
    frames = frames_of(media)
    rows = torch.arange(len(media), device=media.device)
    rows = rows.repeat_interleave(len(frames) // len(media))
    return mean_of_frames(in_chunks(rate, frames, rows, chunk=reward.settings.chunk), media)


def rounded(frames: Tensor) -> Tensor:
    """The 256 levels of a saved picture, as fp32 in [0, 1]; no gradient."""
    return to_uint8(frames).float() / 255


def normalized(
    frames: Tensor, mean: tuple[float, ...] = CLIP_MEAN, std: tuple[float, ...] = CLIP_STD
) -> Tensor:
    return F.normalize(frames, list(mean), list(std))


def cropped(
    frames: Tensor,
    side: int,
    interpolation: InterpolationMode = InterpolationMode.BICUBIC,
    *,
    floor: bool = False,
) -> Tensor:
    """Resize the shortest side to `side` (antialiased) and crop the centre; overshoots of the
    bicubic resize are clamped, as PIL does."""
    return _centre(F.resize(frames, [side], interpolation, antialias=True), side, floor).clamp(0, 1)


def stretched(frames: Tensor, side: int) -> Tensor:
    """Resize to side x side without regard to the aspect, antialiased bicubic, clamped."""
    return F.resize(frames, [side, side], InterpolationMode.BICUBIC, antialias=True).clamp(0, 1)


def fitted(frames: Tensor, side: int, *, antialias: bool = True) -> Tensor:
    """Resize the longest side to `side` (bicubic, not clamped), with zeros around it, as HPSv2
    does."""
    ratio = side / max(frames.shape[-2:])
    height, width = (round(length * ratio) for length in frames.shape[-2:])
    if ratio != 1:
        frames = F.resize(frames, [height, width], InterpolationMode.BICUBIC, antialias=antialias)
    left, top = (side - width) // 2, (side - height) // 2
    return F.pad(frames, [left, top, side - width - left, side - height - top])


def by_pil(frames: Tensor, to_tensor: Callable[[Image.Image], Tensor]) -> Tensor:
    """Apply a reference's own preprocessing picture by picture: to_tensor(PIL image) -> (3, h,
    w)."""
    return torch.stack([to_tensor(image) for image in to_pil(frames)]).to(frames.device)


def pil_cropped(frames: Tensor, side: int, *, floor: bool = False) -> Tensor:
    """`cropped` by PIL (bicubic, bytes in between), as CLIP's processors do: (n, 3, side, side)."""

    def to_tensor(image: Image.Image) -> Tensor:
        resized = F.resize(image, [side], InterpolationMode.BICUBIC)
        return F.to_tensor(_centre(resized, side, floor))

    return by_pil(frames, to_tensor)


def pil_stretched(frames: Tensor, side: int) -> Tensor:
    """`stretched` by PIL, as SigLIP's processor does it."""

    def to_tensor(image: Image.Image) -> Tensor:
        return F.to_tensor(F.resize(image, [side, side], InterpolationMode.BICUBIC))

    return by_pil(frames, to_tensor)


def _centre(image: Picture, side: int, floor: bool) -> Picture:
    """Centre crop.

    Where an odd number of pixels goes, torchvision rounds the offset to even and transformers'
    processors round it down (floor).
    """
    if not floor:
        return F.center_crop(image, [side, side])
    _, height, width = F.get_dimensions(image)
    return F.crop(image, (height - side) // 2, (width - side) // 2, side, side)


def refuse_gradient(reward: Reward, media: Tensor, remedy: str = "rounding=False") -> None:
    """Raise ValueError where media ask for a gradient that this reward, as loaded, does not
    give."""
    if media.requires_grad and torch.is_grad_enabled() and not reward.differentiable:
        raise ValueError(
            f"{reward.name} as it is loaded rounds pictures and gives no gradient; load it with"
            f" {remedy}"
        )
