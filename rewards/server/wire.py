"""Messages between a reward server and its clients: JSON, and tensors bit for bit.

GET /health is open to all; GET /version returns About; POST /score takes a ScoreRequest and returns
an Answer. Nothing is ever unpickled.

A request is JSON whose pictures are {"png": [base64 of an RGB PNG, ...]}, which any language
writes; or, as flowrl sends it, the length of its JSON (8 bytes, little-endian), the JSON, and its
tensors as the bytes of a safetensors file. Media of uint8 stand for byte / 255. In answers a number
that is not finite is null.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import safetensors.torch
import torch
from torch import Tensor

from flowrl.data.media import open_image, to_uint8
from flowrl.rewards.core.reward import Reward
from flowrl.runtime.text import printable
from flowrl.types import MediaContext

PROTOCOL = 2
WITH_TENSORS = "application/octet-stream"  # Content-Type of JSON that tensors follow
MAX_SAMPLES = 1024  # most samples of one request
# columns of a MediaContext that hold one tensor row for each sample
TENSORS = ("source", "actions", "reference")
LENGTH = 8  # bytes in which the JSON's length is written
MOST_HEAD = 2**16  # most bytes of the head of a safetensors file, which here has a few tensors
PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_HEAD = PNG_START + b"\x00\x00\x00\rIHDR"
RGB_OF_BYTES = b"\x08\x02"  # bit depth 8, colour type 2

Int64 = Annotated[int, pydantic.Field(ge=-(2**63), lt=2**63)]


class TooLarge(ValueError):
    """More than a server takes in one request."""


class Record(pydantic.BaseModel):
    """Strict: a number is not a text, an unknown key is an error."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )


class Pngs(Record):
    """Pictures (B, 3, H, W) as PNG files."""

    png: list[str] = pydantic.Field(min_length=1, fail_fast=True)

    @property
    def nbytes(self) -> int:
        """Bytes as fp32, from the heads of the files."""
        return sum(12 * width * height for width, height in self._sizes())

    @property
    def scratch(self) -> int:
        """Bytes beside the tensor while it is unpacked: one picture and its file."""
        pixels = max(width * height for width, height in self._sizes())
        return 7 * pixels + 2 * max(map(len, self.png))

    def _sizes(self) -> list[tuple[int, int]]:
        return [_png_size(text, number) for number, text in enumerate(self.png)]


class ScoreRequest(Record):
    """A request to POST /score. Media, prompts and columns have B rows."""

    id: str = pydantic.Field("", max_length=100)
    prompts: list[str] = pydantic.Field(min_length=1, fail_fast=True)
    media: Pngs | Tensor
    reward: str | None = None  # label of a served reward; None: the weighted total of all
    meta: Annotated[list[dict[str, Any]], pydantic.Field(fail_fast=True)] | None = None
    group: Annotated[list[Int64], pydantic.Field(fail_fast=True)] | None = None
    source: Pngs | Tensor | None = None
    actions: Tensor | None = None
    reference: Pngs | Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that unpacking adds to the request: pictures, and media of uint8 as fp32."""
        floats = 4 * self.media.numel() if _is_bytes(self.media) else 0
        return floats + sum(pngs.nbytes for pngs in self._pngs())

    @property
    def scratch(self) -> int:
        """Bytes beside the pictures while they are unpacked, one column after the other."""
        return max((pngs.scratch for pngs in self._pngs()), default=0)

    def _pngs(self) -> list[Pngs]:
        columns = [self.media, self.source, self.reference]
        return [column for column in columns if isinstance(column, Pngs)]


class Answer(pydantic.BaseModel):
    """An answer of POST /score."""

    model_config = pydantic.ConfigDict(strict=True, allow_inf_nan=False)

    id: str  # id of the request
    version: str  # version of the server's rewards, as About.version
    scores: list[float | None]  # B scores, None where a sample could not be scored
    parts: dict[str, list[float | None]]  # label -> B scores of that reward
    errors: list[str | None]  # B sentences that say why there is no score; None: there is one


class Served(pydantic.BaseModel):
    """Facts that a client must know about a reward; the fields are those of Reward."""

    model_config = pydantic.ConfigDict(strict=True, allow_inf_nan=False)

    scale: str
    needs: list[str]
    reads: list[str]
    reads_prompt: bool
    video: Literal["yes", "no", "only"]
    rounds: bool  # whether it reads no more of a picture than an 8-bit PNG holds
    weight: float


class About(pydantic.BaseModel):
    """An answer of GET /version."""

    model_config = pydantic.ConfigDict(strict=True, allow_inf_nan=False)

    protocol: int  # number of the protocol, PROTOCOL
    flowrl: str  # version of the package
    version: str  # a hash of the rewards, their settings and their code
    rewards: dict[str, Served]  # label -> reward
    total: Served  # weighted sum of the rewards
    max_mb: float = pydantic.Field(gt=0, le=1e6)  # most megabytes of one request
    max_samples: int = pydantic.Field(ge=1, le=1_000_000)  # most samples of one request


def about(
    rewards: Mapping[str, Reward], weights: Mapping[str, float], *, flowrl: str, max_mb: float
) -> About:
    """Facts that a client must know about loaded rewards; flowrl: the version of this package."""
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


def as_bytes(media: Tensor, *, rounds: bool = False) -> Tensor:
    """Turn fp32 media in [0, 1], on CPU, into uint8 if nothing is lost by it.

    rounds: do so even if something is lost, because the reader rounds to bytes anyway.
    """
    levels = to_uint8(media)
    restored = _as_floats(levels).view(torch.int32)
    same_bits = torch.equal(restored, media.contiguous().view(torch.int32))
    return levels if rounds or same_bits else media


def pack(request: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """The body of a request: the length of its JSON, the JSON, and the tensors as safetensors."""
    text = json.dumps(request).encode()
    file = safetensors.torch.save({name: row.contiguous() for name, row in tensors.items()})
    return b"".join([len(text).to_bytes(LENGTH, "little"), text, file])


def split(body: bytes) -> tuple[bytes, bytes]:
    """JSON and safetensors of a body that has both."""
    end = LENGTH + int.from_bytes(body[:LENGTH], "little")
    if len(body) < end:
        raise ValueError(f"the body has {len(body)} bytes, and should have {end} or more")
    return body[LENGTH:end], body[end:]


def tensors_of(file: bytes) -> dict[str, Tensor]:
    """Tensors of a safetensors file by name; anything else -> ValueError."""
    if int.from_bytes(file[:8], "little") > MOST_HEAD:  # checked before the head is parsed
        raise ValueError(f"the head of the safetensors file is longer than {MOST_HEAD:,} bytes")
    try:
        found = safetensors.torch.load(file)
    # SafetensorError, or KeyError for types that torch does not have
    except Exception as error:
        raise ValueError(
            f"the tensors are no safetensors file: {printable(f'{type(error).__name__}: {error}')}"
        ) from None
    if empty := [name for name, tensor in found.items() if not tensor.numel()]:
        raise ValueError(f"the tensor {printable(empty[0], 60)!r} is empty")
    return found


def unpack(record: Pngs | Tensor) -> Tensor:
    """Pictures as (B, 3, H, W) fp32 in [0, 1]; a tensor is unpacked as it is."""
    return _pictures(record.png) if isinstance(record, Pngs) else record


def unpack_media(record: Pngs | Tensor) -> Tensor:
    """Media in fp32, as they were before as_bytes."""
    media = unpack(record)
    return _as_floats(media) if _is_bytes(media) else media


def _is_bytes(record: Pngs | Tensor) -> bool:
    return isinstance(record, Tensor) and record.dtype == torch.uint8


def _as_floats(levels: Tensor) -> Tensor:
    return levels.float().div_(255)


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
    """One prompt's meta as JSON, keys in order; a value that JSON cannot hold -> ValueError."""
    try:
        return json.dumps(meta, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"meta {meta!r} cannot travel to a reward server as JSON: {error}"
        ) from None


def _png_size(text: str, number: int) -> tuple[int, int]:
    """Read (width, height) from the head of a file, before anything is inflated."""
    try:
        head = base64.b64decode(text[:36], validate=True)
    except (binascii.Error, ValueError):
        head = b""
    if not head.startswith(PNG_HEAD) or head[24:26] != RGB_OF_BYTES:
        raise ValueError(f"png {number} is not base64 of an RGB PNG with 8 bits a channel")
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


def _pictures(texts: list[str]) -> Tensor:
    """PNG files as (B, 3, H, W) fp32 in [0, 1]; all have one size."""
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
            if (image.size, image.mode) != (size, "RGB"):  # a second head in the file differs
                raise ValueError(
                    f"its head says {size} RGB, its pixels are {image.size} {image.mode}"
                )
            return np.array(image)
    # Pillow raises OSError, SyntaxError, struct.error, zlib.error ... for broken files
    except Exception as error:
        raise ValueError(f"png {number} cannot be read: {type(error).__name__}: {error}") from None


def _bare(file: bytes) -> bytes:
    """A PNG without chunks that no pixel needs, such as compressed texts, which could inflate to
    any size."""
    kept, at = [PNG_START], len(PNG_START)
    while at < len(file):
        end = at + 12 + int.from_bytes(file[at : at + 4])
        # a lower-case letter marks chunks that may be ignored
        if not file[at + 4 : at + 5].islower():
            kept.append(file[at:end])
        at = end
    return b"".join(kept)
