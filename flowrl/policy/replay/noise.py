"""Infer how a loop's first latents follow the noise that the pipeline draws."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class StartMap:
    """First latents = mean + factor * noise, in the pipeline's units."""

    factor: float  # factor of the noise, in the pipeline's units
    mean: Tensor | None  # (*L) fp32; None: zero. A run that starts late starts from a noisy picture


@dataclass(eq=False)
class Draws:
    """Calls to torch.randn in a run; the one numbered `chosen` gives `value` everywhere."""

    chosen: int | None = None  # number of the draw that is replaced; None: none
    value: float = 0.0  # value that the chosen draw gives everywhere
    count: int = 0  # number of draws so far

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        real = torch.randn

        def randn(*size, **kwargs):
            drawn = real(*size, **kwargs)  # draw in any case: later draws must not change
            number, self.count = self.count, self.count + 1
            return torch.full_like(drawn, self.value) if number == self.chosen else drawn

        with mock.patch.object(torch, "randn", randn):
            yield


def start_map(first: Callable[[], Tensor], usual: float) -> StartMap:
    """Infer the map from runs of first(), which runs the pipeline up to its first step -> the
    latents there (1, *L). The draw whose value moves all latents by one factor is the initial
    noise; other draws (a posterior's sample) stay random. usual: the factor if no draw does that.
    """
    draws = Draws()
    with draws.watched():
        first()
    for number in reversed(range(draws.count)):
        ends = []
        for value in (0.0, 1.0):
            with Draws(number, value).watched():
                ends.append(first()[0].double())
        slope = ends[1] - ends[0]
        moved = slope != 0
        if not moved.any():
            continue
        factor = slope[moved].mean().item()
        if (slope[moved] - factor).abs().max() < 1e-2 * abs(factor):
            mean = ends[0].float()
            # in low precision the measured factor is rounded, and the usual one is exact
            near = abs(factor - usual) < 1e-2 * abs(usual)
            return StartMap(usual if near else factor, mean if mean.any() else None)
    return StartMap(usual, None)
