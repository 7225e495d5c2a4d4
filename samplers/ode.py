"""The deterministic step: Euler on dx/dsigma = v."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.samplers.common.scalars import combine, fp32, fp64
from flowrl.types import Transition


def transition(
    v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, *, eta: Tensor | float = 0.0
) -> Transition:
    """Euler step of the probability-flow ODE: std = 0.

    v, x: (B, *L), v = eps - x0. 0 <= sigma_next < sigma <= 1, shaped () or (B,). eta is ignored.
    """
    sigma, sigma_next = fp64(x, sigma, sigma_next)
    return Transition(
        mean=combine(x, torch.ones_like(sigma), v, sigma_next - sigma),
        std=fp32(torch.zeros_like(sigma), x),
    )
