"""What is fused in a compiled block: kernels hang together by tensors, and read and write once."""

import pytest
import torch
from torch import nn

from flowrl.runtime import fusion
from flowrl.runtime.meter import Meter
from flowrl.runtime.roofline import GPUS

N = 64
SQUARE = 4 * N * N  # bytes


class Block(nn.Module):
    """Two products with what is fused around them, and a stretch that hangs together with none."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(N, N, bias=False) for _ in range(2))

    def forward(self, x, apart):
        y = self.first(x.sin() * 2.0)  # kernel 1: reads x, writes
        z = self.second(y + 1.0)  # kernel 2: reads y, writes
        return torch.cos(z * y) + x, apart.exp()  # kernels 3 and 4: reads z, y, x; apart


def booked(compiled):
    with torch.device("meta"):
        block, x = Block().requires_grad_(False), torch.empty(N, N)
    meter = Meter(GPUS["h100"])
    with fusion.compiled([block] if compiled else [], meter), meter, torch.no_grad():
        a, b = block(x, torch.empty_like(x))
        a + b  # reads what the block wrote
    meter.books()
    return meter


def test_a_kernel_reads_and_writes_each_tensor_once():
    """By hand: kernel 1 moves 2 squares, 2 moves 2, 3 moves 4, 4 moves 2; two products of 3
    squares each, and the sum outside, 3."""
    meter = booked(compiled=True)
    assert meter.fused == 4
    assert meter.bytes == SQUARE * (2 + 2 + 4 + 2 + 3 + 3 + 3)
    assert meter.operators == fusion.ENTRY + 4 * fusion.EACH + 3


def test_without_compiling_each_operator_moves_its_own():
    plain, compiled = booked(compiled=False), booked(compiled=True)
    assert plain.fused == 0 and plain.operators == 10
    assert plain.bytes > compiled.bytes and plain.flops == compiled.flops


def test_a_backward_is_fused_block_by_block():
    with torch.device("meta"):
        blocks = nn.ModuleList(Block() for _ in range(2))
        x = torch.empty(N, N)
    found = {}
    for name, chosen in {"plain": [], "compiled": list(blocks)}.items():
        meter = Meter(GPUS["h100"])
        with fusion.compiled(chosen, meter), meter:
            out, apart = x, torch.empty_like(x)
            for block in blocks:
                out, apart = block(out, apart)
            forward = meter.operators
            out.sum().backward()
        found[name] = meter
        assert meter.operators > forward
    assert found["compiled"].flops == found["plain"].flops
    assert found["compiled"].bytes < found["plain"].bytes
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks)


@pytest.mark.parametrize("size", [(N, N), (1, N)])
def test_an_expanded_tensor_is_read_as_it_is_stored(size):
    x = torch.empty(size, device="meta").expand(N, N)
    assert fusion.bytes_of(x) == 4 * size[0] * size[1]
