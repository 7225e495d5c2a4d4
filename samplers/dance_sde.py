"""Dance-SDE: the flow's ODE plus noise of constant diffusion eta."""

from __future__ import annotations

from torch import Tensor

from flowrl.types import Transition, fp64


def transition(
    v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, *, eta: Tensor | float
) -> Transition:
    """Dance-SDE step (DanceGRPO, arXiv:2505.07818): Flow-SDE with diffusion coefficient g = eta.

    v, x: (B, *L), v = eps - x0. 0 <= sigma_next < sigma <= 1, shaped () or (B,). eta: () or (B,).
    """
    v, x, sigma, sigma_next, eta = fp64(x, v, x, sigma, sigma_next, eta)
    dt = sigma_next - sigma  # < 0
    eps = x + (1 - sigma) * v  # predicted noise; score = -eps / sigma
    mean = x + (v + 0.5 * eta**2 * eps / sigma) * dt
    return Transition(mean=mean.float(), std=(eta * (-dt).sqrt()).float())
