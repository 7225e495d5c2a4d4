"""Media between tensors, PIL and files; grids that people look at. Imports nothing of ours.

One rounding rule everywhere: byte = round(255 * x) after a clamp to [0, 1], what a saved PNG holds
and what the reference RL codes score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
VIDEO_SUFFIXES = (".mp4", ".gif")
ORIENTATION, TURNED = (
    0x0112,
    (
        5,
        6,
        7,
        8,
    ),
)  # EXIF, and its values with which width and height change places
INK, FAINT, PAPER = (31, 35, 40), (110, 118, 129), (255, 255, 255)

T = TypeVar("T")


def to_uint8(media: Tensor) -> Tensor:
    """(..., 3, H, W) float in [0, 1] -> uint8 of the same shape; values outside are clamped, halves
    go to the even byte."""
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
    """(3, H, W) fp32 in [0, 1], upright as its EXIF says, without alpha; what cannot be read ->
    ValueError that names the file."""
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
    except (
        Exception
        # Pillow's readers raise OSError, SyntaxError, struct.error ... for broken files, and for
        # broken
        # EXIF
    ) as error:
        reason = f"{type(error).__name__}: {error}" if path.is_file() else "it does not exist"
        raise ValueError(f"{path} cannot be read: {reason}") from None
    if found is None:
        raise ValueError(
            f"{path} cannot be read: its pixels are of mode {image.mode}; save it with 8 bits a"
            " channel"
        )
    return found


def save(media: Tensor, path: str | Path, *, fps: int = 16) -> Path:
    """Write one image (3, H, W) or one video (F, 3, H, W), float in [0, 1]; the suffix chooses the
    format.

    .mp4 needs the extra "video"; .gif does without. Folders are made. A suffix that does not fit
    the media -> ValueError.
    """
    path = Path(path)
    if media.ndim not in (3, 4) or media.shape[-3] != 3:
        raise ValueError(
            f"media has shape {tuple(media.shape)}; save takes one image (3, H, W) or one video (F,"
            " 3, H, W)"
        )
    video = media.ndim == 4
    suffixes = VIDEO_SUFFIXES if video else IMAGE_SUFFIXES
    if path.suffix.lower() not in suffixes:
        what = "a video" if video else "an image"
        raise ValueError(
            f'"{path.name}": {what} is saved as {", ".join(suffixes)}; the suffix is'
            f' "{path.suffix}"'
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".mp4":
        _save_mp4(media, path, fps)
    elif video:
        frames = to_pil(media)
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=1000 / fps, loop=0)
    else:
        to_pil(media)[0].save(path)
    return path


def _save_mp4(media: Tensor, path: Path, fps: int) -> None:
    try:
        import av
    except ImportError as error:
        raise ValueError(
            f"writing {path.name} needs the extra \"video\": pip install 'flowrl[video]', or save"
            " as .gif"
        ) from error
    if media.shape[-1] % 2 or media.shape[-2] % 2:
        raise ValueError(
            f"mp4 (yuv420p) needs even sides; the frames are {media.shape[-1]}x{media.shape[-2]};"
            " save as .gif"
        )
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = media.shape[-1], media.shape[-2], "yuv420p"
        stream.options = {"crf": "18"}
        for frame in to_uint8(media).permute(0, 2, 3, 1).cpu().numpy():
            container.mux(
                stream.encode(
                    av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
                )
            )
        container.mux(stream.encode())


def grid(
    media: Tensor,
    captions: Sequence[str] | None = None,
    *,
    verdicts: Sequence[bool | None] | None = None,
    columns: int = 8,
    cell: int = 128,
) -> Image.Image:
    """B images as a contact sheet, a caption under each.

    media: (B, 3, H, W), or (B, F, 3, H, W) of which the middle frame is shown. verdicts: True and
    False draw a green or red edge.
    cell: pixels a side of one picture; whole-number enlargements keep small pictures crisp.
    """
    pictures = [_fit(picture, cell) for picture in to_pil(_stills(media))]
    if not pictures:
        raise ValueError("a grid needs at least one image")
    _check_lengths(len(pictures), captions=captions, verdicts=verdicts)
    columns = min(columns, len(pictures))
    font, pad, text = _font(cell), 8, _caption_height(cell, captions)
    rows = -(-len(pictures) // columns)
    sheet = Image.new(
        "RGB", (columns * (cell + pad) + pad, rows * (cell + text + pad) + pad), PAPER
    )
    for i, picture in enumerate(pictures):
        x, y = pad + (i % columns) * (cell + pad), pad + (i // columns) * (cell + text + pad)
        _paste(sheet, picture, (x, y), cell, None if verdicts is None else verdicts[i])
        if captions is not None:
            _write(sheet, captions[i], (x, y + cell + 4), cell, font)
    return sheet


def before_after(
    before: Tensor,
    after: Tensor,
    prompts: Sequence[str],
    *,
    verdicts: tuple[Sequence[bool | None], Sequence[bool | None]] | None = None,
    labels: tuple[str, str] = ("before", "after"),
    columns: int = 4,
    cell: int = 128,
) -> Image.Image:
    """Pairs side by side (same prompt, same noise), labelled, with the prompt under each pair.
    before, after: (B, 3, H, W)."""
    first, second = (
        [_fit(picture, cell) for picture in to_pil(_stills(media))] for media in (before, after)
    )
    if not first:
        raise ValueError("a before/after grid needs at least one pair")
    _check_lengths(len(first), after=second, prompts=prompts)
    for marks in verdicts or ():
        _check_lengths(len(first), verdicts=marks)
    columns = min(columns, len(first))
    font, pad, gap, text = _font(cell), 8, 24, _caption_height(2 * cell, prompts)
    head = font.size + 10
    wide, tall = 2 * cell + pad + gap, cell + text + pad
    rows = -(-len(first) // columns)
    sheet = Image.new("RGB", (columns * wide + gap, rows * tall + head + gap), PAPER)
    draw = ImageDraw.Draw(sheet)
    for c in range(columns):
        for side, label in enumerate(labels):
            x = gap + c * wide + side * (cell + pad) + cell / 2
            draw.text((x, 6), label, fill=FAINT if side == 0 else INK, font=font, anchor="ma")
    for i in range(len(first)):
        x, y = gap + (i % columns) * wide, head + (i // columns) * tall
        for side, pictures in enumerate((first, second)):
            _paste(
                sheet,
                pictures[i],
                (x + side * (cell + pad), y),
                cell,
                None if verdicts is None else verdicts[side][i],
            )
        _write(sheet, prompts[i], (x, y + cell + 4), 2 * cell + pad, font)
    return sheet


def _stills(media: Tensor) -> Tensor:
    return media[:, media.shape[1] // 2] if media.ndim == 5 else media


def _check_lengths(count: int, **columns: Sequence | None) -> None:
    for name, column in columns.items():
        if column is not None and len(column) != count:
            raise ValueError(f"{count} images but {len(column)} {name}; give one each")


def _fit(picture: Image.Image, cell: int) -> Image.Image:
    """Fit into cell x cell: whole-number enlargement without smoothing, or a smooth reduction."""
    long = max(picture.size)
    if long <= cell:
        factor = cell // long
        return picture.resize(
            (picture.width * factor, picture.height * factor), Image.Resampling.NEAREST
        )
    return picture.resize(
        (max(1, picture.width * cell // long), max(1, picture.height * cell // long)),
        Image.Resampling.LANCZOS,
    )


def _paste(
    sheet: Image.Image,
    picture: Image.Image,
    corner: tuple[int, int],
    cell: int,
    verdict: bool | None,
) -> None:
    x, y = corner[0] + (cell - picture.width) // 2, corner[1] + (cell - picture.height) // 2
    sheet.paste(picture, (x, y))
    if verdict is not None:
        colour = (26, 158, 92) if verdict else (214, 69, 65)
        ImageDraw.Draw(sheet).rectangle(
            (x - 2, y - 2, x + picture.width + 1, y + picture.height + 1), outline=colour, width=2
        )


def _font(cell: int) -> Any:
    return ImageFont.load_default(size=max(10, min(14, cell // 9)))


def _lines(text: str, width: int, font) -> list[str]:
    """Wrap at words to at most two lines; what does not fit ends in an ellipsis."""
    lines, words = [""], text.split()
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > 2 or any(font.getlength(line) > width for line in lines):
        lines = lines[:2]
        while lines[-1] and font.getlength(lines[-1] + "...") > width:
            lines[-1] = lines[-1][:-1]
        lines[-1] += "..."
    return lines


def _caption_height(width: int, captions: Sequence[str] | None) -> int:
    font = _font(width)
    return (
        0
        if captions is None
        else 8 + (font.size + 3) * max(len(_lines(c, width, font)) for c in captions)
    )


def _write(sheet: Image.Image, text: str, corner: tuple[int, int], width: int, font) -> None:
    draw = ImageDraw.Draw(sheet)
    for n, line in enumerate(_lines(text, width, font)):
        draw.text((corner[0], corner[1] + n * (font.size + 3)), line, fill=INK, font=font)
