"""Coefficients-preserving sampling: part of the predicted noise is swapped for fresh noise, the
noise level stays the schedule's."""

from __future__ import annotations

import math

from torch import Tensor

from flowrl.samplers.common.scalars import combine, fp32, fp64
from flowrl.types import Transition


def transition(
    v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, *, eta: Tensor | float
) -> Transition:
    """CPS step (Flow-CPS, arXiv:2509.05952): y = (1-s') x0 + s' (cos(eta pi/2) eps + sin(eta pi/2)
    z).

    v, x: (B, *L), v = eps - x0. 0 <= sigma_next < sigma <= 1, shaped () or (B,). eta in [0, 1], ()
    or (B,): 1 swaps all the noise. Coefficients in fp64. Deterministic when sigma_next == 0. The
    marginals are kept exactly for point-mass data only.
    """
    sigma, sigma_next, eta = fp64(x, sigma, sigma_next, eta)
    angle = eta * (math.pi / 2)
    on_eps = sigma_next * angle.cos()
    mean = combine(x, (1 - sigma_next) + on_eps, v, on_eps * (1 - sigma) - (1 - sigma_next) * sigma)
    return Transition(mean=mean, std=fp32(sigma_next * angle.sin(), x))


def log_prob(transition: Transition, y: Tensor) -> Tensor:
    """Flow-CPS's surrogate -mean((y - mean)^2) over latent dims, without 1 / (2 std^2): y (B, *L),
    detached -> (B,)."""
    return -(y.detach().float() - transition.mean).square().flatten(1).mean(1)
