"""Media between tensors, PIL and files. Imports nothing of ours.

One rounding rule everywhere: byte = round(255 * x) after a clamp to [0, 1], what a saved PNG holds
and what the reference RL codes score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
VIDEO_SUFFIXES = (".mp4", ".gif")
ORIENTATION = 0x0112  # of EXIF
TURNED = (5, 6, 7, 8)  # its values with which width and height change places

T = TypeVar("T")


def to_uint8(media: Tensor) -> Tensor:
    """(..., 3, H, W) float in [0, 1] -> uint8 of the same shape.

    Values outside are clamped, halves go to the even byte.
    """
    return (media.detach().float().clamp(0, 1) * 255).round().to(torch.uint8)


def to_pil(media: Tensor) -> list[Image.Image]:
    """(B, 3, H, W) or (3, H, W) float in [0, 1] -> B images."""
    if media.ndim not in (3, 4) or media.shape[-3] != 3:
        raise ValueError(
            f"media has shape {tuple(media.shape)}; expected (B, 3, H, W) or (3, H, W)"
        )
    frames = media if media.ndim == 4 else media[None]
    return [Image.fromarray(frame) for frame in to_uint8(frames).permute(0, 2, 3, 1).cpu().numpy()]


def from_pil(images: Image.Image | Sequence[Image.Image]) -> Tensor:
    """Images of one size -> (B, 3, H, W) fp32 in [0, 1]."""
    images = [images] if isinstance(images, Image.Image) else list(images)
    sizes = sorted({image.size for image in images})
    if len(sizes) != 1:
        raise ValueError(
            f"images of one size make a batch; there are {len(images)} images of sizes {sizes}"
        )
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in images])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float() / 255


def read_image(path: Path) -> Tensor:
    """(3, H, W) fp32 in [0, 1], upright as its EXIF says, without alpha.

    What cannot be read -> ValueError that names the file.
    """
    return _read(path, lambda image: from_pil(ImageOps.exif_transpose(image))[0])


def image_size(path: Path) -> tuple[int, int]:
    """(width, height) of `read_image`, from the file's head alone."""
    return _read(path, lambda image: image.size[::-1] if _turned(image) else image.size)


def _turned(image: Image.Image) -> bool:
    return "exif" in image.info and image.getexif().get(ORIENTATION) in TURNED


def _read(path: Path, read: Callable[[Image.Image], T]) -> T:
    try:
        with Image.open(path) as image:
            clipped = image.mode.startswith(("I", "F"))  # Pillow would clip these to white
            found = None if clipped else read(image)
    # Pillow raises OSError, SyntaxError, struct.error ... for broken files and broken EXIF
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if path.is_file() else "it does not exist"
        raise ValueError(f"{path} cannot be read: {reason}") from None
    if found is None:
        raise ValueError(
            f"{path} cannot be read: its pixels are of mode {image.mode}; save it with 8 bits a"
            " channel"
        )
    return found


def save(media: Tensor, path: str | Path, *, fps: int = 16) -> Path:
    """Write one image (3, H, W) or one video (F, 3, H, W), float in [0, 1].

    The suffix chooses the format; one that does not fit the media -> ValueError. .mp4 needs the
    extra "video"; .gif does without. Folders are made.
    """
    path = Path(path)
    if media.ndim not in (3, 4) or media.shape[-3] != 3:
        raise ValueError(
            f"media has shape {tuple(media.shape)}; save takes one image (3, H, W) or one video (F,"
            " 3, H, W)"
        )
    _check_suffix(path, video=media.ndim == 4)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".mp4":
        _save_mp4(media, path, fps)
    elif media.ndim == 4:
        frames = to_pil(media)
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=1000 / fps, loop=0)
    else:
        to_pil(media)[0].save(path)
    return path


def _check_suffix(path: Path, video: bool) -> None:
    suffixes = VIDEO_SUFFIXES if video else IMAGE_SUFFIXES
    if path.suffix.lower() not in suffixes:
        what = "a video" if video else "an image"
        raise ValueError(
            f'"{path.name}": {what} is saved as {", ".join(suffixes)}; the suffix is'
            f' "{path.suffix}"'
        )


def _save_mp4(media: Tensor, path: Path, fps: int) -> None:
    try:
        import av
    except ImportError as error:
        raise ValueError(
            f"writing {path.name} needs the extra \"video\": pip install 'flowrl[video]', or save"
            " as .gif"
        ) from error
    height, width = media.shape[-2:]
    if width % 2 or height % 2:
        raise ValueError(
            f"mp4 (yuv420p) needs even sides; the frames are {width}x{height}; save as .gif"
        )
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"crf": "18"}
        for pixels in to_uint8(media).permute(0, 2, 3, 1).cpu().numpy():
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
