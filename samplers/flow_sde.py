"""Flow-SDE of Flow-GRPO: the flow's ODE plus noise whose level falls with sigma."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.samplers._scalars import combine, fp32, fp64
from flowrl.types import Transition


def transition(
    v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, *, eta: Tensor | float, sigma_cap: Tensor | float | None = None
) -> Transition:
    """Flow-SDE step (Flow-GRPO, arXiv:2505.05470): distribution of x at sigma_next.

    v, x: (B, *L), v = eps - x0. 0 <= sigma_next < sigma <= 1, shaped () or (B,). eta: noise level, () or (B,).
    sigma_cap: stands in for sigma where sigma == 1, in 1 - sigma only (Flow-GRPO: the second sigma of the schedule).
    Coefficients in fp64. ValueError at sigma == 1 without sigma_cap: the noise level is infinite there.
    """
    sigma, sigma_next, eta = fp64(x, sigma, sigma_next, eta)
    s = sigma if sigma_cap is None else torch.where(sigma == 1, *fp64(x, sigma_cap, sigma))
    if bool((s >= 1).any()):
        raise ValueError("flow_sde from sigma = 1 has infinite noise; pass sigma_cap < 1 (Flow-GRPO: the schedule's second sigma)")
    dt = sigma_next - sigma  # < 0
    g2 = eta**2 * sigma / (1 - s)  # diffusion coefficient, squared
    pull = 0.5 * g2 / sigma  # on the predicted noise x + (1 - sigma) v = -sigma * score
    mean = combine(x, 1 + pull * dt, v, (1 + pull * (1 - sigma)) * dt)
    return Transition(mean=mean, std=fp32((g2 * -dt).sqrt(), x))
