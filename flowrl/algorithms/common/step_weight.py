"""Weights of denoising steps: by their noise, their length, or what the network does to them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.samplers import sde
from flowrl.types import Columns, Rollout

StepWeight = Literal["noise", "inverse_step", "jacobian", "inverse_lambda"]


def step_weight(how: StepWeight, rollout: Rollout, rows: Columns) -> Tensor:
    """The weight of each row's step (n,): its std over the mean of the plan's levels (noise); 1
    over its length (inverse_step), over |d mean / d v| (jacobian), or over that in units of its std
    (inverse_lambda), by which a log-prob's gradient has the same size at every step."""
    if how == "inverse_step":
        return 1 / (rows.sigma - rows.sigma_next).float()
    if how in ("jacobian", "inverse_lambda"):
        pull = pulls(rollout, rows)
        return 1 / pull if how == "jacobian" else spreads(rollout, rows) / pull
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


def pulls(rollout: Rollout, steps: Columns) -> Tensor:
    """|d mean / d v| (n,) of SDE steps: their mean is P x + Q v, and this is |Q|."""
    nothing = torch.zeros(len(steps), 1, device=steps.sigma.device)
    where = steps.sigma, steps.sigma_next, steps.eta
    return sde.transition(rollout.plan, nothing + 1, nothing, *where).mean.abs().flatten()
