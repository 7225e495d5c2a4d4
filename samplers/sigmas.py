"""Published noise schedules: (T+1,) fp64, descending from 1 to 0.

A policy gives its pipeline's own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def shift(u: Tensor, kappa: float) -> Tensor:
    """The time shift of SD3 (arXiv:2403.03206, eq. 23); kappa = 1 is the identity."""
    return kappa * u / (1 + (kappa - 1) * u)


def linear(steps: int) -> Tensor:
    """1, 1 - 1/T, ..., 0."""
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64)


def shifted(steps: int, kappa: float) -> Tensor:
    """The shifted linear grid (DanceGRPO, MixGRPO: kappa 3 for FLUX, 5 for HunyuanVideo)."""
    return shift(linear(steps), kappa)


def sd3(steps: int, kappa: float = 3.0, train_steps: int = 1000) -> Tensor:
    """The grid that diffusers' FlowMatchEulerDiscreteScheduler gives SD3.

    It is shifted twice, so the last step is very short.
    """
    low = shift(torch.tensor(1 / train_steps, dtype=torch.float64), kappa)
    u = torch.linspace(1, float(low), steps, dtype=torch.float64)
    return torch.cat([shift(u, kappa), torch.zeros(1, dtype=torch.float64)])


def unmasking(places: int, steps: int, how: str = "cosine") -> Tensor:
    """Shares of `places` tokens that are masked before each step of a masked generator, and 0.

    how: "cosine", cos(pi r / 2) (MaskGIT, aMUSEd), or "linear", 1 - r, at r = (k + 1) / T, rounded
    down to whole tokens; every step but the last leaves at least one, and reveals at least one.
    """
    r = torch.arange(1, steps + 1, dtype=torch.float64) / steps
    share = {"cosine": torch.cos(torch.pi * r / 2), "linear": 1 - r}[how]
    left = [places]
    for floor in (places * share + 1e-9).floor().long().tolist():
        left.append(max(1, min(left[-1] - 1, floor)))
    left[-1] = 0
    if steps < 1 or min(a - b for a, b in zip(left, left[1:], strict=False)) < 1:
        raise ValueError(
            f"steps={steps} would have steps that unmask nothing of {places} tokens; use 1"
            f" to {places}"
        )
    return torch.tensor(left, dtype=torch.float64) / places
