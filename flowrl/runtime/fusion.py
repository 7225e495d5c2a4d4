"""What a compiler makes of a block: kernels that fuse the operators between two matmuls.

Torch's inductor leaves matmuls, attention and convolutions to libraries and fuses what lies between
them: casts, norms, products, sums. A kernel reads each tensor that was made outside of it once, and
writes what is read outside of it; all else stays in registers. Here operators that pass tensors to
each other in such a stretch are one kernel, and those that share none are kernels apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

ENTRY = 10  # operators that the host could issue while it checks the guards of a compiled block
Read = tuple[int, int, int]  # storage, offset, numbers


class Counting(Protocol):
    """What books operators: inside blocks fused, outside one by one."""

    def enter(self, *, compiled: bool) -> None: ...


@dataclass(slots=True, eq=False)
class Kernel:
    """reads: what was made outside of it, in bytes; made: storages."""

    reads: dict[Read, int] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)

    def join(self, other: Kernel) -> None:
        self.reads |= other.reads
        self.made |= other.made


@dataclass(slots=True, eq=False)
class Stretch:
    """The operators since the last one that is not fused, as kernels. of: storage -> the kernel
    that makes it."""

    kernels: dict[int, Kernel] = field(default_factory=dict)
    of: dict[int, Kernel] = field(default_factory=dict)

    def add(self, tensors: list[Tensor], made: list[Tensor]) -> None:
        """An operator that reads `tensors`."""
        whole = Kernel()
        for tensor in tensors:
            inner = self.of.get(key := storage_of(tensor))
            if inner is None:
                whole.reads[key, tensor.storage_offset(), tensor.numel()] = bytes_of(tensor)
            elif self.kernels.pop(id(inner), None) is not None:
                whole.join(inner)
        whole.made |= {storage_of(tensor) for tensor in made}
        self.kernels[id(whole)] = whole
        self.of |= dict.fromkeys(whole.made, whole)


def storage_of(tensor: Tensor) -> int:
    """A number that no other living storage has."""
    return tensor.untyped_storage()._cdata


def bytes_of(tensor: Tensor) -> int:
    """What reading it takes: an expanded tensor is read once."""
    whole = tensor.numel() * tensor.element_size()
    return whole if tensor.is_contiguous() else min(whole, tensor.untyped_storage().nbytes())


@contextmanager
def compiled(blocks: list[nn.Module], meter: Counting) -> Iterator[None]:
    """Inside, forwards of these blocks are booked as if they were compiled, each by itself, and so
    are their backwards, whenever these come."""
    results = WeakIdKeyDictionary()  # of blocks, whose gradient enters a block and leaves none

    def enter(_: Any) -> None:
        meter.enter(compiled=True)

    def leave(_: Any) -> None:
        meter.enter(compiled=False)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in _followed([*args, *kwargs.values()]):
            if tensor not in results:
                tensor.register_hook(leave)
                results[tensor] = True  # once
        meter.enter(compiled=True)

    def after(module: nn.Module, args: Any, out: Any) -> None:
        meter.enter(compiled=False)
        new = [tensor for tensor in _followed(out) if tensor not in results]
        for tensor in new:
            results[tensor] = True
        if new:
            new[-1].register_hook(enter)

    handles = []
    for block in blocks:
        handles += [
            block.register_forward_pre_hook(before, with_kwargs=True),
            block.register_forward_hook(after),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _followed(given: Any) -> list[Tensor]:
    """Tensors through which a gradient passes."""
    values = given if isinstance(given, list | tuple) else [given]
    return [v for v in values if isinstance(v, Tensor) and v.requires_grad]
