"""Tensors of which every process holds a share: rows, as `fully_shard` splits weights (DTensor).

Copies, averages and optimizer steps work on the shares. Only tensors that leave the run, in a
checkpoint or as `policy.state`, are gathered, one at a time and by all processes together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_split(tensor: Tensor) -> bool:
    """Whether this process holds only a share of a tensor."""
    return hasattr(tensor, "full_tensor")


def held(tensor: Any) -> Tensor:
    """Return this process's part of a tensor, without its graph: its share, or all of it, in the
    same storage."""
    return tensor.detach().to_local() if is_split(tensor) else tensor.detach()


def whole(tensor: Any) -> Tensor:
    """Gather all of a tensor, without its graph; all processes that have a share call this
    together."""
    return tensor.detach().full_tensor() if is_split(tensor) else tensor.detach()


def share_of(value: Tensor, like: Any) -> Tensor:
    """Cut out the part of a whole value that this process has if it is split like `like`."""
    if not is_split(like):
        return value
    mesh = like.device_mesh
    rows = -(-len(value) // mesh.size())  # rounded up, as torch.chunk splits
    return value[mesh.get_local_rank() * rows :][:rows]


def split_as(value: Tensor, like: Tensor) -> Tensor:
    """Copy a whole value to the device of `like`, split in the same way."""
    if not is_split(like):
        return value.to(like.device, copy=True)
    out = torch.zeros_like(like, dtype=value.dtype, requires_grad=False)
    held(out).copy_(share_of(value, like))
    return out
