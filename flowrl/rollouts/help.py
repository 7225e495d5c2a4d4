"""Who is helped: prompts of which no sample succeeded in their first visits.

From then on a visit is helped with probability data.sampler.help.decay ** n, after n visits in
which a sample succeeded, with help or without: always before the first one. A prompt that succeeds
by itself in time is never helped. What help is: flowrl/rollouts/sample_helped.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.config.sampling import HelpConfig
from flowrl.samplers import keys


class Helper:
    """Counts visits of prompts, equally on all processes; a function of the seed, the iteration and
    its state, which checkpoints hold."""

    def __init__(self, config: HelpConfig, names: list[str], seed: int) -> None:
        self.config, self.names, self.seed = config, names, seed
        self.on = config.after > 0
        # name -> visits before the first success, visits with a success
        self.state: dict[str, list[int]] = {}

    def helps(self, iteration: int, ids: Tensor) -> Tensor:
        """Which of the prompts at `ids` (P,) are helped in an iteration -> (P,) bool."""
        if not self.on:
            return torch.zeros(len(ids), dtype=torch.bool)
        visits = [self.state.get(self.names[i], (0, 0)) for i in ids.tolist()]
        failed, succeeded = torch.tensor(visits).reshape(-1, 2).unbind(1)
        chance = torch.tensor(self.config.decay, dtype=torch.float64) ** succeeded  # 0**0 = 1
        u = keys.uniform(keys.key(self.seed, "help", iteration, ids.cpu()))
        return (failed >= self.config.after) & (u < chance)

    def learn(
        self, iteration: int, ids: Tensor, samples: Tensor, successes: Tensor
    ) -> dict[str, float]:
        """Take in how many samples (P,) of the prompts of an iteration, on all processes, could be
        scored and succeeded -> prompts/* to log."""
        if not self.on:
            return {}
        helped = self.helps(iteration, ids) & (samples > 0)
        good = successes > 0
        for i, scored, success in zip(ids.tolist(), samples > 0, good, strict=True):
            failed, succeeded = self.state.get(self.names[i], (0, 0))
            if success:
                succeeded += 1
            elif scored and not succeeded:
                failed += 1
            self.state[self.names[i]] = [failed, succeeded]
        count = int(helped.sum())
        return {
            "prompts/helped": float(count),
            "prompts/helped_success": float((helped & good).sum()) / max(count, 1),
        }

    def restore(self, state: dict[str, list[int]]) -> None:
        """The state of a checkpoint; prompts that have gone since are forgotten."""
        known = set(self.names)
        self.state |= {name: visits for name, visits in state.items() if name in known}
