"""Pictures and videos of a run, small enough for one page: pairs of before and after training, and
samples of the whole run. All is read from samples/; what is damaged is left out.
"""

from __future__ import annotations

import base64
import io
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# most bytes of a page's pairs, and of its samples; base64 makes four bytes of three
PAIRS, SAMPLES = 1_000_000, 600_000
TINY = 96  # most pixels a side of pictures that keep every pixel
# (side, WebP's quality) of sheets and of single pictures, from the best to the smallest
SHEETS = ((1120, 75), (1120, 45), (768, 50), (512, 40), (256, 40))
SINGLES = ((384, 80), (256, 75), (256, 50), (128, 40))
CLIPS = ((256, 30), (160, 36))  # side, CRF of videos
# (right before, right after) -> kind of a pair, and what it says
KINDS: dict[tuple[int, ...], tuple[str, str]] = {
    (0, 1): ("fixed", "fixed"),
    (1, 0): ("broken", "broken"),
    (1, 1): ("same", "right in both"),
    (0, 0): ("same", "wrong in both"),
}
# errors that NumPy raises about a file that was cut off or changed
TORN = (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error)
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One prompt and one noise, before and after training; each list has one entry a side."""

    prompt: str  # text of the prompt; "" where older versions did not keep it
    kind: str  # "fixed", "broken" or "same", by the verdicts; "" without verdicts
    said: str  # what the verdicts say, in words
    pictures: list[str]  # data URIs
    videos: list[str]  # data URIs of videos; [] where there are none
    originals: list[str]  # files of the videos, as paths in the run folder; [] for pictures
    tiny: bool  # whether pixels are enlarged as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a page shows of samples/."""

    sides: list[str]  # sides that were kept, of "before" and "after"
    pairs: list[Pair]  # pairs of these sides; [] where nothing here draws them
    judge: str  # name of the value whose verdicts make the kinds of pairs; "" without
    course: dict[int, str]  # iteration -> data URI of its samples, for each tenth of the run


def of_run(samples: Path) -> Shown:
    """Read what a page shows; a live page is made often and encodes only what has changed."""
    files = sorted(samples.glob("**/*")) if samples.is_dir() else []
    return _of_files(samples, tuple((str(f), f.stat().st_mtime_ns) for f in files))


@lru_cache(maxsize=4)
def _of_files(samples: Path, files: tuple[tuple[str, int], ...]) -> Shown:
    """files: names and times, which tell old content from new."""
    both = [(stem, arrays(samples / f"{stem}.npz")) for stem in ("before", "after")]
    kept = {stem: own for stem, own in both if own}
    judged = [name for name in kept.get("after", ()) if name in kept.get("before", ())]
    judge = next((name for name in judged if name.startswith("verdicts.")), "")
    course = _course(samples)
    return Shown(
        sides=[*kept],
        pairs=_pairs(samples, kept, judge),
        judge=judge.removeprefix("verdicts."),
        course=dict(zip(course, _fitted(_sheet, course.values(), SHEETS, SAMPLES), strict=True)),
    )


def arrays(path: Path) -> dict[str, np.ndarray]:
    """Read a file of samples that an evaluation kept; {} where it is missing or damaged."""
    try:
        with np.load(path) as content:
            return dict(content)
    except TORN:
        return {}


def _pairs(samples: Path, kept: Mapping[str, Arrays], judge: str) -> list[Pair]:
    media, size = _drawn([*kept.values()]), len(kept) or 1
    places = [(stem, i) for i in range(len(media) // size) for stem in kept]
    found = [next(samples.glob(f"{stem}/{i:02d}.*"), None) for stem, i in places]
    videos = _fitted(_clip, found, CLIPS, PAIRS * 3 // 4, kind="video/mp4")
    pictures = _fitted(_webp, media, SINGLES, PAIRS // 4 if any(videos) else PAIRS)
    out = []
    for _, i in places[::size]:
        own = slice(size * i, size * i + size)
        prompts = [*kept.values()][-1].get("prompts", ())
        marks = tuple(int(side[judge][i]) for side in kept.values()) if judge else None
        kind, said = KINDS.get(marks, ("same", "not judged")) if marks else ("", "")
        out.append(
            Pair(
                prompt=str(prompts[i]) if len(prompts) else "",
                kind=kind,
                said=said,
                pictures=pictures[own],
                videos=videos[own] if all(videos[own]) else [],
                originals=[f"samples/{p.parent.name}/{p.name}" for p in found[own] if p],
                tiny=max(media[0].size) <= TINY,
            )
        )
    # what training broke comes first
    return sorted(out, key=lambda pair: ("broken", "fixed", "same", "").index(pair.kind))


def _drawn(kept: Sequence[Arrays]) -> list[Image.Image]:
    """Draw all sides of each pair, one after the other; [] where they do not fit together, or
    nothing here draws their shape."""
    key = next((key for key in ("images", "media") if all(key in own for own in kept)), "")
    if not kept or len({(own[key].shape, own[key].dtype) if key else "" for own in kept}) != 1:
        return []
    both = np.stack([own[key] for own in kept], 1).reshape(-1, *kept[0][key].shape[1:])
    if key == "images" and (both.ndim != 4 or both.shape[1] != 3 or both.dtype != np.uint8):
        return []
    if key == "images":
        return [Image.fromarray(picture) for picture in both.transpose(0, 2, 3, 1)]
    # imported here: only media that are no pictures need torch
    import torch

    from flowrl.report import plots

    drawable = plots.drawable(both.shape)
    return plots.drawings(torch.from_numpy(both), 256) if drawable else []


def _course(samples: Path) -> dict[int, tuple[Path, int]]:
    """Iteration -> (path, time) of its sheet, for the first one and each tenth of the run."""
    names = [(re.fullmatch(r"iteration-(\d{6,})\.png", p.name), p) for p in samples.glob("*.png")]
    sheets = {int(match[1]): path for match, path in names if match}
    tenths = [max(sheets) * k / 10 for k in range(11)] if sheets else []
    chosen = sorted({min(sorted(sheets), key=lambda i: abs(i - t)) for t in tenths})
    files = {i: (sheets[i], sheets[i].stat().st_mtime_ns) for i in chosen}
    return {i: file for i, file in files.items() if _sheet(file, *SHEETS[0])}


@lru_cache(maxsize=128)
def _sheet(file: tuple[Path, int], side: int, quality: int) -> bytes:
    """Encode a picture once, though a live page asks often; b"" if it is damaged. file: (path,
    time)."""
    try:
        with Image.open(file[0]) as image:
            return _webp(image.convert("RGB"), side, quality)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return b""


# ---------------------------------------------------------------------------
# encoding


def _fitted(
    encode: Callable[[Any, int, int], bytes],
    items: Iterable[Any],
    steps: Sequence[tuple[int, int]],
    most: int,
    kind: str = "image/webp",
) -> list[str]:
    """Encode items as data URIs by the first of `steps` that makes at most `most` bytes of them
    all, else by the last one; "" for those that are damaged, or do not fit even so."""
    items, encoded = [*items], list[bytes]()
    for step in steps:
        encoded, left = [], most
        for item in items:
            if left >= 0 or step == steps[-1]:
                encoded.append(encode(item, *step))
                left -= len(encoded[-1])
        if left >= 0:
            break
    sums = accumulate(map(len, encoded))
    return [
        f"data:{kind};base64,{base64.b64encode(data).decode()}" if data and total <= most else ""
        for data, total in zip(encoded, sums, strict=True)
    ]


def _webp(picture: Image.Image, side: int, quality: int) -> bytes:
    reduced, buffer = picture.copy(), io.BytesIO()
    reduced.thumbnail((side, side))
    reduced.save(buffer, "WEBP", quality=quality, lossless=max(picture.size) <= TINY, method=2)
    return buffer.getvalue()


def _clip(path: Path | None, side: int, crf: int) -> bytes:
    """Encode a video again, with a smaller side; b"" where it is damaged, or PyAV is missing."""
    if path is None or find_spec("av") is None:
        return b""
    import av

    buffer = io.BytesIO()
    try:
        with av.open(str(path)) as source, av.open(buffer, "w", "mp4") as out:
            video = source.streams.video[0]
            scale = min(1, side / max(video.width, video.height))
            stream = out.add_stream("libx264", rate=video.average_rate)
            width, height = (max(2, int(n * scale) // 2 * 2) for n in (video.width, video.height))
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.options = {"crf": str(crf), "preset": "veryfast"}
            for frame in source.decode(video):
                out.mux(stream.encode(frame.reformat(width, height, "yuv420p")))
            out.mux(stream.encode())
    except (av.FFmpegError, LookupError):
        return b""
    return buffer.getvalue()
