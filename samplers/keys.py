"""Randomness as a function of names: a 64-bit key in, numbers out, no generator state anywhere.

`key("noise", seed, iteration, prompt_id)` hashes its parts (splitmix64 finaliser, chained); ints give an int, a tensor among the parts
gives a tensor of keys. Noise, permutations and uniforms are functions of a key, so they do not depend on batch, chunk or process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Any) -> Any:
    """splitmix64 (Steele, Lea, Flood 2014) of an int or int64 tensor: a bijection in which every input bit moves every output bit."""
    if isinstance(z, int):
        mask = 0xFFFFFFFFFFFFFFFF
        z = (z + _GOLDEN) & mask
        z = ((z ^ (z >> 30)) * _MIX1) & mask
        z = ((z ^ (z >> 27)) * _MIX2) & mask
        return _signed(z ^ (z >> 31))
    z = z + _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_MIX1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX2)
    return z ^ _shift(z, 31)


@overload
def key(*parts: int | str) -> int: ...
@overload
def key(*parts: int | str | Tensor) -> Tensor: ...
def key(*parts: int | str | Tensor) -> int | Tensor:
    """Hash of the parts in order; int64 tensors broadcast. Only ints and strings -> int, else an int64 tensor."""
    state: Any = 0
    for part in parts:
        if isinstance(part, str):
            part = int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
        state = _mix(state ^ _mix(part.long() if isinstance(part, Tensor) else _signed(int(part))))
    return state


def gaussian(keys: Tensor, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Standard normal rows, row i a function of keys[i] and the device type alone: keys (n,) int64 -> (n, *shape) fp32.

    One generator, reseeded per row. torch's CPU generator reads the low 32 bits of a seed, CUDA's all 64.
    """
    generator = torch.Generator(device)
    out = torch.empty(len(keys), *shape, device=device)
    for row, seed in zip(out, keys.tolist(), strict=True):
        torch.randn(tuple(shape), generator=generator.manual_seed(seed), device=device, out=row)
    return out


def uniform(keys: Tensor | int) -> Tensor:
    """Uniform on [0, 1) from the upper 53 bits of a further hash: keys int64 -> fp64, same shape."""
    return _shift(_mix(torch.as_tensor(keys)), 11).double() / (1 << 53)


def permutation(keys: Tensor | int, n: int) -> Tensor:
    """A permutation of 0..n-1 per key: keys (m,) -> (m, n) int64; () or an int -> (n,)."""
    keys = torch.as_tensor(keys)
    return uniform(key(keys[..., None], torch.arange(n, device=keys.device))).argsort(-1)
