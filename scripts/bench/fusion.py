"""Bytes and kernels that the budget counts in a compiled block, beside those of torch's inductor.

    python scripts/bench/fusion.py [--tokens 256] [--width 384]

A block of SD3 with LoRA is compiled for the CPU, forward alone and with its backward; inductor
itself says what its kernels read and write (torch._inductor.metrics). The budget's numbers are of
the same block on the meta device. Library calls are counted by both.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch._inductor import metrics

from flowrl.policy.parts import Parts
from flowrl.runtime import fusion
from flowrl.runtime.meter import Attention, Meter
from flowrl.runtime.roofline import GPUS

TEXT = 64  # tokens
METRICS = "inductor_metrics"


def block(width: int, device: str) -> nn.Module:
    """A transformer block of SD3 with LoRA in its attention."""
    from diffusers.models.attention import JointTransformerBlock

    with torch.device(device):
        made = JointTransformerBlock(width, width // 64, 64, qk_norm="rms_norm")
    network = nn.ModuleDict({"block": made}).requires_grad_(False).eval()
    Parts({"transformer": network}, {"rank": 16, "alpha": 16, "targets": TARGETS})
    return network.to(device)["block"]


TARGETS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]


def inputs(tokens: int, width: int, device: str, *, grad: bool) -> list[torch.Tensor]:
    sizes = ((2, tokens, width), (2, TEXT, width), (2, width))
    made = [torch.randn(*size, device=device) for size in sizes]
    for tensor in made[:2]:
        tensor.requires_grad_(grad)
    return made


def ours(tokens: int, width: int, *, grad: bool) -> tuple[float, float]:
    """(bytes, fused kernels) by the budget."""
    module, meter = block(width, "meta"), Meter(GPUS["h100"])
    given = inputs(tokens, width, "meta", grad=grad)
    with fusion.compiled([module], meter), torch.set_grad_enabled(grad):
        with meter, Attention():
            out = sum(t.sum() for t in module(*given))
        if grad:
            with meter:
                out.backward()
    meter.books()
    return meter.bytes, meter.fused


def inductors(tokens: int, width: int, *, grad: bool) -> tuple[float, float]:
    """(bytes, kernels) by inductor."""
    module = block(width, "cpu")
    given = inputs(tokens, width, "cpu", grad=grad)
    torch._dynamo.reset()
    metrics.reset()
    module.compile(dynamic=False)
    with torch.set_grad_enabled(grad):
        out = sum(t.sum() for t in module(*given))
        if grad:
            out.backward()
    return metrics.num_bytes_accessed, metrics.generated_kernel_count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=384)
    given = parser.parse_args()
    torch._inductor.config.force_disable_caches = True
    torch._logging.set_logs(**{METRICS: True})  # it counts bytes for this log alone
    torch._logging.getArtifactLogger("torch._inductor.compile_fx", METRICS).handlers.clear()
    for grad in (False, True):
        mine, count = ours(given.tokens, given.width, grad=grad)
        its, kernels = inductors(given.tokens, given.width, grad=grad)
        print(
            f"{'forward and backward' if grad else 'forward':21} budget {mine / 1e6:.1f} MB,"
            f" {count:.0f} fused kernels; inductor {its / 1e6:.1f} MB, {kernels:.0f} kernels: bytes"
            f" {mine / its:.2f}"
        )


if __name__ == "__main__":
    main()
