"""fp32 LoRA weights over a bf16 network: masters, and bf16 copies with which layers compute.

Autocast would do the casts too, but it also widens layer norms to fp32. Here every layer computes
in the network's own type, and only the masters, which the optimizer, EMA, checkpoints and exports
see, are fp32: small updates would round away in bf16. A copy is part of the autograd graph, like a
cast inside the forward, so gradients arrive at the master and are added up in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowrl.policy.weights.quantised import compute_dtype


class Master(nn.Linear):
    """A LoRA matrix whose weight is fp32 and that computes with a copy of another type."""

    compute: Tensor | None = None  # the copy, with the graph of its cast
    made_of: tuple[Any, ...] = ()  # state of the weight (see refresh) when it was copied
    compute_dtype = torch.bfloat16

    def forward(self, input: Tensor) -> Tensor:
        assert self.compute is not None, "a LoRA layer ran outside of its network"
        return F.linear(input, self.compute)

    def refresh(self) -> None:
        """Copy the weight again if it was written, moved, frozen or thawed since the last copy."""
        w = self.weight
        now = (version(w), w.device, w.requires_grad)
        if now == self.made_of:
            return
        # with gradient in any case: a later caller may need the graph
        with torch.inference_mode(False), torch.enable_grad():
            self.compute = w.to(self.compute_dtype)
        self.made_of = now


def version(w: Tensor) -> tuple[int, int]:
    """Return a key that changes whenever values are written to w, or replaced by `w.data = ...`."""
    return w._version, w.untyped_storage()._cdata


def matrices(layers: list[Any], adapter: str) -> list[nn.Linear]:
    """Return LoRA's A and B of an adapter in peft's layers; they become masters if the layer's base
    is bf16."""
    found: list[nn.Linear] = []
    for layer in layers:
        # LoKr has neither of them
        halves = (getattr(layer, half, {}) for half in ("lora_A", "lora_B"))
        own = [some[adapter] for some in halves if adapter in some]
        if own and compute_dtype(layer.get_base_layer()) == Master.compute_dtype:
            layer.cast_input_dtype_enabled = False  # peft would widen the input to fp32
            for matrix in own:
                if matrix.weight.dtype != Master.compute_dtype:
                    # the module and its weight keep their names; only the forward differs
                    matrix.__class__ = Master
        found += own
    return found
