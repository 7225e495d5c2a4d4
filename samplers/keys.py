"""Randomness as a function of names: a 64-bit key in, numbers out, no generator state anywhere.

`key("noise", seed, iteration, prompt_id)` hashes its parts (splitmix64 finaliser, chained); ints
give an int, a tensor among the parts gives a tensor of keys. Noise, permutations and uniforms are
functions of a key, so they do not depend on batch, chunk or process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import overload

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_11, _27, _30, _31 = (np.uint64(bits) for bits in (11, 27, 30, 31))


def _mix(z: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea, Flood 2014): every bit of a uint64 moves every bit of the result.

    A bijection. z has at least one dimension: there numpy wraps without a warning.
    """
    z = z + _GOLDEN
    z = (z ^ (z >> _30)) * _MIX1
    z = (z ^ (z >> _27)) * _MIX2
    return z ^ (z >> _31)


def _bits(part: int | str | Tensor) -> np.ndarray:
    """Return the 64 bits of a part, uint64 of at least one dimension."""
    if isinstance(part, Tensor):
        return np.atleast_1d(part.long().cpu().numpy().view(np.uint64))
    number = digest(part) if isinstance(part, str) else int(part)
    return np.array([number & 0xFFFFFFFFFFFFFFFF], np.uint64)


def digest(text: str) -> int:
    """Hash a text to 64 bits, as a signed integer."""
    hashed = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)


@overload
def key(*parts: int | str) -> int: ...
@overload
def key(*parts: int | str | Tensor) -> Tensor: ...
def key(*parts: int | str | Tensor) -> int | Tensor:
    """Hash of the parts in order -> an int, or an int64 tensor if any part is a tensor.

    Tensors are int64 and broadcast.
    """
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = _mix(state ^ _mix(_bits(part)))
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if not tensors:
        return int(state.view(np.int64)[0])
    out = torch.from_numpy(state.view(np.int64)).to(tensors[0].device)
    return out.reshape(torch.broadcast_shapes(*(part.shape for part in tensors)))


def gaussian(keys: Tensor, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Standard normal rows: keys (n,) int64 -> (n, *shape) fp32.

    Row i depends on keys[i] and the device type alone. One generator, reseeded per row; torch's CPU
    generator reads the low 32 bits of a seed, CUDA's all 64.
    """
    generator = torch.Generator(device)
    out = torch.empty(len(keys), *shape, device=device)
    for row, seed in zip(out, keys.tolist(), strict=True):
        torch.randn(tuple(shape), generator=generator.manual_seed(seed), device=device, out=row)
    return out


def uniforms(keys: Tensor, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Rows of uniform numbers in [0, 1), as `gaussian` makes normal ones: (n, *shape) fp32."""
    generator = torch.Generator(device)
    out = torch.empty(len(keys), *shape, device=device)
    for row, seed in zip(out, keys.tolist(), strict=True):
        torch.rand(tuple(shape), generator=generator.manual_seed(seed), device=device, out=row)
    return out


def uniform(keys: Tensor | int) -> Tensor:
    """Uniform on [0, 1): keys int64 -> fp64, same shape, from 53 bits of a further hash."""
    keys = torch.as_tensor(keys)
    upper = (_mix(_bits(keys)) >> _11).astype(np.float64)
    return torch.from_numpy(upper / (1 << 53)).to(keys.device).reshape(keys.shape)


def permutation(keys: Tensor | int, n: int) -> Tensor:
    """A permutation of 0..n-1 per key: keys (m,) -> (m, n) int64; () or an int -> (n,)."""
    keys = torch.as_tensor(keys)
    return uniform(key(keys[..., None], torch.arange(n, device=keys.device))).argsort(-1)
