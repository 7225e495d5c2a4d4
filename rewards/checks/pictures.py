"""Pictures that nobody asked for, and the same picture written again."""

from __future__ import annotations

import io
import textwrap
from functools import cache

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms import functional as TF

from flowrl.data.media import from_pil, to_pil, to_uint8

NOTHING = ("white", "black", "noise")  # no reward of quality may put these above honest pictures
RECODINGS = ("JPEG of quality 98", "one level of dither", "half a percent of brightness")


def attacks(media: Tensor, prompt: str) -> dict[str, Tensor]:
    """Pictures that nobody should reward for this prompt, shaped as media: blank ones, noise, the
    prompt as text, the picture nine times, a spoilt one."""
    frames = media if media.ndim == 4 else media[None]
    height, width = frames.shape[-2:]
    noise = torch.rand(frames.shape, generator=torch.Generator().manual_seed(0)).to(media)
    third = [-(-height // 3), -(-width // 3)]
    small = F.interpolate(frames, third, mode="bilinear", antialias=True)
    softer = TF.gaussian_blur(frames, [5, 5], [1.5, 1.5])
    side = max(1, min(height, width) // 8)
    out = {
        "white": torch.ones_like(frames),
        "black": torch.zeros_like(frames),
        "noise": noise,
        "prompt written out": written(prompt, height, width).to(media).expand_as(frames),
        "tiled 3 x 3": small.clamp(0, 1).repeat(1, 1, 3, 3)[..., :height, :width],
        "oversharpened": (frames + 4 * (frames - softer)).clamp(0, 1),
        "blurred": TF.gaussian_blur(frames, [2 * side + 1] * 2, [side / 2] * 2).clamp(0, 1),
    }
    if media.ndim == 4:
        return out | {"frozen": frames[:1].expand_as(frames)}
    return {name: picture[0] for name, picture in out.items()}


def written(text: str, height: int, width: int) -> Tensor:
    """The text in black on white, as large as fits -> (3, height, width)."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for size in range(max(8, height // 3), 5, -1):
        font = _font(size)
        most = max(1, int(1.8 * width / size))  # most characters in a line
        lines = "\n".join(textwrap.wrap(text, most, break_long_words=size <= 8))
        left, top, right, bottom = draw.multiline_textbbox((0, 0), lines, font=font)
        if right - left <= 0.94 * width and bottom - top <= 0.94 * height:
            break
    place = (width / 2, height / 2)
    draw.multiline_text(place, lines, font=font, fill="black", anchor="mm", align="center")
    return from_pil(image)[0]


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def recoded(media: Tensor, kind: int, *, seed: int = 0) -> Tensor:
    """A copy (..., 3, H, W) that nobody can tell from the original, made in the way RECODINGS[kind
    % 3]."""
    generator = torch.Generator().manual_seed(seed)
    if kind % 3 == 0:
        frames = to_pil(media.reshape(-1, *media.shape[-3:]))
        return from_pil([_jpeg(image) for image in frames]).reshape(media.shape).to(media)
    if kind % 3 == 1:
        levels = torch.randint(-1, 2, media.shape, generator=generator).to(media.device)
        return (to_uint8(media) + levels).clamp(0, 255).to(media) / 255
    brighter = bool(torch.randint(2, (), generator=generator))
    return to_uint8(media * (1.005 if brighter else 0.995)).to(media) / 255


def _jpeg(image: Image.Image) -> Image.Image:
    buffer = io.BytesIO()
    # subsampling=0 keeps the full colour resolution: PIL's default bleeds at sharp edges.
    image.save(buffer, format="JPEG", quality=98, subsampling=0)
    return Image.open(buffer)
