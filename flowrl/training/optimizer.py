"""The optimizer: AdamW, AdamW with moments in 8 bits (arXiv:2110.02861, by bitsandbytes), or a
class by its path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from flowrl.config.training import OPTIMIZERS, OptimizerConfig
from flowrl.runtime import registry
from flowrl.runtime.install import install_line
from flowrl.runtime.text import printable


def make(o: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of a run; ValueError if its package is missing or does not work."""
    weights = list(parameters)
    if o.name not in OPTIMIZERS:
        made = _of_class(o, weights)
    else:
        kind = torch.optim.AdamW
        if o.name == "adamw8bit":
            kind = eight_bit(weights[0].device if weights else "cpu")
        made = kind(weights, lr=o.lr, betas=o.betas, weight_decay=o.weight_decay, eps=o.eps)
    # copies of weights notice changes by a tensor's version, which bitsandbytes does not raise
    made.register_step_post_hook(lambda *_: increment_version(weights))
    return made


def try_class(o: OptimizerConfig) -> None:
    """Take a step with the class that optimizer.name names, if it names one, before a model loads;
    ValueError if that fails."""
    if o.name in OPTIMIZERS:
        return
    tried = nn.Parameter(torch.zeros(4, 4))
    tried.grad = torch.ones_like(tried)
    made = _of_class(o, [tried])
    try:
        made.step(None)  # the form in which accelerate calls it
    except Exception as error:  # a class may raise anything
        raise ValueError(
            f"optimizer.name={o.name}: a step fails with {type(error).__name__}:"
            f" {printable(error, 200)}; it is called without a closure, as step(None)"
        ) from error


def _of_class(o: OptimizerConfig, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer of the class that optimizer.name names."""
    what, kind = f"optimizer.name={o.name}", _class(o.name)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"{what} is no class that derives from torch.optim.Optimizer")
    if hasattr(kind, "eval"):
        raise ValueError(
            f"{what} has weights of its own for evaluation (train() and eval()), which flowrl does"
            " not switch; use a class without them, with ema.decay for averaged weights"
        )
    taken = [name for name in inspect.signature(kind).parameters if name != "params"]
    given: dict[str, Any] = {"lr": o.lr, **o.options}
    if "weight_decay" in taken:
        given = {"weight_decay": o.weight_decay, **given}
    try:
        return kind(weights, **given)
    except Exception as error:  # a class may raise anything
        raise ValueError(
            f"{what} cannot be made: {type(error).__name__}: {printable(error, 200)}; it was given"
            f" {', '.join(given)}, and takes {', '.join(taken)}"
        ) from error


def _class(path: str) -> Any:
    what = f"optimizer.name={path}"
    if registry.is_place(path):
        return registry.member(path, what=what)
    module, _, name = path.rpartition(".")
    try:
        found = vars(importlib.import_module(module))
    except Exception as error:  # a module may raise anything when it is imported
        raise ValueError(
            f"{what}: {module} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if name not in found:
        kinds = [
            key
            for key, value in found.items()
            if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
        ]
        raise ValueError(f'{what}: {module} has no "{name}"{registry.did_you_mean(name, kinds)}')
    return found[name]


def eight_bit(device: torch.device | str) -> type[torch.optim.Optimizer]:
    """Return bitsandbytes' class, after a trial step on the device."""
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            "optimizer.name=adamw8bit needs bitsandbytes, which is not installed;"
            f" {install_line('quantize')}"
        )
    try:
        from bitsandbytes.optim import AdamW8bit

        tried = nn.Parameter(torch.zeros(64, 64, device=device))
        tried.grad = torch.ones_like(tried)
        AdamW8bit([tried]).step()
    except Exception as error:  # each backend raises errors of its own
        raise ValueError(
            f"optimizer.name=adamw8bit (bitsandbytes) does not work here, on"
            f" {torch.device(device).type} with torch {torch.__version__}:"
            f" {printable(error, 200)}; use optimizer.name=adamw"
        ) from error
    return AdamW8bit
