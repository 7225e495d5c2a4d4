"""Find the stochastic step that a plan names, which is the same in rollout and loss.

A name is a module of this folder, an entry point in the group flowrl.samplers, or
"path/to/file.py:NAME". It gives `transition`, a function as in flow_sde.py: (v, x, sigma,
sigma_next, *, eta) -> Transition, or a module that has it, and `log_prob` where the step's density
is not the Gaussian's own. A transition with an argument `sigma_cap` is given the schedule's second
sigma, which stands in for a first one of 1; one with an argument `std` the noise that the policy
learned.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flowrl.runtime import registry
from flowrl.samplers import (
    confidence,
    cps,
    dance_precise,
    dance_sde,
    ddim,
    flow_sde,
    langevin,
    learned,
    precise,
    random_order,
)
from flowrl.types import Plan, Reduction, SamplingStep, Transition

SDES: dict[str, ModuleType] = {
    "flow_sde": flow_sde,
    "dance_sde": dance_sde,
    "precise": precise,
    "dance_precise": dance_precise,
    "langevin": langevin,
    "cps": cps,
    "ddim": ddim,
    "learned": learned,
    "random_order": random_order,
    "confidence": confidence,
}
UNMASKING = ("random_order", "confidence")  # steps of masked generators, which reveal tokens
GROUP = "flowrl.samplers"


@dataclass(frozen=True, slots=True)
class Sde:
    """A stochastic step: its function, and the arguments that this takes."""

    transition: Callable[..., SamplingStep]  # (v, x, sigma, sigma_next, *, eta) -> Transition
    # (step, y) -> (n,) log-density; None: the Gaussian's own
    log_prob: Callable[[Any, Tensor], Tensor] | None
    capped: bool  # it takes sigma_cap
    learned: bool  # it takes std, which a policy learns


def choices() -> list[str]:
    """Names of the steps of this folder and of installed packages, sorted."""
    return sorted({*SDES, *registry.installed(GROUP)})


def check_known(name: str) -> None:
    """ValueError with the nearest names for one that is neither ours nor outside."""
    if name not in SDES and not registry.is_outside(GROUP, name):
        raise ValueError(f'unknown sde "{name}"{registry.did_you_mean(name, choices())}')


@functools.cache
def find(name: str) -> Sde:
    """Return the step of a name; ValueError if it is unknown or cannot be a step."""
    if name in SDES:
        return _sde(SDES[name], SDES[name].transition)
    check_known(name)
    what = f'sde "{name}"'
    found = registry.outside(GROUP, name, what="sde")
    own = _sde(found, getattr(found, "transition", found))
    _try_out(own, what)
    return own


def _sde(found: Any, transition: Callable[..., SamplingStep]) -> Sde:
    try:
        taken = set(inspect.signature(transition).parameters)
    except (TypeError, ValueError):  # not a function: `_try_out` refuses it with a sentence
        taken = set()
    own = getattr(found, "log_prob", None)
    return Sde(transition, own, capped="sigma_cap" in taken, learned="std" in taken)


def _try_out(own: Sde, what: str) -> None:
    """Try a step on two rows; ValueError unless it makes a transition of two rows."""
    x, half = torch.ones(2, 3), torch.full((2,), 0.5)
    extra: dict[str, Any] = {"sigma_cap": None} if own.capped else {}
    extra |= {"std": torch.ones(2, 1)} if own.learned else {}
    expected = (
        f"{what} should be transition(v, x, sigma, sigma_next, *, eta) -> Transition(mean, std)"
    )
    try:
        step: Any = own.transition(x, x, half, half / 2, eta=half, **extra)
        valid = isinstance(step, Transition) and step.mean.shape == x.shape
        valid = valid and step.mean.dtype == step.std.dtype == torch.float32
        valid = valid and torch.broadcast_shapes(step.std.shape, x.shape) == x.shape
    except Exception as error:  # a user's function may raise anything
        raise ValueError(
            f"{expected}; tried on two rows: {type(error).__name__}: {error}"
        ) from error
    if not valid:
        got = type(step).__name__
        if isinstance(step, Transition):
            got = f"mean {step.mean.dtype} {tuple(step.mean.shape)}, std {tuple(step.std.shape)}"
        raise ValueError(f"{expected} in fp32 of x's shape; tried on x of shape (2, 3): {got}")


def transition(
    plan: Plan,
    v: Tensor,
    x: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    eta: Tensor,
    std: Tensor | None = None,
) -> Any:
    """SDE edges of `plan` -> their Transition, or the Unmasking of tokens: v, x (n, *L), or logits
    (n, *L, V) and tokens (n, *L); sigma, sigma_next, eta (n,); std (n, ...) for steps that learn
    theirs."""
    own = find(plan.sde)
    extra: dict[str, Any] = {"sigma_cap": plan.sigma_cap} if own.capped else {}
    if own.learned:
        assert std is not None, f"{plan.sde} needs the noise that a policy learned"
        extra["std"] = std
    return own.transition(v, x, sigma, sigma_next, eta=eta, **extra)


def log_prob(
    plan: Plan, step: SamplingStep, y: Tensor, *, reduction: Reduction | None = None
) -> Tensor:
    """Log-density of y (n, *L) -> (n,), a mean over latent dims, or (n, places) with plan.reduction
    or `reduction` "none"; Flow-CPS has its own surrogate."""
    own = find(plan.sde).log_prob
    if own is not None:
        return own(step, y)
    return step.log_prob(y, reduction=reduction or plan.reduction)
