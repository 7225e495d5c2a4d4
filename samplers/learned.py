"""The flow's Euler step with noise that a policy learned: the policy gives its std."""

from __future__ import annotations

from torch import Tensor

from flowrl.types import Transition, fp64


def transition(
    v: Tensor,
    x: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    eta: Tensor | float,
    std: Tensor,
) -> Transition:
    """ReinFlow step (arXiv:2505.22094, eq. 7): N(x + (s' - s) v, diag std^2), at s' = 0 too.

    v, x: (B, *L), v = eps - x0. 0 <= sigma_next < sigma <= 1, shaped () or (B,). std: the step's
    std itself, not multiplied by a root of its length; (B, C, 1, ...), or a shape that broadcasts
    to it. eta: the upper bound that std was made with, () or (B,).
    """
    v, x, sigma, sigma_next = fp64(x, v, x, sigma, sigma_next)
    return Transition(mean=(x + (sigma_next - sigma) * v).float(), std=std.float())
