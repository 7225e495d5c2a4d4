"""What travels between a reward server and its clients: JSON, whose tensors arrive bit for bit.
Nothing is ever unpickled.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import torch
from PIL import Image
from torch import Tensor

from flowrl.data.media import to_pil, to_uint8
from flowrl.rewards.core.reward import Reward
from flowrl.types import MediaContext

PROTOCOL = 1
MAX_SAMPLES = 1024  # of one request
TENSORS = (
    "source",
    "actions",
    "reference",
)  # columns of a MediaContext that hold one tensor row a sample
STORED = {
    "float32": "<f4",
    "float64": "<f8",
    "int64": "<i8",
    "int32": "<i4",
    "uint8": "|u1",
    "unorm8": "|u1",
}
PNG_HEAD = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
RGB_OF_BYTES = b"\x08\x02"  # bit depth 8, colour type 2


class TooLarge(ValueError):
    """More than a server takes in one request."""


class Record(pydantic.BaseModel):
    """Strict: a number is no text, an unknown key is an error."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )


class Numbers(Record):
    """One tensor."""

    dtype: Literal["float32", "float64", "int64", "int32", "uint8", "unorm8"]
    shape: list[pydantic.PositiveInt] = pydantic.Field(max_length=8)
    data: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor when unpacked."""
        return math.prod(self.shape) * (
            4 if self.dtype == "unorm8" else np.dtype(STORED[self.dtype]).itemsize
        )


class Pngs(Record):
    """(B, 3, H, W) pictures."""

    png: list[str] = pydantic.Field(min_length=1)

    @property
    def nbytes(self) -> int:
        """Bytes as fp32, from the heads of the files."""
        return sum(
            12 * width * height for width, height in map(_png_size, self.png, range(len(self.png)))
        )


class Question(Record):
    """Body of POST /score. media, prompts and the columns have B rows; reward: a label of those
    served, None: their weighted total."""

    id: str = pydantic.Field("", max_length=100)
    prompts: list[str] = pydantic.Field(min_length=1)
    media: Pngs | Numbers
    reward: str | None = None
    meta: list[dict[str, Any]] | None = None
    group: list[Annotated[int, pydantic.Field(ge=-(2**63), lt=2**63)]] | None = None
    source: Pngs | Numbers | None = None
    actions: Numbers | None = None
    reference: Pngs | Numbers | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors when unpacked."""
        return sum(
            part.nbytes
            for part in (self.media, *(getattr(self, name) for name in TENSORS))
            if part is not None
        )


class Answer(pydantic.BaseModel):
    """What POST /score returns: scores[i] is what was asked for, null where sample i could not be
    scored, and errors[i] says why."""

    model_config = pydantic.ConfigDict(strict=True, allow_inf_nan=False)

    id: str
    version: str
    scores: list[float | None]
    parts: dict[str, list[float | None]]
    errors: list[str | None]


class Served(pydantic.BaseModel):
    """What a client must know of a reward. rounds: it reads no more of a picture than an 8-bit PNG
    holds."""

    scale: str
    needs: list[str]
    reads: list[str]
    reads_prompt: bool
    video: Literal["yes", "no", "only"]
    rounds: bool
    weight: float


class About(pydantic.BaseModel):
    """What GET /version returns. version: a hash of the rewards, their settings and their code;
    total: their weighted sum."""

    protocol: int
    flowrl: str
    version: str
    rewards: dict[str, Served]
    total: Served
    max_mb: float
    max_samples: int


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
    version = _version(rewards, [flowrl, dict(weights)])
    total = _served(list(rewards.values()), 1.0, scale)
    return About(
        protocol=PROTOCOL,
        flowrl=flowrl,
        version=version,
        rewards=served,
        total=total,
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


def _version(rewards: Mapping[str, Reward], parts: list[Any]) -> str:
    """A hash of labels, settings and source files, and of parts: two servers of one version give
    the same scores."""
    for label, reward in rewards.items():
        code = getattr(reward, "function", type(reward))
        try:
            source = hashlib.sha256(
                Path(inspect.getsourcefile(code) or "").read_bytes()
            ).hexdigest()
        except (OSError, TypeError):  # written in a terminal
            source = ""
        parts.append(
            [
                label,
                reward.name,
                getattr(code, "__qualname__", ""),
                reward.settings.model_dump(),
                source,
            ]
        )
    text = json.dumps(
        parts, default=lambda value: getattr(value, "__qualname__", type(value).__qualname__)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
    """(B, 3, H, W) or (B, F, 3, H, W) fp32; as bytes if nothing is lost by it, or if rounds: the
    reader rounds to bytes anyway."""
    media = media.detach().cpu().contiguous()
    levels = to_uint8(media)
    if not rounds and not torch.equal(
        (levels.float() / 255).view(torch.int32), media.view(torch.int32)
    ):
        return pack(media)
    return (
        pack(levels, dtype="unorm8")
        if media.ndim == 5
        else {"png": [png(image) for image in to_pil(media)]}
    )


def unpack(record: Numbers | Pngs) -> Tensor:
    """The tensor that was packed, bit for bit; what does not fit its own dtype and shape ->
    ValueError."""
    if isinstance(record, Pngs):
        return _pictures(record.png)
    dtype = np.dtype(STORED[record.dtype])
    expected = math.prod(record.shape) * dtype.itemsize
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(base64.b64decode(record.data, validate=True), expected + 1)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise ValueError(
            f"the data of a {record.dtype} tensor is not base64 of zlib: {error}"
        ) from None
    if len(raw) != expected or not inflate.eof:
        got = f"more than {expected}" if len(raw) > expected else f"{len(raw)}"
        raise ValueError(
            f"a {record.dtype} tensor of shape {tuple(record.shape)} has {expected} bytes; its data"
            f" holds {got}"
        )
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1)
    tensor = torch.from_numpy(
        np.array(planes.T, order="C")
        .reshape(-1)
        .view(dtype.newbyteorder("="))
        .reshape(record.shape)
    )
    return tensor.float() / 255 if record.dtype == "unorm8" else tensor


def columns_of(context: MediaContext | None, needs: frozenset[str]) -> dict[str, Any]:
    """The columns that a reward needs, by name, tensors on CPU; one that is absent ->
    ValueError."""
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
    frames = []
    for number, text in enumerate(texts):
        try:
            with Image.open(
                io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"]
            ) as image:
                if (image.size, image.mode) != (
                    sizes[0],
                    "RGB",
                ):  # a second head: the first was checked
                    raise ValueError(
                        f"its head says {sizes[0]} RGB, its pixels are {image.size} {image.mode}"
                    )
                frames.append(np.asarray(image))
        except (
            Exception
            # Pillow's reader raises OSError, SyntaxError, struct.error, zlib.error ... for broken
            # files
        ) as error:
            raise ValueError(
                f"png {number} cannot be read: {type(error).__name__}: {error}"
            ) from None
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous().float() / 255
