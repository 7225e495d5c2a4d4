"""The bytes of a network's weights on a device, and the price of calls for how they are stored.

Weights can be whole, quantised (a layer is unpacked when it runs), split over processes (a block is
gathered when it runs), or away in host memory while others need the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from flowrl.config.schema import Config
from flowrl.policy.weights.blocks import blocks
from flowrl.policy.weights.quantised import layers
from flowrl.training.budget.call_costs import Cost
from flowrl.training.budget.modelled_tokens import Modelled
from flowrl.training.budget.roofline import Device

KERNELS = {"int8": 2, "nf4": 1}  # number of operators that unpack a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCosts:
    """Bytes that a network's weights take on a device, and what a pass over them costs."""

    stays: float  # bytes on the device while the network is used
    above: float = 0.0  # bytes that a forward adds: an unpacked layer, or gathered blocks
    backward: float = 0.0  # bytes that a backward adds
    moved: float = 0.0  # bytes read and written to unpack all layers once
    operators: int = 0  # number of operators that unpack all layers once
    # bytes that come from other processes in a forward, and again in a backward
    gathered: float = 0.0
    scattered: float = 0.0  # bytes of gradients that go to other processes in a backward

    def paid(self, cost: Cost, device: Device, passes: float, *, backward: bool) -> Cost:
        """Add to the cost of a forward or backward the price of `passes` over weights that must be
        unpacked or gathered first."""
        # the next block is gathered while one computes, and a block stays for its recomputation
        sent = self.gathered + (self.scattered if backward else 0.0)
        unpacking = passes * self.moved / device.bandwidth[""]
        seconds = max(cost.seconds + unpacking, sent / device.link)
        more = {"weights": seconds - cost.seconds} if seconds > cost.seconds else {}
        return replace(
            cost,
            seconds=seconds,
            operators=cost.operators + round(passes * self.operators),
            peak=cost.peak + (self.backward if backward else self.above),
            kinds=cost.kinds | more,
        )


def weight_costs(cfg: Config, policy: Modelled, gpus: int) -> WeightCosts:
    """Bytes that the denoiser's weights take on one device, and what a pass over them costs."""
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
        # a block, the next one, and all the time the weights outside of blocks; in a backward the
        # next block also comes in the buffer that receives it, and a block has its gradients
        return WeightCosts(
            stays=whole / gpus,
            above=2 * block + outside,
            backward=3 * block + outside + (block + outside if trained else 0.0),
            gathered=others,
            scattered=others if trained else 0.0,
        )
    return WeightCosts(stays=whole)


def packed_size(quantised: list[Tensor], kind: str) -> float:
    """Count bytes of quantised matrices: int8 has a scale per output, nf4 one per 64 numbers."""
    numbers = sum(w.numel() for w in quantised)
    if kind == "nf4":
        return numbers / 2 + 4 * numbers / 64
    return numbers + 4 * sum(len(w) for w in quantised)


def encoders_size(policy: Modelled) -> float:
    """Count the bytes of the text encoders."""
    return sum(map(size_of, policy.others.values()))


def size_of(module: nn.Module) -> float:
    """Count the bytes of the weights, without adapters."""
    named: Any = module.named_parameters()
    return float(sum(p.numel() * p.element_size() for name, p in named if "lora_" not in name))
