"""Pictures and frames as viewers show them: upright, in sRGB with 8 bits a channel, over white.

Every reader of pictures and videos goes through here (flowrl/data/media.py, and PIL images that a
script hands over). Masks keep their transparency, which may be what they say.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageCms, ImageOps

# version of the reader, raised when it makes other pixels of a file; the identity of a run holds it
READER = "2"
ORIENTATION = 0x0112  # EXIF tag of the orientation
# (mode of the pixels, colour space of a profile that fits them)
SPACES = {("L", "GRAY"), ("L", "RGB"), ("RGB", "RGB"), ("CMYK", "CMYK")}
HDR = {16: "PQ", 18: "HLG"}  # transfer functions of videos, as H.273 numbers them


def as_seen(image: Image.Image, *, alpha: bool = False) -> Image.Image:
    """Convert a picture to RGB as it is seen. alpha: transparent pixels stay so, as RGBA. Pixels of
    32 bits, whose range nobody knows -> ValueError."""
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are of mode {image.mode}, whose range is not known; save it with 8 or 16"
            " bits a channel"
        )
    image.load()  # reads the pixels now, because the caller closes the file soon
    if image.mode == "RGB" and not image.info and ORIENTATION not in image.getexif():
        return image
    upright = _in_8_bits(ImageOps.exif_transpose(image))
    profile = upright.info.get("icc_profile")
    see_through = upright.convert("RGBA") if upright.has_transparency_data else None
    seen = _in_srgb(upright, profile) if profile else upright.convert("RGB")
    if see_through is not None:
        seen.putalpha(see_through.getchannel("A"))
        if not alpha:
            white = Image.new("RGBA", seen.size, "white")
            seen = Image.alpha_composite(white, seen).convert("RGB")
    seen.info = {}  # profile and orientation are applied; nobody may apply them again
    return seen


def is_plain(image: Image.Image) -> bool:
    """Whether a picture's pixels alone say how it is seen, apart from its orientation."""
    deep = image.mode.startswith("I")
    return not (deep or image.has_transparency_data or "icc_profile" in image.info)


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Reduce a picture with 16 bits of grey to 8 bits; others stay as they are."""
    if not image.mode.startswith("I;16"):
        return image
    deep = np.asarray(image)
    out = Image.fromarray((deep / 257).round().astype(np.uint8))
    out.info = {key: value for key, value in image.info.items() if key != "transparency"}
    # a PNG may name a grey that is transparent
    if (level := image.info.get("transparency")) is not None:
        out.putalpha(Image.fromarray(np.where(deep == level, 0, 255).astype(np.uint8)))
    return out


def _in_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert a picture to RGB by its colour profile; a profile that does not fit the pixels is
    ignored, as in viewers."""
    kind = {"1": "L", "LA": "L", "L": "L", "CMYK": "CMYK"}.get(image.mode, "RGB")
    space, transform = _transform(profile, kind)
    if transform is None:
        return image.convert("RGB")
    return ImageCms.applyTransform(image.convert("RGB" if space == "RGB" else kind), transform)


@lru_cache(16)
def _transform(profile: bytes, kind: str) -> tuple[str, Any]:
    """Build a transform to sRGB -> (the profile's colour space, the transform of pixels of this
    mode; None where the profile does not fit them or is broken)."""
    try:
        own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = own.profile.xcolor_space.strip()
        if (kind, space) not in SPACES:
            return space, None
        srgb = ImageCms.createProfile("sRGB")
        mode = "RGB" if space == "RGB" else kind
        return space, ImageCms.buildTransform(own, srgb, mode, "RGB")
    except (ImageCms.PyCMSError, OSError):
        return "", None


def frame_as_seen(frame: Any, size: tuple[int, int]) -> Image.Image:
    """Convert a decoded frame of a video (av.VideoFrame) to RGB. size: (width, height) with square
    pixels, before the frame is turned. One with a high dynamic range -> ValueError."""
    if frame.color_trc in HDR:
        raise ValueError(
            f"it has a high dynamic range ({HDR[frame.color_trc]}), which needs tone mapping;"
            " convert it to SDR (BT.709)"
        )
    clear = any(part.is_alpha for part in frame.format.components)
    image = Image.fromarray(frame.to_ndarray(format="rgba" if clear else "rgb24"))
    return as_seen(_turned(image if image.size == size else image.resize(size), frame))


def _turned(image: Image.Image, frame: Any) -> Image.Image:
    """Turn a frame as its display matrix says: columns and rows are swapped, then mirrored."""
    matrix = next((m for m in frame.side_data if m.type.name == "DISPLAYMATRIX"), None)
    if matrix is None:
        return image
    (xx, xy, _), (yx, yy, _), _ = np.frombuffer(bytes(matrix), np.int32).reshape(3, 3).tolist()
    if abs(xy) > abs(xx):
        image, xx, yy = image.transpose(Image.Transpose.TRANSPOSE), yx, xy
    image = ImageOps.mirror(image) if xx < 0 else image
    return ImageOps.flip(image) if yy < 0 else image
