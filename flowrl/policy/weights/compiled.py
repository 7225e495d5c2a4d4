"""A network's repeated blocks, compiled in place: names, LoRA keys, views and hooks stay.

All blocks of a kind share one compiled graph for each batch size, view and kind of forward (with or
without gradient). Shapes are static, so that kernels are fitted to them; the last rows of a batch,
which seldom fill a forward, are padded to a size that was seen before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from flowrl.policy.weights.blocks import blocks
from flowrl.runtime.ledger import compiled_graphs
from flowrl.runtime.log import logger
from flowrl.runtime.text import printable

BACKEND = "inductor"
FORWARDS = 16  # by which something is compiled; those whose FLOPs are counted are not
GRAPHS = 256  # most compiled graphs of a block; torch gives up after 8 and runs it as it is


@dataclass(eq=False)
class Compiled:
    """The compiled blocks of a policy, and the batch sizes that they are compiled for."""

    blocks: list[nn.Module]
    sizes: set[int] = field(default_factory=set)
    failed: bool = False  # the blocks run uncompiled
    forwards: int = 0  # so far

    def size(self, rows: int) -> int:
        """How many rows a forward of `rows` rows is padded to: at most twice as many, and of a size
        seen before, if there is one."""
        if self.failed:
            return rows
        fitting = [size for size in self.sizes if rows <= size <= 2 * rows]
        if not fitting:
            self.sizes.add(rows)
        return min(fitting, default=rows)

    def off(self) -> None:
        """Run the blocks as they are."""
        for block in self.blocks:
            block._compiled_call_impl = None

    def check(self) -> None:
        """Say so where torch leaves the blocks as they are without a word, as on some machines."""
        self.forwards += 1
        idle = bool(self.blocks) and not self.failed  # a rehearsal pads rows and compiles nothing
        if idle and self.forwards == FORWARDS and not compiled_graphs():
            self.failed = True
            logger.warning(
                f"train.compile=blocks has no effect: torch compiled nothing in {FORWARDS} forwards"
                " and gave no reason; TORCH_LOGS=dynamo may tell one"
            )

    def gives_up(self, error: Exception) -> bool:
        """Whether an error is the compiler's; if so, the blocks run uncompiled from now on."""
        if self.failed or not of_compiler(error):
            return False
        self.failed = True
        self.off()
        logger.warning(
            "train.compile: the network's blocks could not be compiled and run as they are"
            f" ({type(error).__name__}: {printable(error, 200)})"
        )
        return True


def of_compiler(error: Exception) -> bool:
    """Whether an error is one of compiling, or of a kernel of Triton's that does not start here."""
    from torch._dynamo.exc import TorchDynamoException

    theirs = type(error).__module__.partition(".")[0] == "triton"
    return theirs or isinstance(error, TorchDynamoException)


def compile_blocks(networks: list[nn.Module]) -> Compiled:
    """Compile the repeated blocks of networks, each at its first call. ValueError without any."""
    found = [block for network in networks for block in blocks(network)]
    if not found:
        kinds = " and ".join(type(network).__name__ for network in networks) or "the model"
        raise ValueError(
            f"train.compile=blocks: {kinds} has no list of equal blocks; use train.compile=none"
        )
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 16 * GRAPHS)
    for block in found:
        block.compile(backend=BACKEND, dynamic=False)
    return Compiled(found)
