"""Precise for noise of constant diffusion, the noise of Dance-SDE."""

from __future__ import annotations

from torch import Tensor

from flowrl.samplers.precise import renoised
from flowrl.types import Transition, fp64

TINY = 1e-300  # keeps 1/s' finite, where s' is 0 and nothing of the noise is left


def transition(
    v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, *, eta: Tensor | float
) -> Transition:
    """Precise step of g = eta (arXiv:2605.23522): rho = exp(-(eta^2/2) (1/s' - 1/s)).

    v, x: (B, *L), v = eps - x0. 0 <= sigma_next < sigma <= 1, shaped () or (B,). eta >= 0, () or
    (B,): 0 is the ODE. Deterministic when sigma_next == 0.
    """
    v, x, sigma, sigma_next, eta = fp64(x, v, x, sigma, sigma_next, eta)
    longer = (sigma - sigma_next) / (sigma * sigma_next).clamp(min=TINY)  # 1/s' - 1/s
    return renoised(v, x, sigma, sigma_next, rho=(-(eta**2 / 2) * longer).exp())
