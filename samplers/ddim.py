"""DDIM with noise, written in flow coordinates (DDPO's sampler for eps- and v-prediction UNets)."""

from __future__ import annotations

from torch import Tensor

from flowrl.types import Transition, fp64


def transition(
    v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, *, eta: Tensor | float
) -> Transition:
    """eta-DDIM step (arXiv:2010.02502, eq. 12 and 16): eta = 1 is ancestral DDPM, 0 the ODE.

    A variance-preserving x_vp = a x0 + b eps, a^2 + b^2 = 1, is the flow x = x_vp / (a + b) at
    sigma = b / (a + b).
    v, x: (B, *L) in flow coordinates, v = eps - x0. 0 <= sigma_next < sigma <= 1, shaped () or
    (B,). eta in [0, 1].
    """
    v, x, sigma, sigma_next, eta = fp64(x, v, x, sigma, sigma_next, eta)
    norm2 = (1 - sigma) ** 2 + sigma**2  # 1 / (a + b)^2
    norm2_next = (1 - sigma_next) ** 2 + sigma_next**2
    a2, a2_next = (1 - sigma) ** 2 / norm2, (1 - sigma_next) ** 2 / norm2_next
    var = eta**2 * (1 - a2_next) / (1 - a2) * (1 - a2 / a2_next)  # variance in VP coordinates
    std2 = var * norm2_next
    # clamp: rounding alone can make it negative, as eta <= 1
    on_eps = (sigma_next**2 - std2).clamp(min=0).sqrt()
    x0 = x - sigma * v
    eps = x + (1 - sigma) * v
    mean = (1 - sigma_next) * x0 + on_eps * eps
    return Transition(mean=mean.float(), std=std2.sqrt().float())
