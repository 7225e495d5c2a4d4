"""Scalar coefficients of a step: computed in fp64 on the device of sigma, then cast to fp32 on the
device of x."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.types import expand


def fp64(like: Tensor, *values: Tensor | float) -> list[Tensor]:
    """Each value, () or (B,) or (B, 1, ...), as fp64 that broadcasts against like (B, *L)."""
    return [expand(torch.as_tensor(value).double(), like) for value in values]


def combine(x: Tensor, on_x: Tensor, v: Tensor, on_v: Tensor) -> Tensor:
    """on_x * x + on_v * v in fp32; the coefficients are fp64."""
    return (
        on_x.to(x.device, torch.float32) * x.float() + on_v.to(x.device, torch.float32) * v.float()
    )


def fp32(value: Tensor, like: Tensor) -> Tensor:
    """A coefficient in the precision and place where it is used."""
    return value.to(like.device, torch.float32)
