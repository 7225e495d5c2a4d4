"""What a compiler makes of a block: kernels that fuse the operators between matmuls.

Torch's inductor leaves matmuls, attention and convolutions to libraries and fuses what lies between
them: casts, norms, products, sums. A kernel reads each tensor that was made outside of it once, and
writes what is read outside of it; all else stays in registers. Here operators that pass tensors to
each other without a library call between them are one kernel, others are kernels apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

ENTRY = 10  # operators that the host could issue while it checks the guards of a compiled block
# kernels that inductor makes of one: it splits reductions (scripts/bench/fusion.py: 44 of 21, and
# 100 of 43 with a backward, whose bytes are 1.04 and 1.02 of those counted here)
EACH = 2
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
    """A compiled block's kernels. of: storage -> the kernel that makes it; level: most library
    calls on a way to it. Operators of one level never wait for a library call between them."""

    kernels: dict[int, Kernel] = field(default_factory=dict)
    of: dict[int, Kernel] = field(default_factory=dict)
    level: dict[int, int] = field(default_factory=dict)

    def add(self, tensors: list[Tensor], made: list[Tensor]) -> list[Tensor]:
        """An operator between libraries' -> those of its tensors that it reads from memory."""
        own = self._level(tensors)
        whole, outer = Kernel(), []
        for tensor in tensors:
            inner = self.of.get(key := storage_of(tensor))
            if inner is None or self.level[key] < own:
                whole.reads[key, int(tensor.storage_offset()), tensor.numel()] = bytes_of(tensor)
                outer.append(tensor)
            elif self.kernels.pop(id(inner), None) is not None:
                whole.join(inner)
        new = {storage_of(tensor) for tensor in made}
        whole.made |= new
        self.kernels[id(whole)] = whole
        self.of |= dict.fromkeys(whole.made, whole)
        self.level |= dict.fromkeys(new, own)
        return outer

    def call(self, tensors: list[Tensor], made: list[Tensor]) -> None:
        """A library's operator."""
        self.level |= dict.fromkeys(map(storage_of, made), 1 + self._level(tensors))

    def forget(self, key: int) -> None:
        """A storage is gone; another may get its number."""
        self.level.pop(key, None)
        kernel = self.of.pop(key, None)
        if kernel is not None:
            kernel.made.discard(key)

    def _level(self, tensors: list[Tensor]) -> int:
        return max((self.level.get(storage_of(t), 0) for t in tensors), default=0)


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
