"""Media between tensors, PIL and files.

One rounding rule everywhere: byte = round(255 * x) after a clamp to [0, 1], what a saved PNG holds
and what the reference RL codes score.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo

from flowrl.data.as_seen import ORIENTATION, as_seen, frame_as_seen, is_plain
from flowrl.runtime.install import install_line
from flowrl.runtime.paths import nearby
from flowrl.runtime.store import files

if TYPE_CHECKING:  # headers are read without torch, which takes seconds to import
    from torch import Tensor

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
VIDEO_SUFFIXES = (".mp4", ".gif")  # suffixes of videos that can be written
ARRAY = ".npy"  # suffix of a file that holds the numbers of any media as they are
# suffixes that are read with the extra "video"
PYAV_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi")
SMALL = 128  # px; frames whose shorter side has at most so many keep all colours in an .mp4
MEDIA_SUFFIXES = (*IMAGE_SUFFIXES, ".gif", *PYAV_SUFFIXES)  # suffixes that are read
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # formats that are read, whatever the suffix says
MAX_PIXELS = 2**26  # most pixels of a picture: 8192 x 8192
MAX_VIDEO_PIXELS = 2**29  # most pixels of all frames of a video together: 258 frames of 1920 x 1080

Kind = Literal["images", "videos", "arrays"]
WRITTEN: dict[Kind, tuple[str, ...]] = {
    "images": (*IMAGE_SUFFIXES, ARRAY),
    "videos": (*VIDEO_SUFFIXES, ARRAY),
    "arrays": (ARRAY,),
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the header of a file of media says."""

    size: tuple[int, int]  # width and height in pixels, as the file is seen
    alpha: bool  # whether pixels may be transparent
    frames: int  # 1 of a picture
    fps: float | None  # frames a second; None of a picture, and where the file does not say it


class UnreadableMedia(ValueError):
    """A file of media is too large, or not of the kind that is needed; the message names it."""


def media_kind(shape: Sequence[int]) -> Kind:
    """Tell what media of this shape are: images (n, 3, H, W), videos (n, F, 3, H, W), or arrays (n,
    *D), which is all others, such as motions (n, T, D) and paths (n, T, 2)."""
    pictures = len(shape) in (4, 5) and shape[-3] == 3
    return ("images" if len(shape) == 4 else "videos") if pictures else "arrays"


def to_uint8(media: Tensor) -> Tensor:
    """Round (..., 3, H, W) float in [0, 1] to uint8. Values outside are clamped, halves go to the
    even byte."""
    import torch

    return (media.detach().float().clamp(0, 1) * 255).round().to(torch.uint8)


def to_pil(media: Tensor) -> list[Image.Image]:
    """Convert (B, 3, H, W) or (3, H, W) float in [0, 1] to B images."""
    if media.ndim not in (3, 4) or media.shape[-3] != 3:
        raise ValueError(
            f"media has shape {tuple(media.shape)}; expected (B, 3, H, W) or (3, H, W)"
        )
    frames = media if media.ndim == 4 else media[None]
    return [Image.fromarray(frame) for frame in to_uint8(frames).permute(0, 2, 3, 1).cpu().numpy()]


def from_pil(images: Image.Image | Sequence[Image.Image]) -> Tensor:
    """Convert images of one size, as they are seen, to (B, 3, H, W) fp32 in [0, 1]."""
    import torch

    images = [images] if isinstance(images, Image.Image) else list(images)
    images = [as_seen(image) for image in images]
    sizes = sorted({image.size for image in images})
    if len(sizes) != 1:
        raise ValueError(
            f"images of one size make a batch; there are {len(images)} images of sizes {sizes}"
        )
    pixels = np.stack([np.asarray(image) for image in images])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float() / 255


def open_image(
    source: str | Path | bytes,
    *,
    max_pixels: int = MAX_PIXELS,
    formats: Sequence[str] = FORMATS,
    called: str = "the picture",
) -> Image.Image:
    """Open a picture and read only its header: the caller closes it, or uses it in `with`.

    source: a file, or its bytes, which errors name as `called`. ValueError where the header
    declares more than max_pixels pixels; Pillow's error about another format or a broken header
    passes through.
    """
    name = called if isinstance(source, bytes) else str(source)
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(file, formats=list(formats))
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        count = re.findall(r"\d+", str(error))[0]
        raise _too_large(name, f"{int(count):,} pixels", max_pixels) from None
    width, height = image.size
    if width * height > max_pixels:
        image.close()
        raise _too_large(name, f"{width} x {height} pixels", max_pixels)
    return image


def _too_large(name: object, size: str, most: int) -> UnreadableMedia:
    return UnreadableMedia(f"{name} has {size}, and at most {most:,} are decoded; make it smaller")


def read_image(path: Path) -> Tensor:
    """Read a picture as it is seen (flowrl/data/as_seen.py) -> (3, H, W) fp32 in [0, 1].

    A file that cannot be read, has more than MAX_PIXELS or is animated -> ValueError that names it.
    """
    return from_pil(read_picture(path))[0]


def read_picture(path: Path, *, content: bytes | None = None, alpha: bool = False) -> Image.Image:
    """Read a picture as `read_image` does, as a PIL image. content: the bytes of the file, which
    errors call `path`. alpha: transparent pixels stay so, as RGBA."""
    return _read(path, partial(as_seen, alpha=alpha), content)


def image_size(path: Path) -> tuple[int, int]:
    """Read (width, height) of `read_image` from the file's header alone."""
    return _read(path, lambda image: image.size[:: -1 if _oriented(image) > 4 else 1])


def has_frames(path: Path) -> bool:
    """Whether a file is a video or an animated picture."""
    return path.suffix.lower() in PYAV_SUFFIXES or _guarded(path, _frames_of)[1] > 1


def depends_on_reader(path: Path) -> bool:
    """Whether a file's pixels say less than how it is seen, so that another version of the reader
    may make other numbers of it: a video, transparency, a colour profile, a turned animation."""
    if path.suffix.lower() in PYAV_SUFFIXES:
        return True
    plain, turned, count = _guarded(
        path, lambda image: (is_plain(image), _oriented(image) != 1, _frames_of(image)[1])
    )
    return not plain or (turned and count > 1)


def check_readable(path: Path) -> None:
    """Raise ValueError that names the file where its header, a checksum of a PNG or the end of a
    JPEG says that it cannot be read; nothing is decoded. A video needs the extra "video"."""
    if path.suffix.lower() in PYAV_SUFFIXES:
        _pyav(f"reading {path.name}", "save it as .gif")
    else:
        _guarded(path, lambda image: image.verify())
        if path.suffix.lower() in (".jpg", ".jpeg") and not _ends(path, "JPEG"):
            raise UnreadableMedia(f"{path} cannot be read: it was cut off")


def _ends(source: Path | bytes, form: str) -> bool:
    """Whether a file, or its bytes, has the end that pictures of its format have; nothing else is
    read. The length that a WebP's header gives is compared with the file's."""
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        length = file.seek(0, 2)
        file.seek(0)
        head = file.read(8)
        file.seek(-min(length, 4096), 2)
        tail = file.read()
    if form == "WEBP":
        return int.from_bytes(head[4:], "little") + 8 <= length
    if form == "GIF":
        return tail.rstrip(b"\0").endswith(b";")
    return (b"IEND" if form == "PNG" else b"\xff\xd9") in tail


def header(path: Path, content: bytes | None = None) -> Header:
    """Read what a file's header says, as quickly as it can be: no pixel is decoded. content: the
    bytes of the file, which errors call `path`. A file that cannot be read, was cut off, or has no
    frames -> ValueError that names it. Video files need the extra "video"."""
    if content is None and path.suffix.lower() in PYAV_SUFFIXES:
        return _video_header(path)

    def still(image: Image.Image) -> Header:
        if not _ends(path if content is None else content, image.format or ""):
            raise UnreadableMedia(f"{path} cannot be read: it was cut off")
        frames, turned = _frames_of(image)[1], _oriented(image) > 4
        duration = image.info.get("duration") if frames > 1 else None
        return Header(
            size=image.size[::-1] if turned else image.size,
            alpha=image.has_transparency_data,
            frames=frames,
            fps=1000 / duration if duration else None,
        )

    return _guarded(path, still, content)


def _video_header(path: Path) -> Header:
    """Read the header of a video file, and count its packets only where that does not say how many
    frames there are."""
    av = _pyav(f"reading {path.name}", "save it as .gif")
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            packets = [entry.pos + entry.size for entry in stream.index_entries or ()]
            if packets and max(packets) > path.stat().st_size:
                raise UnreadableMedia(f"{path} cannot be read: it was cut off")
            square = stream.sample_aspect_ratio or 1
            size = (round(stream.width * square), stream.height)
            fps = float(stream.average_rate) if stream.average_rate else None
            alpha = stream.metadata.get("alpha_mode") == "1"
            frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
    except UnreadableMedia:
        raise
    except Exception as error:  # PyAV raises a kind for each of FFmpeg's errors
        raise ValueError(f"{path} cannot be read: {_reason(error)}") from None
    if not frames:
        raise UnreadableMedia(f"{path} is a video without frames")
    return Header(size=size, alpha=alpha, frames=frames, fps=fps)


def read_media(path: Path, *, frames: int) -> Tensor:
    """Read (3, H, W) of a picture, or (F, 3, H, W) of a video or an animated picture; fp32 in [0,
    1].

    frames: the most that are read, evenly spaced from the first to the last.
    """
    return read_frames(path, most=frames) if has_frames(path) else read_image(path)


def read_frames(path: Path, *, most: int | None = None) -> Tensor:
    """Read a video or an animated picture -> (F, 3, H, W) fp32 in [0, 1].

    most: how many frames are read, evenly spaced from the first to the last; None: all of them.
    Video files need the extra "video". A file that cannot be read, or has more than
    MAX_VIDEO_PIXELS in all its frames -> ValueError that names it.
    """
    if path.suffix.lower() in PYAV_SUFFIXES:
        return _of_video(path, most)
    return _guarded(path, lambda image: from_pil(list(_seek(image, path, most))))


def _seek(image: Image.Image, path: Path, most: int | None) -> Iterator[Image.Image]:
    """Frames of an animated picture."""
    first, count = _frames_of(image)
    width, height = image.size
    _check_video(path, width, height, count)
    for place in spaced(count, most):
        image.seek(first + place)
        yield as_seen(image)


def spaced(count: int, most: int | None) -> list[int]:
    """At most `most` of the numbers 0 ... count - 1, evenly spaced, the first and last among
    them."""
    number = count if most is None else min(most, count)
    return np.linspace(0, count - 1, number).round().astype(int).tolist()


def _frames_of(image: Image.Image) -> tuple[int, int]:
    """Number of the first frame of a picture, and the number of its frames."""
    if image.format == "MPO":  # a photo and the camera's previews of it, which are no frames
        return 0, 1
    count = getattr(image, "n_frames", 1)
    # the first is no frame if it is the picture that viewers without animation show instead
    apart = count > 1 and bool(image.info.get("default_image"))
    return int(apart), count - apart


def _check_video(path: Path, width: int, height: int, frames: int) -> None:
    if width * height * frames > MAX_VIDEO_PIXELS:
        size = f"{frames} frames of {width} x {height} pixels"
        raise _too_large(path, size, MAX_VIDEO_PIXELS)


def _of_video(path: Path, most: int | None) -> Tensor:
    """Read frames of a video file, which is opened twice: its frames are counted before any is
    decoded."""
    av = _pyav(f"reading {path.name}", "save it as .gif")
    if not path.is_file():
        raise ValueError(f"{path} cannot be read: it does not exist")
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            square = stream.sample_aspect_ratio or 1  # width of a pixel over its height
            count = sum(packet.size > 0 for packet in container.demux(stream))
            _check_video(path, round(stream.width * square), stream.height, count)
        wanted, found = set(spaced(count, most)), []
        with av.open(str(path)) as container:
            for place, frame in enumerate(_decoded(container, av)):
                size = (round(frame.width * square), frame.height)
                _check_video(path, *size, place + 1)
                found += [frame_as_seen(frame, size)] if place in wanted else []
        return from_pil(found)
    except UnreadableMedia:
        raise
    except Exception as error:  # PyAV raises a kind for each of FFmpeg's errors
        raise ValueError(f"{path} cannot be read: {_reason(error)}") from None


def _decoded(container: Any, av: Any) -> Iterator[Any]:
    """Decode the frames of an open video with their transparency, which FFmpeg's own decoders of
    VP8 and VP9 leave out."""
    stream = container.streams.video[0]
    library = {"vp8": "libvpx", "vp9": "libvpx-vp9"}.get(stream.codec_context.name)
    if library is None or stream.metadata.get("alpha_mode") != "1":
        yield from container.decode(video=0)
        return
    decoder = av.CodecContext.create(library, "r")
    for packet in container.demux(stream):
        yield from decoder.decode(packet)


def _reason(error: Exception) -> str:
    """Say an error of a library with its kind, and a sentence of ours as it is."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _pyav(doing: str, instead: str) -> Any:
    try:
        import av
    except ImportError as error:
        raise ValueError(
            f'{doing} needs the extra "video": {install_line("video")}, or {instead}'
        ) from error
    return av


def _oriented(image: Image.Image) -> int:
    """Read EXIF's orientation of an open picture, which is above 4 if width and height change
    places. A PNG may have it behind its pixels."""
    tagged = any(key == "exif" or "xmp" in key.lower() for key in image.info)
    if not tagged and not (image.format == "PNG" and _tagged_at_end(image.fp)):
        return 1
    return int(image.getexif().get(ORIENTATION, 1))


def _tagged_at_end(file: Any) -> bool:
    """Whether chunks of an open PNG hold EXIF or XMP; none is decoded."""
    here, found = file.tell(), False
    file.seek(8)
    while not found and len(head := file.read(8)) == 8:
        found = head[4:] in (b"eXIf", b"iTXt")
        file.seek(int.from_bytes(head[:4]) + 4, 1)
    file.seek(here)
    return found


def _read(path: Path, read: Callable[[Image.Image], T], content: bytes | None = None) -> T:
    """Apply `read` to a file that holds one picture, or to its bytes."""
    if path.suffix.lower() in PYAV_SUFFIXES:
        raise UnreadableMedia(f"{path} is a video, and one picture is needed; save a frame as .png")

    def still(image: Image.Image) -> T:
        frames = _frames_of(image)[1]
        if frames > 1:
            raise UnreadableMedia(
                f"{path} is animated ({frames} frames), and one picture is needed; save the frame"
                " that is meant as .png"
            )
        return read(image)

    return _guarded(path, still, content)


def _guarded(path: Path, read: Callable[[Image.Image], T], content: bytes | None = None) -> T:
    """Return read(image); ValueError that names the file where that fails in any way."""
    try:
        source = path if content is None else content
        with open_image(source, called=str(path)) as image:
            return read(image)
    except UnreadableMedia:
        raise
    # Pillow raises OSError, SyntaxError, struct.error ... for broken files and broken EXIF
    except Exception as error:
        here = content is not None or path.is_file()
        reason = _reason(error) if here else f"it does not exist{nearby(path)}"
        raise ValueError(f"{path} cannot be read: {reason}") from None


def save(media: Tensor, path: str | Path, *, fps: int = 16, about: str = "") -> Path:
    """Write one image (3, H, W) or one video (F, 3, H, W), float in [0, 1], or one array of any
    other shape, as it is.

    The suffix chooses the format; one that does not fit the media -> ValueError. .npy holds the
    numbers of any media in fp32. .mp4 needs the extra "video"; .gif does without. Folders are made.
    about: a text that the file carries, except .npy.
    """
    path, about = Path(path), about.encode("utf-8", "replace").decode()
    _check_suffix(path, tuple(media.shape))
    noted = _noted(path.suffix.lower(), about) if about else {}
    if path.suffix.lower() == ARRAY:
        files.write(path, array_bytes(media))
    elif path.suffix.lower() == ".mp4":
        _save_mp4(media, path, fps, about)
    elif media.ndim == 4:
        first, *others = to_pil(media)
        moving = {"save_all": True, "append_images": others, "duration": 1000 / fps, "loop": 0}
        files.write(path, encoded(first, path.suffix, **moving, **noted))
    else:
        files.write(path, encoded(to_pil(media)[0], path.suffix, **noted))
    return path


def _noted(suffix: str, about: str) -> dict[str, Any]:
    """Options of Pillow that put a text where A1111 and its relatives read settings: "parameters"
    of a PNG, EXIF's UserComment of a JPEG or WebP; the comment of a GIF."""
    if suffix == ".png":
        info = PngInfo()
        info.add_text("parameters", about)
        return {"pnginfo": info}
    if suffix == ".gif":
        return {"comment": about}
    exif = Image.Exif()
    own = exif.get_ifd(ExifTags.IFD.Exif)
    own[ExifTags.Base.UserComment] = b"UNICODE\0" + about.encode("utf-16-be")
    return {"exif": exif}


def check_output(path: Path) -> None:
    """Raise ValueError for a suffix with which no media are saved, or which needs a package that is
    not installed."""
    known = dict.fromkeys([*IMAGE_SUFFIXES, *VIDEO_SUFFIXES, ARRAY])
    if path.suffix.lower() not in known:
        raise ValueError(
            f'"{path.name}": media are saved as {", ".join(known)}; the suffix is "{path.suffix}"'
        )
    if path.suffix.lower() == ".mp4":
        _pyav(f"writing {path.name}", "save as .gif")


def fitting(path: Path, media: Tensor) -> Path:
    """Give a path another suffix where its own does not suit the media (one of them, as `save`
    takes it)."""
    kind = media_kind((1, *media.shape))
    even = kind == "videos" and all(side % 2 == 0 for side in media.shape[-2:])
    if path.suffix.lower() == ".mp4" and kind == "videos" and not even:
        return path.with_suffix(".gif")
    if path.suffix.lower() in WRITTEN[kind]:
        return path
    mp4 = even and find_spec("av") is not None
    usual = {"images": ".png", "videos": ".mp4" if mp4 else ".gif", "arrays": ARRAY}
    return path.with_suffix(usual[kind])


def encoded(image: Image.Image, suffix: str = ".png", **options: Any) -> bytes:
    """Encode an image as the bytes of a file. suffix: names the format; options: Pillow's options
    for that format."""
    buffer = io.BytesIO()
    image.save(buffer, Image.registered_extensions()[suffix.lower()], **options)
    return buffer.getvalue()


def array_bytes(media: Tensor) -> bytes:
    """Encode numbers as the bytes of a .npy file, in fp32."""
    buffer = io.BytesIO()
    np.save(buffer, media.detach().float().cpu().numpy())
    return buffer.getvalue()


def _check_suffix(path: Path, shape: tuple[int, ...]) -> None:
    kind = media_kind((1, *shape))
    array = f"an array of shape {shape}, which is no picture,"
    what = {"images": "an image", "videos": "a video", "arrays": array}[kind]
    if path.suffix.lower() not in WRITTEN[kind]:
        raise ValueError(
            f'"{path.name}": {what} is saved as {", ".join(WRITTEN[kind])}; the suffix is'
            f' "{path.suffix}"'
        )


def _save_mp4(media: Tensor, path: Path, fps: int, about: str) -> None:
    av = _pyav(f"writing {path.name}", "save as .gif")
    height, width = media.shape[-2:]
    if width % 2 or height % 2:
        raise ValueError(
            f"mp4 (yuv420p) needs even sides; the frames are {width}x{height}; save as .gif"
        )
    # one sample of colour for four pixels hides the colour of small objects in small frames
    form = "yuv444p" if min(height, width) <= SMALL else "yuv420p"
    with files.replacing(path) as temporary, av.open(str(temporary), "w", "mp4") as container:
        container.metadata["comment"] = about
        stream = container.add_stream("libx264", rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = width, height, form
        stream.options = {"crf": "18"}
        for pixels in to_uint8(media).permute(0, 2, 3, 1).cpu().numpy():
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
