"""Dance-SDE: the flow's ODE plus noise of constant diffusion eta."""

from __future__ import annotations

from torch import Tensor

from flowrl.samplers.common.scalars import combine, fp32, fp64
from flowrl.types import Transition


def transition(
    v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, *, eta: Tensor | float
) -> Transition:
    """Dance-SDE step (DanceGRPO, arXiv:2505.07818): Flow-SDE with diffusion coefficient g = eta.

    v, x: (B, *L), v = eps - x0. 0 <= sigma_next < sigma <= 1, shaped () or (B,). eta: () or (B,).
    Coefficients in fp64.
    """
    sigma, sigma_next, eta = fp64(x, sigma, sigma_next, eta)
    dt = sigma_next - sigma  # < 0
    pull = 0.5 * eta**2 / sigma  # on the predicted noise x + (1 - sigma) v = -sigma * score
    mean = combine(x, 1 + pull * dt, v, (1 + pull * (1 - sigma)) * dt)
    return Transition(mean=mean, std=fp32(eta * (-dt).sqrt(), x))
