"""What a network's weights take on a device, as they are held there, and what calls pay for it.

Weights can be whole, quantised (a layer is unpacked when it runs), shared out over processes (a
block is gathered when it runs), or away in host memory while others need the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flowrl.config.schema import Config
from flowrl.policy.weights.blocks import blocks
from flowrl.policy.weights.quantised import layers
from flowrl.training.budget.modelled import ModelledPolicy
from flowrl.training.budget.roofline import Device

KERNELS = {"int8": 2, "nf4": 1}  # operators that unpack a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCosts:
    """Of a network's weights, in bytes. stays: on a device while it is used; above: what a forward
    adds, a layer unpacked or blocks gathered; backward: and a backward; moved, operators: what
    unpacking all layers reads and writes, and its operators; gathered: what comes from other
    processes in a forward or a backward; scattered: gradients that go to them in a backward."""

    stays: float
    above: float = 0.0
    backward: float = 0.0
    moved: float = 0.0
    operators: int = 0
    gathered: float = 0.0
    scattered: float = 0.0

    def seconds(self, device: Device, own: float, passes: float, *, backward: bool) -> float:
        """Of a call with so many passes over the weights that takes `own` seconds otherwise. The
        next block is gathered while one computes, and stays while its activations are computed
        again."""
        unpacking = passes * self.moved / device.bandwidth[""]
        sent = self.gathered + (self.scattered if backward else 0.0)
        return max(own + unpacking, sent / device.link)


def weight_costs(cfg: Config, policy: ModelledPolicy, gpus: int) -> WeightCosts:
    """Of the denoiser."""
    (network,) = policy.networks.values()
    whole = size_of(network)
    kind = cfg.model.quantize
    if kind != "none":
        quantised = [m.weight for *_, m in layers(network) if not m.weight.requires_grad]
        numbers = sum(w.numel() for w in quantised)
        width, packed = quantised[0].element_size(), packed_size(quantised, kind)
        unpacked = width * max(w.numel() for w in quantised)
        return WeightCosts(
            stays=whole - numbers * width + packed,
            above=unpacked,
            backward=unpacked,
            moved=packed + numbers * width,
            operators=KERNELS[kind] * len(quantised),
        )
    if cfg.train.shard and gpus > 1:
        sizes = [size_of(block) for block in blocks(network)]
        block, outside = max(sizes), whole - sum(sizes)
        others, trained = whole * (gpus - 1) / gpus, cfg.train.mode == "full"
        # a block and the next, and all the while what is outside of blocks; in a backward the next
        # comes as it is sent, too, and a block has its gradients
        return WeightCosts(
            stays=whole / gpus,
            above=2 * block + outside,
            backward=3 * block + outside + (block + outside if trained else 0.0),
            gathered=others,
            scattered=others if trained else 0.0,
        )
    return WeightCosts(stays=whole)


def packed_size(quantised: list[Tensor], kind: str) -> float:
    """Bytes of matrices: int8 with a scale for each output, nf4 with one for each 64 numbers."""
    numbers = sum(w.numel() for w in quantised)
    if kind == "nf4":
        return numbers / 2 + 4 * numbers / 64
    return numbers + 4 * sum(len(w) for w in quantised)


def encoders_size(policy: ModelledPolicy) -> float:
    """Bytes of the text encoders."""
    return sum(map(size_of, policy.others.values()))


def size_of(module: nn.Module) -> float:
    """Bytes of the weights, without adapters."""
    named: Any = module.named_parameters()
    return float(sum(p.numel() * p.element_size() for name, p in named if "lora_" not in name))
