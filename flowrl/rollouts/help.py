"""Prompts are helped if none of their samples succeeded in their first visits.

A visit is an iteration that samples the prompt. After n visits in which a sample succeeded, with
help or without, the chance that the next one is helped is FADE ** n; so every
visit is helped before the first success. A prompt that succeeds by itself in its first visits is
never helped. See flowrl/rollouts/sample_helped.py for the kinds of help.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.config.sampling import HelpConfig
from flowrl.samplers import keys

FADE = 0.5  # help becomes rarer by this factor with each visit that succeeds


class Helper:
    """Counts visits of prompts, equally on all processes.

    Who is helped is a function of the seed, the iteration and the state, which checkpoints hold.
    """

    def __init__(self, config: HelpConfig, names: list[str], seed: int) -> None:
        self.config, self.names, self.seed = config, names, seed
        # name -> visits before the first success, visits with a success
        self.state: dict[str, list[int]] = {}

    def helps(self, iteration: int, ids: Tensor) -> Tensor:
        """Which of the prompts at `ids` (P,) are helped in an iteration -> (P,) bool."""
        visits = [self.state.get(self.names[i], (0, 0)) for i in ids.tolist()]
        failed, succeeded = torch.tensor(visits).reshape(-1, 2).unbind(1)
        chance = torch.tensor(FADE, dtype=torch.float64) ** succeeded
        u = keys.uniform(keys.key(self.seed, "help", iteration, ids.cpu()))
        return (failed >= self.config.after) & (u < chance)

    def learn(
        self, iteration: int, ids: Tensor, samples: Tensor, successes: Tensor
    ) -> dict[str, float]:
        """Count the visits of an iteration -> prompts/* to log.

        ids (P,): the prompts of all processes. samples, successes (P,): how many of their samples
        could be scored, and how many of these succeeded.
        """
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
        """Take the state of a checkpoint; prompts that are not there any more are forgotten."""
        known = set(self.names)
        self.state |= {name: visits for name, visits in state.items() if name in known}
