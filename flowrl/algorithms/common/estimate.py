"""One estimate of the data from a noise level, with a gradient: x0 = x - sigma v(x, sigma).

On a flow the estimate moves by -sigma dv, which vanishes where sigma is small: rescaling divides
that gradient by sigma, and changes no value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowrl.samplers import keys
from flowrl.types import expand


def noised(x0: Tensor, noise_key: Tensor, sigma: Tensor | float) -> Tensor:
    """(1 - sigma) x0 + sigma eps of samples x0 (n, *L), with the noise that keys (n,) name.

    sigma: noise level, a number or (n,).
    """
    eps = keys.gaussian(noise_key, shape=x0.shape[1:], device=x0.device)
    s = level(sigma, x0)
    return (1 - s) * x0 + s * eps


def estimated(
    velocity: Callable[[Tensor, Any], Tensor], x: Tensor, sigma: Tensor | float, *, rescale: bool
) -> Tensor:
    """Data (n, *L), estimated from x (n, *L) at sigma by one call of velocity(x, sigma)."""
    v, s = velocity(x, sigma), level(sigma, x)
    if rescale:
        v = v.detach() + (v - v.detach()) / s
    return x - s * v


def recomputed(velocity: Callable[[Tensor, Any], Tensor], x: Tensor, sigma: Any) -> Tensor:
    """velocity(x, sigma), computed again in the backward pass: decoder and reward need the
    memory."""
    if not torch.is_grad_enabled():
        return velocity(x, sigma)
    return checkpoint(velocity, x, sigma, use_reentrant=False, preserve_rng_state=False)


def level(sigma: Tensor | float, like: Tensor) -> Tensor | float:
    """sigma (n,) as a factor of rows (n, *L); a number stays one."""
    return expand(sigma, like).to(like) if isinstance(sigma, Tensor) else sigma
