"""What travels between a reward server and its clients: JSON, whose tensors arrive bit for bit.

GET /health is open to all; GET /version returns About; POST /score takes a Question and returns an
Answer. Nothing is ever unpickled.

A tensor is {"dtype", "shape", "data"}; data is base64 of zlib of its little-endian bytes, plane by
plane: the first bytes of all numbers, then the second ones, and so on. Exponents next to exponents
compress (level 1) a tenth to a third smaller than the plain bytes, and faster. dtype "unorm8" means
fp32 = byte / 255. Pictures with 8 bits a channel may also come as {"png": [base64 of an RGB PNG,
...]}, which any language writes. A number that is not finite is null.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import inspect
import io
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pydantic
import torch
from PIL import Image
from torch import Tensor

from flowrl.data.media import open_image, to_pil, to_uint8
from flowrl.rewards.core.reward import Reward
from flowrl.types import MediaContext

PROTOCOL = 1
MAX_SAMPLES = 1024  # of one request
# columns of a MediaContext that hold one tensor row a sample
TENSORS = ("source", "actions", "reference")
STORED = {
    "float32": "<f4",
    "float64": "<f8",
    "int64": "<i8",
    "int32": "<i4",
    "uint8": "|u1",
    "unorm8": "|u1",
}
LONGEST = 2**32  # of a dimension
PIECE = 2**20  # bytes: how much of a tensor is unpacked at once
PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_HEAD = PNG_START + b"\x00\x00\x00\rIHDR"
RGB_OF_BYTES = b"\x08\x02"  # bit depth 8, colour type 2


Int64 = Annotated[int, pydantic.Field(ge=-(2**63), lt=2**63)]


class TooLarge(ValueError):
    """More than a server takes in one request."""


class Record(pydantic.BaseModel):
    """Strict: a number is not a text, an unknown key is an error."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )


class Numbers(Record):
    """One tensor."""

    dtype: Literal["float32", "float64", "int64", "int32", "uint8", "unorm8"]
    shape: list[Annotated[int, pydantic.Field(gt=0, le=LONGEST)]] = pydantic.Field(
        max_length=8, fail_fast=True
    )
    data: str
    scratch: ClassVar[int] = 0  # bytes beside the tensor while it is unpacked, but for pieces

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor when unpacked."""
        unpacked = "<f4" if self.dtype == "unorm8" else STORED[self.dtype]
        return math.prod(self.shape) * np.dtype(unpacked).itemsize


class Pngs(Record):
    """(B, 3, H, W) pictures."""

    png: list[str] = pydantic.Field(min_length=1, fail_fast=True)

    @property
    def nbytes(self) -> int:
        """Bytes as fp32, from the heads of the files."""
        return sum(12 * width * height for width, height in self._sizes())

    @property
    def scratch(self) -> int:
        """Bytes beside the tensor, while it is unpacked: one picture and its file."""
        pixels = max(width * height for width, height in self._sizes())
        return 7 * pixels + 2 * max(map(len, self.png))

    def _sizes(self) -> list[tuple[int, int]]:
        return [_png_size(text, number) for number, text in enumerate(self.png)]


class ScoreRequest(Record):
    """Body of POST /score.

    media, prompts and the columns have B rows. reward: a label of those served; None: their
    weighted total.
    """

    id: str = pydantic.Field("", max_length=100)
    prompts: list[str] = pydantic.Field(min_length=1, fail_fast=True)
    media: Pngs | Numbers
    reward: str | None = None
    meta: Annotated[list[dict[str, Any]], pydantic.Field(fail_fast=True)] | None = None
    group: Annotated[list[Int64], pydantic.Field(fail_fast=True)] | None = None
    source: Pngs | Numbers | None = None
    actions: Numbers | None = None
    reference: Pngs | Numbers | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors when unpacked."""
        return sum(record.nbytes for record in self._records())

    @property
    def scratch(self) -> int:
        """Bytes beside the tensors, while they are unpacked one after the other."""
        return max(record.scratch for record in self._records())

    def _records(self) -> list[Pngs | Numbers]:
        columns = [getattr(self, name) for name in TENSORS]
        return [self.media, *(column for column in columns if column is not None)]


class Answer(pydantic.BaseModel):
    """What POST /score returns.

    scores[i] is what was asked for, null where sample i could not be scored; errors[i] says why.
    """

    model_config = pydantic.ConfigDict(strict=True, allow_inf_nan=False)

    id: str
    version: str
    scores: list[float | None]
    parts: dict[str, list[float | None]]
    errors: list[str | None]


class Served(pydantic.BaseModel):
    """What a client must know of a reward.

    rounds: it reads no more of a picture than an 8-bit PNG holds.
    """

    model_config = pydantic.ConfigDict(strict=True, allow_inf_nan=False)

    scale: str
    needs: list[str]
    reads: list[str]
    reads_prompt: bool
    video: Literal["yes", "no", "only"]
    rounds: bool
    weight: float


class About(pydantic.BaseModel):
    """What GET /version returns.

    version: a hash of the rewards, their settings and their code. total: their weighted sum.
    """

    model_config = pydantic.ConfigDict(strict=True, allow_inf_nan=False)

    protocol: int
    flowrl: str
    version: str
    rewards: dict[str, Served]
    total: Served
    max_mb: float = pydantic.Field(gt=0, le=1e6)
    max_samples: int = pydantic.Field(ge=1, le=1_000_000)


def about(
    rewards: Mapping[str, Reward], weights: Mapping[str, float], *, flowrl: str, max_mb: float
) -> About:
    """What a client must know of loaded rewards; flowrl: the version of this package."""
    served = {
        label: _served([reward], weights[label], reward.scale) for label, reward in rewards.items()
    }
    scale = "; ".join(f"{one.weight:g} x {label} ({one.scale})" for label, one in served.items())
    if list(weights.values()) == [1.0]:
        scale = next(iter(served.values())).scale
    return About(
        protocol=PROTOCOL,
        flowrl=flowrl,
        version=_version(rewards, flowrl, weights),
        rewards=served,
        total=_served(list(rewards.values()), 1.0, scale),
        max_mb=max_mb,
        max_samples=MAX_SAMPLES,
    )


def _served(rewards: list[Reward], weight: float, scale: str) -> Served:
    kinds = {reward.video for reward in rewards}
    return Served(
        scale=scale,
        weight=weight,
        needs=sorted(set().union(*(reward.needs for reward in rewards))),
        reads=sorted(set().union(*(reward.reads for reward in rewards))),
        reads_prompt=any(reward.reads_prompt for reward in rewards),
        video="only" if "only" in kinds else "no" if "no" in kinds else "yes",
        rounds=all(getattr(reward.settings, "rounding", None) is True for reward in rewards),
    )


def _version(rewards: Mapping[str, Reward], flowrl: str, weights: Mapping[str, float]) -> str:
    """A hash of labels, settings, source files and weights.

    Two servers of one version give the same scores.
    """
    parts: list[Any] = [flowrl, dict(weights)]
    for label, reward in rewards.items():
        code = getattr(reward, "function", type(reward))
        name, settings = getattr(code, "__qualname__", ""), reward.settings.model_dump()
        parts.append([label, reward.name, name, settings, _source_hash(code)])
    text = json.dumps(
        parts, default=lambda value: getattr(value, "__qualname__", type(value).__qualname__)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source_hash(code: Callable[..., Any]) -> str:
    """sha256 of the file that holds a function or class; "": it was written in a terminal."""
    try:
        file = Path(inspect.getsourcefile(code) or "")
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""


def pack(tensor: Tensor, *, dtype: str | None = None) -> dict[str, Any]:
    """A tensor as JSON takes it; dtype: "unorm8" for bytes that stand for [0, 1]."""
    dtype = str(tensor.dtype).removeprefix("torch.") if dtype is None else dtype
    if dtype not in STORED:
        raise ValueError(
            f"a tensor of type {tensor.dtype} does not travel to a reward server; convert it to one"
            f" of {', '.join(STORED)}"
        )
    stored = np.ascontiguousarray(tensor.detach().cpu().numpy(), STORED[dtype])
    planes = stored.reshape(-1).view(np.uint8).reshape(-1, stored.itemsize).T.tobytes()
    return {
        "dtype": dtype,
        "shape": list(tensor.shape),
        "data": base64.b64encode(zlib.compress(planes, 1)).decode(),
    }


def pack_media(media: Tensor, *, rounds: bool = False) -> dict[str, Any]:
    """(B, 3, H, W) or (B, F, 3, H, W) fp32 as JSON takes it.

    As bytes if nothing is lost by it, or if rounds: the reader rounds to bytes anyway.
    """
    media = media.detach().cpu().contiguous()
    levels = to_uint8(media)
    restored = levels.float() / 255
    if not rounds and not torch.equal(restored.view(torch.int32), media.view(torch.int32)):
        return pack(media)
    if media.ndim == 5:
        return pack(levels, dtype="unorm8")
    return {"png": [png(image) for image in to_pil(media)]}


def unpack(record: Numbers | Pngs) -> Tensor:
    """The tensor that was packed, bit for bit; data of another dtype or shape -> ValueError."""
    if isinstance(record, Pngs):
        return _pictures(record.png)
    bytes_in_01 = record.dtype == "unorm8"
    dtype = np.dtype(np.float32 if bytes_in_01 else STORED[record.dtype])
    numbers = np.empty(math.prod(record.shape), dtype)
    planes = numbers[:, None] if bytes_in_01 else numbers.view(np.uint8).reshape(-1, dtype.itemsize)
    _fill(planes.T, record)
    tensor = torch.from_numpy(numbers.view(dtype.newbyteorder("=")).reshape(record.shape))
    return tensor.div_(255) if bytes_in_01 else tensor


def _fill(planes: np.ndarray, record: Numbers) -> None:
    """Write the bytes in a record's data, which are exactly as many as `planes` has places."""
    filled, size = 0, planes.shape[1]
    for piece in _inflated(record):
        if filled + len(piece) > planes.size:
            raise _misfit(record, planes.size, f"more than {planes.size}")
        fresh = np.frombuffer(piece, np.uint8)
        while len(fresh):
            plane, place = divmod(filled, size)
            part, fresh = fresh[: size - place], fresh[size - place :]
            planes[plane, place : place + len(part)] = part
            filled += len(part)
    if filled < planes.size:
        raise _misfit(record, planes.size, str(filled))


def _inflated(record: Numbers) -> Iterator[bytes]:
    """The bytes in a record's data, a piece at a time."""
    inflate, step = zlib.decompressobj(), 4 * PIECE // 3 // 4 * 4
    try:
        for start in range(0, len(record.data), step):
            text = record.data[start : start + step]
            piece = inflate.decompress(binascii.a2b_base64(text, strict_mode=True), PIECE)
            while piece:
                yield piece
                piece = inflate.decompress(inflate.unconsumed_tail, PIECE)
    except (ValueError, zlib.error) as error:
        raise ValueError(
            f"the data of a {record.dtype} tensor is not base64 of zlib: {error}"
        ) from None
    if not inflate.eof:
        raise ValueError(f"the data of a {record.dtype} tensor ends too early")


def _misfit(record: Numbers, expected: int, got: str) -> ValueError:
    return ValueError(
        f"a {record.dtype} tensor of shape {tuple(record.shape)} has {expected} bytes; its data"
        f" holds {got}"
    )


def columns_of(context: MediaContext | None, needs: frozenset[str]) -> dict[str, Any]:
    """The columns that a reward needs, by name, tensors on CPU; an absent one -> ValueError."""
    out = {name: getattr(context, name, None) for name in sorted(needs)}
    if missing := [name for name, value in out.items() if value is None]:
        raise ValueError(
            f"the reward needs the context columns {', '.join(missing)}, which were not given"
        )
    return {
        name: value.detach().cpu() if isinstance(value, Tensor) else value
        for name, value in out.items()
    }


def meta_text(meta: dict[str, Any]) -> str:
    """One prompt's meta as JSON, keys in order; what JSON cannot hold -> ValueError."""
    try:
        return json.dumps(meta, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"meta {meta!r} cannot travel to a reward server as JSON: {error}"
        ) from None


def png(image: Image.Image) -> str:
    """A picture without loss, as base64 of a PNG."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()


def _png_size(text: str, number: int) -> tuple[int, int]:
    """(width, height) from the head of a file, before anything is inflated."""
    try:
        head = base64.b64decode(text[:36], validate=True)
    except (binascii.Error, ValueError):
        head = b""
    if not head.startswith(PNG_HEAD) or head[24:26] != RGB_OF_BYTES:
        raise ValueError(f"png {number} is not base64 of an RGB PNG with 8 bits a channel")
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


def _pictures(texts: list[str]) -> Tensor:
    """(B, 3, H, W) fp32 in [0, 1]."""
    sizes = [_png_size(text, number) for number, text in enumerate(texts)]
    if len(set(sizes)) != 1:
        raise ValueError(
            f"the pictures of one request have one size; these have {sorted(set(sizes))}"
        )
    (width, height), count = sizes[0], len(texts)
    media = torch.empty(count, 3, height, width)
    for number, text in enumerate(texts):
        pixels = torch.from_numpy(_pixels(text, number, (width, height)))
        media[number] = pixels.permute(2, 0, 1)
    return media.div_(255)


def _pixels(text: str, number: int, size: tuple[int, int]) -> np.ndarray:
    """(H, W, 3) bytes of a PNG, which must have the size that its first head says."""
    try:
        file = _bare(binascii.a2b_base64(text, strict_mode=True))
        with open_image(file, formats=["PNG"]) as image:
            if (image.size, image.mode) != (size, "RGB"):  # by a second head
                raise ValueError(
                    f"its head says {size} RGB, its pixels are {image.size} {image.mode}"
                )
            return np.array(image)
    # Pillow raises OSError, SyntaxError, struct.error, zlib.error ... for broken files
    except Exception as error:
        raise ValueError(f"png {number} cannot be read: {type(error).__name__}: {error}") from None


def _bare(file: bytes) -> bytes:
    """A PNG without what no pixel needs, as compressed texts, which could inflate to any size."""
    kept, at = [PNG_START], len(PNG_START)
    while at < len(file):
        end = at + 12 + int.from_bytes(file[at : at + 4])
        if not file[at + 4 : at + 5].islower():  # of chunks that may be ignored
            kept.append(file[at:end])
        at = end
    return b"".join(kept)
