"""Langevin: an ODE step, then one step of Langevin dynamics at the level where it ends.

Both use the prediction that the ODE step was made with, so that an edge costs one network call. The
predictor-corrector samplers of score models (Song et al., arXiv:2011.13456, algorithm 2) and
LC-GRPO (arXiv:2608.05600) call the network again for their correction; this is not their step.
"""

from __future__ import annotations

from torch import Tensor

from flowrl.samplers.precise import correlation
from flowrl.types import Transition, fp64


def transition(
    v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, *, eta: Tensor | float
) -> Transition:
    """ODE step to xp, then xp + h score + sqrt(2h) z: score = -eps/s', h = s'^2 (1 - rho).

    v, x: (B, *L), v = eps - x0. 0 <= sigma_next < sigma <= 1, shaped () or (B,). eta >= 0, () or
    (B,): 0 is the ODE. rho is that of the precise step, with which this one agrees to first order
    in the length of the step: the mean is the same, the variance larger by 2 / (1 + rho).
    Deterministic when sigma_next == 0.
    """
    v, x, sigma, sigma_next, eta = fp64(x, v, x, sigma, sigma_next, eta)
    fresh = 1 - correlation(sigma, sigma_next, eta)
    corrected = x + (sigma_next - sigma) * v - sigma_next * fresh * (x + (1 - sigma) * v)
    return Transition(mean=corrected.float(), std=(sigma_next * (2 * fresh).sqrt()).float())
