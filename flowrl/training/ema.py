"""Averaged weights for evaluation and export, while rollouts and updates use the current ones
(Flow-GRPO, DiffusionNFT)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from flowrl.runtime.processes import shares


def decay_at(step: int, most: float) -> float:
    """Return min((1 + n) / (10 + n), most): young averages forget fast."""
    return min((1 + step) / (10 + step), most)


class Ema:
    """A moving average of named parameters in fp32: every k-th optimizer step, average <- d *
    average + (1 - d) * parameter.

    parameters: name -> live parameter. decay in [0, 1); 0 switches averaging off (`swapped` then
    changes nothing).
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, decay: float, every: int = 1) -> None:
        self.parameters, self.decay, self.every = dict(parameters), decay, every
        self.step_count = 0
        self.average = (
            {name: p.detach().float().clone() for name, p in self.parameters.items()}
            if decay
            else {}
        )

    @torch.no_grad()
    def step(self) -> None:
        """Call once after each optimizer step; averages when (n + 1) % every == 0, n counted from
        0."""
        n, self.step_count = self.step_count, self.step_count + 1
        if self.average and self.step_count % self.every == 0:
            weight = 1 - decay_at(n, self.decay)
            for name, average in self.average.items():
                new = shares.held(self.parameters[name]).float()
                shares.held(average).lerp_(new, weight)

    @contextmanager
    def swapped(self, saved: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Inside, the parameters have their averages; afterwards, also after an error, they have
        their own values again. saved: a `state_dict` whose averages replace these."""
        own = {name: shares.held(self.parameters[name]).clone() for name in self.average}
        source = self.average if saved is None else saved
        self._write({name: self._share(source[name], name) for name in own})
        try:
            yield
        finally:
            self._write(own)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by name, and "step" ()."""
        return {**self.average, "step": torch.tensor(self.step_count)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a result of `state_dict`; ValueError if its names differ."""
        averages = {name: value for name, value in state.items() if name != "step"}
        if averages.keys() != self.average.keys():
            odd = sorted(averages.keys() ^ self.average.keys())[0]
            raise ValueError(
                f"the saved averages and the trained parameters differ, for example in {odd}"
            )
        self.step_count = int(state["step"])
        for name, value in averages.items():
            shares.held(self.average[name]).copy_(self._share(value, name))

    def _share(self, average: Tensor, name: str) -> Tensor:
        """Return this process's part of an average, which may be whole."""
        if shares.is_split(average):
            return shares.held(average)
        return shares.share_of(average, self.parameters[name])

    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            shares.held(self.parameters[name]).copy_(value)
