"""Euler's step on the probability-flow ODE, dx/dsigma = v: as the engine walks it, and as a
`Transition` with std = 0."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.types import Transition, expand, fp64


def step(v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """Euler step of plan.solver == "euler" -> x at sigma_next, (B, *L) fp32.

    v, x: (B, *L) fp32, v = eps - x0. 0 <= sigma_next < sigma <= 1, shaped () or (B,), fp64.
    """
    return x + expand(sigma_next - sigma, x).to(x, non_blocking=True) * v


def transition(
    v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, *, eta: Tensor | float = 0.0
) -> Transition:
    """Euler step of the probability-flow ODE: std = 0.

    v, x: (B, *L), v = eps - x0. 0 <= sigma_next < sigma <= 1, shaped () or (B,). eta is ignored.
    """
    v, x, sigma, sigma_next = fp64(x, v, x, sigma, sigma_next)
    dt = sigma_next - sigma  # < 0
    mean = x + v * dt
    return Transition(mean=mean.float(), std=torch.zeros_like(dt).float())
