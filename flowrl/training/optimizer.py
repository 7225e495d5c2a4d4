"""The optimizer: AdamW, or AdamW with moments in 8 bits (arXiv:2110.02861, by bitsandbytes)."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

import torch
from torch import nn
from torch.autograd.graph import increment_version

from flowrl.config.training import OptimizerConfig
from flowrl.runtime.install import install_line
from flowrl.runtime.text import printable


def make(o: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of a run; ValueError if its package is missing or does not work."""
    weights = list(parameters)
    if o.name == "adamw8bit":
        kind = eight_bit(weights[0].device if weights else "cpu")
    else:
        kind = torch.optim.AdamW
    made = kind(weights, lr=o.lr, betas=o.betas, weight_decay=o.weight_decay, eps=o.eps)
    # copies of weights notice changes by a tensor's version, which bitsandbytes does not raise
    made.register_step_post_hook(lambda *_: increment_version(weights))
    return made


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
