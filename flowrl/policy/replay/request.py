"""What a pipeline is asked for in one call of its replay, and how parts of it come together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.policy.replay.arguments import Cond, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Where a velocity is asked for, and with which guidance (see Policy.velocity)."""

    x: Tensor  # (n, *L) fp32, flow coordinates
    sigma: Tensor  # (n,) fp64, or () on the CPU: the same for all rows
    cond: Cond
    rows: Tensor  # (n,) int64, rows of cond, on x's device
    group: Group | None = None  # of cond, where all rows belong to it
    local: Tensor | None = None  # (n,) int64, rows of the group
    guidance: float | str = "pipeline"
    detach_uncond: bool = False

    def take(self, at: Tensor) -> Request:
        """The rows `at` of a request whose rows have their own sigmas."""
        sigma = self.sigma[at] if self.sigma.ndim else self.sigma
        local = None if self.local is None else self.local[at]
        return replace(self, x=self.x[at], sigma=sigma, rows=self.rows[at], local=local)

    def within(self, group: Group, at: Tensor | None, local: Tensor) -> Request:
        """The rows `at` (None: all), which are rows `local` of a group."""
        own = self if at is None else self.take(at)
        return replace(own, group=group, local=local)


def together(parts: Iterable[tuple[Tensor, tuple[Tensor, int]]]) -> tuple[Tensor, int]:
    """(rows (m,), (their predictions (m, *L), network rows)) of parts that hold each row once ->
    the predictions in order (n, *L), and all network rows."""
    at, made = zip(*parts, strict=True)
    order = torch.cat(at).argsort()
    return torch.cat([part for part, _ in made])[order], sum(count for _, count in made)
