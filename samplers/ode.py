"""The deterministic step: Euler on dx/dsigma = v."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.types import Transition, fp64


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
