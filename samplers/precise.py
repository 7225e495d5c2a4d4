"""Precise: a step that is exact as long as the network's clean prediction stands still.

Euler's step discretises the whole drift of the reverse SDE. Here only x0 is frozen over the step;
what is left is linear and has a closed solution: the part of the data is exact, and the noise keeps
a correlation rho with the predicted one (arXiv:2605.23522).
"""

from __future__ import annotations

from torch import Tensor

from flowrl.types import Transition, fp64


def transition(
    v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, *, eta: Tensor | float
) -> Transition:
    """Precise step of Flow-SDE's noise: rho = (s'(1-s) / (s(1-s')))^(eta^2 / 2).

    v, x: (B, *L), v = eps - x0. 0 <= sigma_next < sigma <= 1, shaped () or (B,). eta >= 0, () or
    (B,): 0 is the ODE, sqrt(2) ancestral DDPM (ddim with eta 1). At sigma 1 all noise is fresh.
    Deterministic when sigma_next == 0.
    """
    v, x, sigma, sigma_next, eta = fp64(x, v, x, sigma, sigma_next, eta)
    return renoised(v, x, sigma, sigma_next, rho=correlation(sigma, sigma_next, eta))


def correlation(sigma: Tensor, sigma_next: Tensor, eta: Tensor) -> Tensor:
    """rho of Flow-SDE's noise over a step, in [0, 1]; arguments in fp64 that broadcast."""
    kept = sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))
    return kept ** (eta**2 / 2)


def renoised(v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, *, rho: Tensor) -> Transition:
    """The step to (1-s') x0 + s' (rho eps + sqrt(1-rho^2) z), with all arguments in fp64."""
    x0 = x - sigma * v
    eps = x + (1 - sigma) * v
    mean = (1 - sigma_next) * x0 + sigma_next * rho * eps
    std = sigma_next * (1 - rho**2).clamp(min=0).sqrt()
    return Transition(mean=mean.float(), std=std.float())
