"""Networks that wait in host memory until their weights are split over processes.

A network that no device can hold whole is loaded block by block: layers outside of its repeated
blocks are on the device, and a block is there while it runs, without gradient. So a policy can be
made, checked and asked for a row before the split (flowrl/training/split/shard.py), which then
moves each block to the device alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.policy.weights.blocks import blocks


class Waiting:
    """The blocks of these networks wait in host memory, until `end`; tensors outside of blocks move
    to the device."""

    def __init__(self, networks: Iterable[nn.Module], device: torch.device | str) -> None:
        self.networks = list(networks)
        # a tensor's device: it has the number that "cuda" leaves out
        self.device = torch.empty(0, device=device).device
        # block that runs -> (its tensor, the values in host memory)
        self.home: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        waiting = [block for network in self.networks for block in blocks(network)]
        inside = {id(t) for block in waiting for t in tensors_of(block)}
        for network in self.networks:
            put((t for t in tensors_of(network) if id(t) not in inside), self.device)
        self.hooks = [
            hook
            for block in waiting
            for hook in (
                block.register_forward_pre_hook(self._come),
                block.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def _come(self, block: nn.Module, *call: Any) -> None:
        assert not torch.is_grad_enabled(), "a gradient would need the block again"
        self.home[block] = [(t, t.data) for t in tensors_of(block)]
        put(tensors_of(block), self.device)

    def _leave(self, block: nn.Module, *call: Any) -> None:
        for tensor, data in self.home.pop(block, []):
            tensor.data = data

    def bring_adapters(self) -> None:
        """Move LoRA, which is not split, to the device."""
        for network in self.networks:
            put((p for name, p in network.named_parameters() if "lora_" in name), self.device)

    def end(self) -> None:
        """Let blocks stay where they are from now on."""
        for hook in self.hooks:
            hook.remove()


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def put(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move the values of tensors to a device; the tensors stay the same objects."""
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
