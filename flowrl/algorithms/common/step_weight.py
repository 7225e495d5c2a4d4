"""Weights of denoising steps: by their noise (TempFlow-GRPO) or length (GRPO-Guard)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.samplers import sde
from flowrl.types import Columns, Rollout


def step_weight(how: Literal["noise", "inverse_step"], rollout: Rollout, rows: Columns) -> Tensor:
    """The weight of each row's step (n,): its std over the mean of the plan's levels, or 1 over its
    length."""
    if how == "inverse_step":
        return 1 / (rows.sigma - rows.sigma_next).float()
    plan = rollout.plan
    sigma, first = torch.unique(plan.sigma[plan.trained], return_inverse=True)
    trained = torch.nonzero(plan.trained).flatten()
    edge = torch.zeros(len(sigma), dtype=torch.int64).index_put((first,), trained)
    names = ("sigma", "sigma_next", "eta")
    levels = Columns({name: getattr(plan, name)[edge].to(rows.weight.device) for name in names})
    return spreads(rollout, rows) / spreads(rollout, levels).mean()


def spreads(rollout: Rollout, steps: Columns) -> Tensor:
    """The std (n,) of SDE steps, which depends on neither state nor network."""
    nothing = torch.zeros(len(steps), 1, device=steps.sigma.device)
    step = sde.transition(rollout.plan, nothing, nothing, steps.sigma, steps.sigma_next, steps.eta)
    return step.std.flatten()
