"""Processes that call split networks together.

The weights of a split network are gathered block by block while it runs, from all processes: a
process that called it alone would wait for ever. But processes differ in how many rows they have.
So before each call every process says what it wants: a forward, a backward, or to go on to the next
meeting of all. All of them do the first of these that any process wants, in this order. A process
that wanted something else makes that call with one row whose result is dropped, and says again what
it wants.

So all processes make the same calls in the same order, as torch's `Join` does for whole
iterations, and nothing has to count rows ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

# wishes of a process, the largest wins; FORWARD + 2 network + (1 if with gradient)
GO_ON, BACKWARD, FORWARD = range(3)


class InStep:
    """Makes the calls of one process in step with those of the others.

    agree: sends the wish of this process, and returns the largest wish of all processes. backward:
    adds up the gradient of a loss. safely: the context of a call, in which an error is told from a
    process that stopped. rows: for each network a function that calls it with one row.
    """

    def __init__(
        self,
        agree: Callable[[int], int],
        backward: Callable[[Tensor], None],
        safely: Callable[[], AbstractContextManager[None]],
        rows: list[Callable[[], Tensor]],
    ) -> None:
        self.agree, self.add_gradient, self.safely, self.rows = agree, backward, safely, rows
        # outputs of dropped forwards, which the next backward must pass, too
        self.kept: list[Tensor] = []
        self.followed = 0  # number of calls that were made for other processes

    def meet(self) -> None:
        """Return once no process has a network call left, so that the next collective can start."""
        self._until(GO_ON)

    def forward(self, network: int, call: Callable[[], Any]) -> Any:
        """Return call(), which runs a network, once it is the turn of this call."""
        self._until(FORWARD + 2 * network + torch.is_grad_enabled())
        with self.safely():
            return call()

    def backward(self, loss: Tensor) -> None:
        """Add up the gradient of a loss, once no process has a forward left to make before it."""
        self._until(BACKWARD)
        self._backward(loss)

    def _until(self, wanted: int) -> None:
        """Do what others want until it is this process's turn."""
        while (first := self.agree(wanted)) != wanted:
            self.followed += 1
            if first == BACKWARD:
                self._backward(torch.zeros((), device=self.kept[0].device))
                continue
            network, gradient = divmod(first - FORWARD, 2)
            with self.safely(), torch.set_grad_enabled(bool(gradient)):
                out = self.rows[network]()
            if gradient:
                self.kept.append(out)

    def _backward(self, loss: Tensor) -> None:
        kept, self.kept = self.kept, []
        with self.safely():
            self.add_gradient(loss + sum(0 * out.float().sum() for out in kept))


class Together(nn.Module):
    """A network that is called in step. number: its place in `in_step.rows`."""

    def __init__(self, network: nn.Module, number: int, in_step: InStep) -> None:
        super().__init__()
        self.network, self.number, self.in_step = network, number, in_step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.in_step.forward(self.number, lambda: self.network(*args, **kwargs))
