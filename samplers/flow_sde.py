"""Flow-SDE of Flow-GRPO: the flow's ODE plus noise whose level falls with sigma."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.types import Transition, fp64

# A sigma from here on counts as 1: UniPC's grids begin at 1 - 1e-6, where the noise level would be
# finite but absurdly high.
AT_ONE = 1 - 1e-3


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
    () or (B,). sigma_cap: see `capped`.
    """
    s = capped(sigma, sigma_cap)
    v, x, sigma, sigma_next, s, eta = fp64(x, v, x, sigma, sigma_next, s, eta)
    dt = sigma_next - sigma  # < 0
    g2 = eta**2 * sigma / (1 - s)  # diffusion coefficient, squared
    eps = x + (1 - sigma) * v  # predicted noise; score = -eps / sigma
    mean = x + (v + 0.5 * g2 * eps / sigma) * dt
    return Transition(mean=mean.float(), std=(g2 * -dt).sqrt().float())


def capped(sigma: Tensor, cap: Tensor | float | None) -> Tensor:
    """Return the value for sigma in 1 - sigma: the cap where sigma > 1 - 1e-3 and above the cap.

    Flow-GRPO's cap is the schedule's second sigma. Such a sigma without a cap -> ValueError: the
    noise level is infinite at 1.
    """
    sigma = torch.as_tensor(sigma).double()
    at_one = sigma > AT_ONE
    if cap is not None:
        sigma = torch.where(at_one, sigma.minimum(torch.as_tensor(cap).to(sigma)), sigma)
    if bool((sigma >= 1).any()) or (cap is None and bool(at_one.any())):
        raise ValueError(
            "flow_sde from sigma = 1 has infinite noise; pass sigma_cap < 1 (Flow-GRPO: the"
            " schedule's second sigma)"
        )
    return sigma
