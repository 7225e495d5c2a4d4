"""The error on a user's own media, trained beside a method's loss (DDRL, arXiv:2512.04332).

    L = L_method + weight * mean over rows of mean((v(x_s, s, c) - (eps - x0))^2)

x0 and c are media and prompts of the data, x_s = (1 - s) x0 + s eps. Up to a constant this is the
forward KL from the data to the policy; the reverse KL of algorithm.kl_weight is taken on samples of
the policy, and is small where those are hacked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.common import base, forward
from flowrl.types import Advantages, Columns, LossOutput, Rollout


class DataAnchor(forward.ForwardMethod):
    """The objective beside the method's: supervised fine-tuning, times `weight`. levels: how many
    noise levels a medium is trained at."""

    def __init__(self, weight: float, levels: int = 1) -> None:
        super().__init__(forward.ForwardConfig(levels="logit_normal", steps=levels))
        self.weight = weight

    def rows(self, data: Rollout, *, seed: int, iteration: int) -> Columns:
        """A row for each medium and level, at levels and noise of their own, as in SFT."""
        everything = Advantages(leaf=torch.ones(len(data.leaf), device=data.leaf.device))
        return self.columns(data, everything, seed=seed, iteration=iteration)

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        error = scores["error"]
        return base.summed(self.weight * error, {"anchor/data_error": error}, batch)


def paired(rows: Columns, method: Columns, prompt: Tensor) -> Columns:
    """Give rows of data the noise levels and the noise of the method's rows.

    prompt (n,): the prompt whose rows of the method each row of data takes, one after the other,
    and from the first again where there are fewer. Where a prompt has none, because its group has
    no signal, rows of data keep levels and noise of their own.
    """
    sigma, noise_key = rows.sigma.clone(), rows.noise_key.clone()
    for p in torch.unique(prompt).tolist():
        mine, theirs = (torch.nonzero(of == p).flatten() for of in (prompt, method.prompt))
        if len(theirs):
            taken = theirs[torch.arange(len(mine), device=theirs.device) % len(theirs)]
            sigma[mine] = method.sigma[taken].to(sigma)
            noise_key[mine] = method.noise_key[taken]
    return Columns({**rows.data, "sigma": sigma, "noise_key": noise_key})
