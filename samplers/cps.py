"""Coefficients-preserving sampling: fresh noise replaces a part of the predicted noise.

The noise level stays the schedule's.
"""

from __future__ import annotations

import math

from torch import Tensor

from flowrl.types import Transition, fp64


def transition(
    v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, *, eta: Tensor | float
) -> Transition:
    """CPS step (Flow-CPS, arXiv:2509.05952): (1-s') x0 + s' (cos(eta pi/2) eps + sin(eta pi/2) z).

    v, x: (B, *L), v = eps - x0. 0 <= sigma_next < sigma <= 1, shaped () or (B,). eta in [0, 1], ()
    or (B,): 1 swaps all the noise. Deterministic when sigma_next == 0. The marginals are kept
    exactly for point-mass data only.
    """
    v, x, sigma, sigma_next, eta = fp64(x, v, x, sigma, sigma_next, eta)
    angle = eta * (math.pi / 2)
    x0 = x - sigma * v
    eps = x + (1 - sigma) * v
    mean = (1 - sigma_next) * x0 + sigma_next * angle.cos() * eps
    return Transition(mean=mean.float(), std=(sigma_next * angle.sin()).float())


def log_prob(transition: Transition, y: Tensor) -> Tensor:
    """Flow-CPS's surrogate -mean((y - mean)^2) over latent dims: y (B, *L), detached -> (B,).

    It leaves out the Gaussian's 1 / (2 std^2).
    """
    return -(y.detach().float() - transition.mean).square().flatten(1).mean(1)
