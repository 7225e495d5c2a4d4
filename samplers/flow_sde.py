"""Flow-SDE of Flow-GRPO: the flow's ODE plus noise whose level falls with sigma."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.samplers.common.scalars import combine, fp32, fp64
from flowrl.types import Transition

AT_ONE = (
    1 - 1e-3
    # from here up sigma counts as 1: UniPC's grids begin at 1 - 1e-6, where the noise level would
    # be
    # finite and absurd
)


def transition(
    v: Tensor,
    x: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    eta: Tensor | float,
    sigma_cap: Tensor | float | None = None,
) -> Transition:
    """Flow-SDE step (Flow-GRPO, arXiv:2505.05470): distribution of x at sigma_next.

    v, x: (B, *L), v = eps - x0. 0 <= sigma_next < sigma <= 1, shaped () or (B,). eta: noise level,
    () or (B,).
    sigma_cap: stands in for sigma where sigma is 1 or within 1e-3 of it and above the cap, in 1 -
    sigma only (Flow-GRPO: the second sigma of the schedule). Coefficients in fp64. ValueError for
    such a sigma without sigma_cap: the noise level is infinite at 1.
    """
    sigma, sigma_next, eta = fp64(x, sigma, sigma_next, eta)
    cap = fp64(x, 1.0 if sigma_cap is None else sigma_cap)[0].to(sigma.device)
    s = torch.where(sigma > AT_ONE, torch.minimum(sigma, cap), sigma)
    if bool((s >= 1).any()) or (sigma_cap is None and bool((sigma > AT_ONE).any())):
        raise ValueError(
            "flow_sde from sigma = 1 has infinite noise; pass sigma_cap < 1 (Flow-GRPO: the"
            " schedule's second sigma)"
        )
    dt = sigma_next - sigma  # < 0
    g2 = eta**2 * sigma / (1 - s)  # diffusion coefficient, squared
    pull = 0.5 * g2 / sigma  # on the predicted noise x + (1 - sigma) v = -sigma * score
    mean = combine(x, 1 + pull * dt, v, (1 + pull * (1 - sigma)) * dt)
    return Transition(mean=mean, std=fp32((g2 * -dt).sqrt(), x))
