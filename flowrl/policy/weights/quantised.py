"""model.quantize: the frozen weights of a denoiser in 8 or 4 bits, with LoRA in fp32 on top.

int8: torchao's weight-only quantisation, a scale for each output row. nf4: bitsandbytes' 4-bit
normal floats, a scale for each 64 weights (QLoRA, arXiv:2305.14314). Both compute with weights that
are widened to the network's own type, layer by layer; a gradient passes through to earlier layers.
diffusers' configs for loading (TorchAoConfig, BitsAndBytesConfig) do the same to each layer but ask
for a GPU, so a network is loaded whole here, in host memory, and its layers are quantised one after
the other on their way to the device. Only Linear layers of the repeated blocks are quantised, which
hold nearly all weights; layers at the network's input and output stay unchanged.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.policy.weights.blocks import blocks
from flowrl.runtime.install import install_line
from flowrl.runtime.memory import ran_out
from flowrl.runtime.text import printable

BACKENDS = {"int8": "torchao", "nf4": "bitsandbytes"}
KINDS = ("none", *BACKENDS)


def check_kind(kind: str) -> None:
    """ValueError for a kind that is unknown, or whose package is not installed."""
    if kind not in KINDS:
        raise ValueError(f"quantize={kind!r} should be one of {', '.join(KINDS)}")
    if kind != "none" and find_spec(BACKENDS[kind]) is None:
        raise ValueError(
            f"model.quantize={kind} needs {BACKENDS[kind]}, which is not installed;"
            f" {install_line('quantize')}"
        )


def computing_type(network: nn.Module) -> torch.dtype:
    """Return the type in which a network computes: the type of its weights, without LoRA. Some
    classes keep a few weights in fp32, so it is the first other type."""
    weights = (p for name, p in network.named_parameters() if "lora_" not in name)
    kinds = (p.dtype for p in weights if p.is_floating_point())
    return next((kind for kind in kinds if kind != torch.float32), torch.float32)


def quantise(networks: Mapping[str, nn.Module], kind: str, device: torch.device | str) -> None:
    """Quantise the layers of networks in place, each on the device. Networks of this kind already
    stay unchanged; ValueError for other ones, and if the backend does not work."""
    check_kind(kind)
    if kind == "none":
        return
    try_out(kind, device, computing_type(next(iter(networks.values()))))
    for name, network in networks.items():
        own = kind_of(network)
        if own not in ("none", kind):
            raise ValueError(
                f"model.quantize={kind}, and the {name} is quantised as {own} already; leave"
                " model.quantize out"
            )
        places = [] if own == kind else list(layers(network))
        if own == "none" and not places:
            raise ValueError(
                f"model.quantize={kind}: the {name} ({type(network).__name__}) has no Linear layers"
                " of a floating-point type to quantise; leave it out"
            )
        for parent, key, layer in places:
            setattr(parent, key, _quantised(layer, kind, device))
        if kind == "nf4":
            network.is_loaded_in_4bit = True  # peft reads this attribute


def layers(network: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield (module, name in it, layer) of the layers to quantise: Linear layers of the repeated
    blocks, or all Linear layers of a network without blocks."""
    for block in blocks(network) or [network]:
        for parent in block.modules():
            for key, layer in parent.named_children():
                if isinstance(layer, nn.Linear) and layer.weight.is_floating_point():
                    yield parent, key, layer


def _quantised(layer: nn.Linear, kind: str, device: torch.device | str) -> nn.Module:
    layer.requires_grad_(False)
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        layer.to(device)
        quantize_(layer, Int8WeightOnlyConfig(version=2))
        return layer
    import bitsandbytes as bnb

    bias, dtype = layer.bias, layer.weight.dtype
    own = bnb.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=bias is not None,
        compute_dtype=dtype,
        compress_statistics=False,
        quant_type="nf4",
        device="meta",
    )
    own.weight = bnb.nn.Params4bit(
        layer.weight.data,
        requires_grad=False,
        compress_statistics=False,
        quant_type="nf4",
        module=own,
    )
    if bias is not None:
        own.bias = nn.Parameter(bias.data, requires_grad=False)
    own.training = layer.training
    # on some CPUs a forward without gradient would run another kernel than one with
    own.support_avx512bf16_for_cpu = False
    return own.to(device)


def try_out(kind: str, device: torch.device | str, dtype: torch.dtype) -> None:
    """Try one small layer, forward and backward; ValueError if it fails."""
    try:
        importlib.import_module(BACKENDS[kind])
        own = _quantised(nn.Linear(64, 64).to(dtype), kind, device)
        x = torch.ones(2, 64, device=device, dtype=dtype, requires_grad=True)
        own(x).sum().backward()
        works = x.grad is not None and bool(x.grad.isfinite().all())
        why = "no gradient passes"
    except Exception as error:  # each backend raises errors of its own
        if ran_out(error):
            raise
        works, why = False, printable(error, 200)
    if not works:
        raise ValueError(
            f"model.quantize={kind} ({BACKENDS[kind]}) does not work here, on"
            f" {torch.device(device).type} in {str(dtype).removeprefix('torch.')} with torch"
            f" {torch.__version__}: {why}"
        )


# ---------------------------------------------------------------------- loaded networks


def kind_of(network: nn.Module) -> str:
    """Return "int8", "nf4", "none", or the name of another type of quantised weights that a Linear
    layer has."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear) and is_quantised(layer.weight):
            own = getattr(layer.weight, "quant_type", None)  # bitsandbytes' attribute
            eight = type(layer.weight).__name__ == "Int8Tensor"
            return str(own) if own else "int8" if eight else type(layer.weight).__name__
    return "none"


def is_quantised(weight: Tensor) -> bool:
    """Whether a weight is stored in fewer bits than it computes with."""
    plain = type(weight) in (Tensor, nn.Parameter)
    return not weight.is_floating_point() or not plain and bool(_inner(weight))


def compute_dtype(layer: Any) -> torch.dtype:
    """Return the type in which a layer computes, whatever type it is stored in."""
    state = getattr(layer.weight, "quant_state", None)  # bitsandbytes' attribute
    return layer.weight.dtype if state is None else state.dtype


def plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in which a tensor is stored, by name: itself, or the parts of a quantised
    one."""
    inner = _inner(tensor)
    if not inner:
        yield name, tensor
    for part in inner:
        if isinstance(own := getattr(tensor, part), Tensor):
            yield from plain_tensors(f"{name}.{part}", own)


def scales(weight: Tensor) -> list[Tensor]:
    """Return the tensors beside a weight of bitsandbytes: a scale for each 64 numbers."""
    state = getattr(weight, "quant_state", None)
    return [] if state is None else [state.absmax]


def _inner(tensor: Tensor) -> Iterable[str]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return () if flatten is None else flatten()[0]


def held_bytes(network: nn.Module) -> int:
    """Count the bytes of a network's stored weights, scales included."""
    return sum(
        part.numel() * part.element_size()
        for name, tensor in network.state_dict().items()
        for _, part in plain_tensors(name, tensor)
    )


def silence() -> None:
    """Hide a warning of the backends and peft that means nothing to a user."""
    warnings.filterwarnings("ignore", message=".*get_apply_tensor_subclass.*")
