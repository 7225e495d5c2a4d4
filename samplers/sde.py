"""The stochastic step that a plan names, the same for rollout and loss."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from flowrl.runtime import registry
from flowrl.samplers import cps, dance_sde, ddim, flow_sde
from flowrl.types import Plan, Transition

SDES: dict[str, ModuleType] = {
    "flow_sde": flow_sde,
    "dance_sde": dance_sde,
    "cps": cps,
    "ddim": ddim,
}


def module(name: str) -> ModuleType:
    """The sampler module of an SDE name. Unknown -> ValueError naming the nearest valid names."""
    if name not in SDES:
        raise ValueError(f'unknown sde "{name}"{registry.did_you_mean(name, SDES)}')
    return SDES[name]


def transition(
    plan: Plan, v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor
) -> Transition:
    """Transition of SDE edges of `plan`: v, x (n, *L); sigma, sigma_next, eta (n,)."""
    extra = {"sigma_cap": plan.sigma_cap} if plan.sde == "flow_sde" else {}
    return module(plan.sde).transition(v, x, sigma, sigma_next, eta=eta, **extra)


def log_prob(plan: Plan, step: Transition, y: Tensor) -> Tensor:
    """Log-density (mean over latent dims) of y (n, *L) -> (n,); Flow-CPS has its own surrogate."""
    own = getattr(module(plan.sde), "log_prob", None)
    return step.log_prob(y) if own is None else own(step, y)
