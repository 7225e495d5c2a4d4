"""DPM-Solver++(2M) on the flow: second order with one network call a step.

The second order comes from the previous data prediction.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.types import fp64


def step(
    v: Tensor,
    x: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    x0_prev: Tensor | None = None,
    sigma_prev: Tensor | float = 1.0,
) -> Tensor:
    """One DPM++2M step (arXiv:2211.01095, alg. 2) -> x at sigma_next, (B, *L) fp32.

    v, x: (B, *L). 0 <= sigma_next < sigma <= 1, () or (B,). x0_prev (B, *L), sigma_prev: previous
    data prediction and where it was made. x0_prev None, sigma_prev == 1 (lambda = -inf) or
    sigma_next == 0: a first-order step, which for a flow is Euler's.
    """
    sigma, sigma_next, sigma_prev = fp64(x, sigma, sigma_next, sigma_prev)
    x, v = x.float(), v.float()
    euler = x + (sigma_next - sigma).float() * v
    if x0_prev is None:
        return euler
    lam, lam_next, lam_prev = ((1 - s).log() - s.log() for s in (sigma, sigma_next, sigma_prev))
    h, h_prev = lam_next - lam, lam - lam_prev
    # = alpha' (1 - e^-h) / (2 r0), r0 = h_prev / h; expm1 keeps digits where h is small
    weight = -(1 - sigma_next) * torch.expm1(-h) * 0.5 * h / h_prev
    weight = torch.where((sigma_next > 0) & (sigma_prev < 1), weight, 0.0)
    x0 = x - sigma.float() * v
    return euler + weight.float() * (x0 - x0_prev.float())


def sample(
    velocity: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigmas: Tensor, order: int = 2
) -> Tensor:
    """Integrate from sigmas[0] to sigmas[-1]; the first and the last step are first-order.

    velocity(x, sigma ()) -> v; x (B, *L) -> (B, *L). sigmas: (T+1,) descending in [0, 1], fp64.
    order: 1 (Euler) or 2.
    """
    if order not in (1, 2):
        raise ValueError(f"dpmpp order {order} does not exist; choose 1 or 2")
    x0_prev, sigma_prev = None, 1.0
    for i, (sigma, sigma_next) in enumerate(zip(sigmas[:-1], sigmas[1:], strict=True)):
        v = velocity(x, sigma)
        first_order = order == 1 or i == len(sigmas) - 2
        y = step(v, x, sigma, sigma_next, None if first_order else x0_prev, sigma_prev)
        x0_prev, sigma_prev, x = x.float() - sigma.to(x, non_blocking=True) * v.float(), sigma, y
    return x
