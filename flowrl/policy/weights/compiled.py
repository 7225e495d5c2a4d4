"""Compile a network's repeated blocks in place: names, LoRA keys, views and hooks stay.

All blocks of a kind share one compiled graph for each batch size, view and kind of forward (with or
without gradient). Shapes are static, so that kernels are fitted to them; the last rows of a batch,
which seldom fill a forward, are padded to a size that was seen before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flowrl.policy.replay.call import Request
from flowrl.policy.weights.blocks import blocks
from flowrl.runtime.ledger import compiled_graphs
from flowrl.runtime.log import logger
from flowrl.runtime.text import printable

BACKEND = "inductor"
# number of forwards after which torch must have compiled something; forwards whose FLOPs are
# counted are not compiled
FORWARDS = 16
# most compiled graphs of a block; by default torch gives up after 8 and runs it uncompiled
GRAPHS = 256


@dataclass(eq=False)
class Compiled:
    """A policy's compiled blocks; it pads batches to the sizes for which they are compiled."""

    blocks: list[nn.Module]  # modules that are compiled in place
    sizes: set[int] = field(default_factory=set)  # numbers of rows for which they were compiled
    failed: bool = False  # whether the blocks run uncompiled
    forwards: int = 0  # number of forwards so far

    def run(
        self, velocity: Callable[[Request], tuple[Tensor, int]], request: Request
    ) -> tuple[Tensor, int]:
        """Return velocity(request), on a batch of a size for which the blocks are compiled, or by
        uncompiled blocks if they cannot be compiled."""
        n = len(request.x)
        if (size := self.size(n)) > n:  # pad with the first rows, whose second results are dropped
            request = request.take(torch.arange(size, device=request.x.device) % n)
        try:
            v, rows = velocity(request)
        except Exception as error:
            if not self.gives_up(error):
                raise
            v, rows = velocity(request)
        self.check()
        return (v if size == n else v[:n]), rows

    def size(self, rows: int) -> int:
        """The number of rows to which a forward of `rows` rows is padded: at most twice as many,
        and a size that was seen before, if there is one."""
        if self.failed:
            return rows
        fitting = [size for size in self.sizes if rows <= size <= 2 * rows]
        if not fitting:
            self.sizes.add(rows)
        return min(fitting, default=rows)

    def off(self) -> None:
        """Run the blocks uncompiled."""
        for block in self.blocks:
            block._compiled_call_impl = None

    def check(self) -> None:
        """Warn if torch silently leaves the blocks uncompiled, as it does on some machines."""
        self.forwards += 1
        # without blocks, this is a rehearsal: it pads rows and compiles nothing
        idle = bool(self.blocks) and not self.failed
        if idle and self.forwards == FORWARDS and not compiled_graphs():
            self.failed = True
            logger.warning(
                f"train.compile=blocks has no effect: torch compiled nothing in {FORWARDS} forwards"
                " and gave no reason; TORCH_LOGS=dynamo may tell one"
            )

    def gives_up(self, error: Exception) -> bool:
        """Tell whether an error is the compiler's; if so, the blocks run uncompiled from now on."""
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
    """Tell whether an error comes from compiling, or from a Triton kernel that does not start."""
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
