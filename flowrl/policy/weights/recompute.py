"""Gradient checkpointing of a share of a network's blocks: the others keep their activations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(networks: Iterable[nn.Module], share: bool | float) -> None:
    """Recompute activations in the backward pass, for networks that can (diffusers models), in this
    share of the blocks, in (0, 1); true: in all, false: in none."""
    for module in networks:
        if not hasattr(module, "enable_gradient_checkpointing"):
            continue
        if share is True:
            module.enable_gradient_checkpointing()
        elif share:
            module.enable_gradient_checkpointing(Recompute(share))
        else:
            module.disable_gradient_checkpointing()


class Recompute:
    """Stands in for a block in diffusers' models (their gradient_checkpointing_func).

    share: share of the blocks whose activations are computed again in the backward, in (0, 1]; they
    are spread evenly over the blocks, in the order in which a forward first reaches them.
    """

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share} of recomputed blocks should lie above 0, up to 1")
        self.share = share
        self.numbers: dict[nn.Module, int] = {}

    def __call__(self, block: nn.Module, *args: Any) -> Any:
        if not self.chosen(block):
            return block(*args)
        return checkpoint(block, *args, use_reentrant=False)

    def chosen(self, block: nn.Module) -> bool:
        """Whether a block's activations are computed again."""
        number = self.numbers.setdefault(block, len(self.numbers))
        return int((number + 1) * self.share) > int(number * self.share)
