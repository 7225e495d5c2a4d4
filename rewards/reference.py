"""PSNR, SSIM and LPIPS against a ground-truth file or array.

These rewards suit world models and other tasks with one right answer. A video gets the mean over
its frames or its worst frame; both are in `parts`, and the value of every frame in `last_frames`.
Higher is better everywhere (LPIPS is negated).
* PSNR (dB): 10 log10(1 / mse) over all pixels and channels of a frame, at most CAP: two equal
  pictures would be infinitely near.
* SSIM: Wang, Bovik, Sheikh, Simoncelli 2004, Gaussian window 11 x 11 with sigma 1.5, K = (0.01,
  0.03), where the window fits, mean over the RGB channels (the paper uses grey pictures).
* LPIPS: Zhang et al. 2018 (arXiv:1801.03924), version 0.1 of the package `lpips`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl.data.media import IMAGE_SUFFIXES, MEDIA_SUFFIXES, read_frames, read_image
from flowrl.rewards.core.pictures import column_of, frames_of, refuse_gradient, rounded
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import Rounding
from flowrl.rewards.core.settings import Settings as Base
from flowrl.rewards.core.source import file_of
from flowrl.rewards.core.weights import fill, path_of, tensors
from flowrl.types import MediaContext

# backbone -> number of weights of LPIPS
NUMBERS = {"alex": 2_470_848, "vgg": 14_716_160, "squeeze": 724_736}
CAP = 60.0  # highest PSNR in dB; rounding to 8 bits alone leaves 59
WINDOW, SIGMA, K1, K2 = 11, 1.5, 0.01, 0.03


class Settings(Base):
    metric: Literal["psnr", "ssim", "lpips"] = pydantic.Field(
        "psnr", description="Measure of nearness; LPIPS is negated."
    )
    key: str | None = pydantic.Field(
        "ground_truth",
        description="The prompt's key that names the file; null: the context column `reference`.",
    )
    folder: str | None = pydantic.Field(
        None, description="Folder of files with relative paths; null: the working directory."
    )
    over: Literal["mean", "worst"] = pydantic.Field(
        "mean",
        description="How frames of a video become one score: their mean, or the worst of them.",
    )
    net: Literal["alex", "vgg", "squeeze"] = pydantic.Field("alex", description="Network of LPIPS.")
    backbone: str | None = pydantic.Field(
        None,
        description=(
            "File of torchvision's weights for the network of LPIPS; null: torchvision fetches it."
        ),
    )
    rounding: Rounding = True
    chunk: int = pydantic.Field(32, ge=1, description="Most frames in one pass.")


class Reference(Reward):
    """PSNR in dB, SSIM in [-1, 1] or minus LPIPS against the prompt's ground truth.

    The ground truth must have the size and the number of frames of the generated media.
    """

    Settings = Settings
    name = "reference"
    remedies = {"reference": "set key=ground_truth to read it from the file that each prompt names"}
    scale = (
        "PSNR in dB against the prompt's ground truth, at most 60; of a video, the mean over its"
        " frames"
    )
    # (B, F) fp32 on the CPU: one value for each frame of the last call's samples
    last_frames: Tensor | None = None

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        what, self.range = {
            "psnr": (f"PSNR in dB, at most {CAP:g},", (0.0, CAP)),
            "ssim": ("SSIM, -1 to 1,", (-1.0, 1.0)),
            "lpips": ("minus LPIPS, 0 is best,", (-math.inf, 0.0)),
        }[s.metric]
        over = "the mean over" if s.over == "mean" else "the worst of"
        self.scale = f"{what} against the prompt's ground truth; of a video, {over} its frames"
        self.needs = frozenset({"meta" if s.key else "reference"})
        self.reads = frozenset({s.key} if s.key else ())
        self.lpips = _lpips(s.net, s.backbone) if s.metric == "lpips" else None

    @classmethod
    def network_bytes(cls, settings: Any) -> float | None:
        return 4.0 * NUMBERS[settings.net] if settings.metric == "lpips" else 0.0

    def complaint(self, meta: Mapping[str, Any]) -> str | None:
        if self.settings.key is None:
            return None
        try:
            self._path(meta)
        except ValueError as error:
            return f"has no ground truth: {error}"
        return None

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        refuse_gradient(self, media)
        values = self._frames(media, context)
        return values.mean(1) if self.settings.over == "mean" else values.amin(1)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """{"mean": (B,), "worst": (B,)} over the frames of videos; {} for images."""
        if media.ndim == 4:
            return {}
        values = self._frames(media, context)
        return {"mean": values.mean(1), "worst": values.amin(1)}

    def _frames(self, media: Tensor, context: MediaContext | None) -> Tensor:
        """The metric of each frame, (B, F); F is 1 for images."""
        s = self.settings
        target = frames_of(self._targets(media, context))
        frames = rounded(frames_of(media)) if s.rounding else frames_of(media)
        chunks = zip(frames.split(s.chunk), target.split(s.chunk), strict=True)
        values = [self._nearness(a, b) for a, b in chunks]
        found = torch.cat(values).float().view(len(media), -1)
        self.last_frames = found.detach().cpu()
        return found

    def _nearness(self, a: Tensor, b: Tensor) -> Tensor:
        if self.settings.metric == "psnr":
            return psnr(a, b)
        if self.settings.metric == "ssim":
            return ssim(a, b)
        assert self.lpips is not None
        return -self.lpips(a, b, normalize=True).flatten()

    def _targets(self, media: Tensor, context: MediaContext | None) -> Tensor:
        """The ground truth of each sample, shaped as the media."""
        assert context is not None
        if self.settings.key is None:
            target = column_of(context, "reference", len(media))
            if target.shape != media.shape:
                raise ValueError(
                    f"context.reference has shape {tuple(target.shape)} and the media"
                    f" {tuple(media.shape)}; they must match"
                )
            return target.to(media)
        assert context.meta is not None
        paths = [self._path(meta) for meta in context.meta]
        files = {path: read(path, media[0]) for path in dict.fromkeys(paths)}
        return torch.stack([files[path] for path in paths]).to(media)

    def _path(self, meta: Mapping[str, Any]) -> Path:
        what = "an image, a video, or a .npy or .safetensors file"
        return file_of(self, meta, self.settings.key, what)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB of (n, 3, H, W) in [0, 1] -> (n,).

    It is at most CAP, where the gradient is 0.
    """
    mse = (a - b).square().flatten(1).mean(1)
    return -10 * mse.clamp_min(10 ** (-CAP / 10)).log10()


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity of (n, C, H, W) in [0, 1] -> (n,).

    It is the mean over the places where the window fits, and over channels, computed in fp64: a
    variance is a small difference of large numbers, and a convolution of fp32 may keep 11 bits of
    them (TF32).
    """
    height, width = a.shape[-2:]
    if min(height, width) < WINDOW:
        raise ValueError(
            f"SSIM needs pictures of at least {WINDOW} x {WINDOW} px; these are {width} x {height}"
        )
    kind, a, b = a.dtype, a.double(), b.double()
    mean_a, mean_b = blurred(a), blurred(b)
    var_a, var_b = blurred(a * a) - mean_a**2, blurred(b * b) - mean_b**2
    both = blurred(a * b) - mean_a * mean_b
    c1, c2 = K1**2, K2**2
    above = (2 * mean_a * mean_b + c1) * (2 * both + c2)
    below = (mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)
    return (above / below).flatten(1).mean(1).to(kind)


def blurred(x: Tensor) -> Tensor:
    """Gaussian mean of each window: (n, C, H, W) -> (n, C, H - 10, W - 10)."""
    place = torch.arange(WINDOW, device=x.device, dtype=x.dtype) - WINDOW // 2
    weight = (-place.square() / (2 * SIGMA**2)).exp()
    weight = weight / weight.sum()
    columns = F.conv2d(x.flatten(0, 1)[:, None], weight.view(1, 1, -1, 1))
    out = F.conv2d(columns, weight.view(1, 1, 1, -1))
    return out.view(*x.shape[:2], *out.shape[-2:])


def read(path: Path, like: Tensor) -> Tensor:
    """Read a file as media of the shape of `like`, (3, H, W) or (F, 3, H, W), fp32 in [0, 1] on
    CPU.

    Files are images; videos (also .gif); .npy and .safetensors with one array, channels first or
    last, bytes or floats in [0, 1]. Another size -> ValueError.
    """
    found = _read_any(path)
    if found.ndim == 4 and like.ndim == 3 and len(found) == 1:
        found = found[0]
    if found.shape != like.shape:
        raise ValueError(
            f"the ground truth {path} is {_size(found)} and what was generated {_size(like)}; they"
            " must match"
        )
    return found


def _read_any(path: Path) -> Tensor:
    """Read a file as media, by its suffix."""
    suffix = path.suffix.lower()
    if suffix in (".npy", ".safetensors"):
        return _as_media(_array(path), path)
    if suffix in IMAGE_SUFFIXES:
        return read_image(path)
    if suffix in MEDIA_SUFFIXES:
        return read_frames(path)
    known = ", ".join([*MEDIA_SUFFIXES, ".npy", ".safetensors"])
    raise ValueError(
        f"the ground truth {path} is not of a kind that can be read; give one of {known}"
    )


def _array(path: Path) -> Tensor:
    """The one array of a .npy or .safetensors file, as it is stored."""
    if path.suffix.lower() == ".npy":
        return torch.from_numpy(np.load(path, allow_pickle=False))
    found = list(tensors(path).values())
    if len(found) != 1:
        raise ValueError(
            f"the ground truth {path} holds {len(found)} tensors; give a file with one"
        )
    return found[0]


def _as_media(array: Tensor, path: Path) -> Tensor:
    """Put channels first, fp32 in [0, 1]; another shape or other values -> ValueError."""
    if array.ndim not in (3, 4) or 3 not in (array.shape[-3], array.shape[-1]):
        raise ValueError(
            f"the ground truth {path} has shape {tuple(array.shape)}; expected (3, H, W) or (H, W,"
            " 3), or (F, ...) of either"
        )
    if array.shape[-3] != 3:
        array = array.movedim(-1, -3)
    if array.dtype == torch.uint8:
        return array.float() / 255
    low, high = float(array.min()), float(array.max())
    if not (array.is_floating_point() and low >= 0 and high <= 1):
        raise ValueError(
            f"the ground truth {path} holds {array.dtype} from {low:.3g} to {high:.3g}; give bytes,"
            " or floats in [0, 1]"
        )
    return array.float()


def _size(media: Tensor) -> str:
    frames = f"{len(media)} frames of " if media.ndim == 4 else "an image of "
    return f"{frames}{media.shape[-1]} x {media.shape[-2]}"


def _lpips(net: str, backbone: str | None) -> nn.Module:
    """LPIPS of the package: its own linear heads on torchvision's backbone."""
    if backbone is None:
        module = _lpips_package(net, fetch=True)
    else:
        file = path_of(backbone, reward="reference", setting="backbone")
        module = _lpips_package(net, fetch=False)
        # torchvision's features.3.weight is net.slice2.3.weight here, with the same numbering
        names = {f"features.{key.split('.', 1)[1]}": key for key in module.net.state_dict()}
        state = {names[key]: value for key, value in tensors(file).items() if key in names}
        fill(module.net, state, path=file)
    return module.eval().requires_grad_(False)


def _lpips_package(net: str, *, fetch: bool) -> nn.Module:
    """Make LPIPS of the package. fetch: torchvision fetches the backbone's weights; else they are
    random."""
    import lpips

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package uses deprecated names of torchvision
            return lpips.LPIPS(net=net, pnet_rand=not fetch, verbose=False)
    except OSError as error:
        raise ValueError(
            f"LPIPS needs torchvision's ImageNet weights of {net}, which could not be fetched"
            f" ({error}); download them (https://docs.pytorch.org/vision, models) and set"
            " reward.reference.backbone=/path/to/the/file"
        ) from error


REWARD = Reference
