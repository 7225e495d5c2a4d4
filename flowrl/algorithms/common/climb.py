"""Rewards with mode=grad: their gradient is climbed beside a method's own loss.

It needs finished samples x0 alone, so it goes with any method. Each is noised again, estimated by
one differentiable call, decoded and rewarded:

    x     = (1 - sigma) x0 + sigma eps        sigma drawn for each copy
    x0'   = x - sigma v(x, sigma)
    L     = mean over samples and copies of -scale * sum of weight * R(decode(x0'))

DRaFT-LV (arXiv:2309.17400) at a noise level of choice; ReFL (arXiv:2304.05977) estimates from the
sampler's own state. The mean is this term's own: the method's number of rows does not enter it.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from flowrl.advantages.several import place_in_group
from flowrl.algorithms.common import base
from flowrl.algorithms.common.estimate import estimated, noised, recomputed
from flowrl.samplers import keys
from flowrl.types import Columns, LossOutput, Rollout


class Gradient(Protocol):
    """The settings of section `gradient`."""

    sigma: float | tuple[float, float]  # noise level of the estimates, or its range
    samples: int | None  # most samples used from one group; None: all
    scale: float  # factor of this term of the loss


class Climb(base.Algorithm):
    """The objective beside the method's, with rows, scores and a loss of its own, and no plan."""

    config: Gradient

    def rows(self, rollout: Rollout, valid: Tensor, *, seed: int, iteration: int) -> Columns:
        """A row for each valid (B,) sample: at most `samples` of a group."""
        c = self.config
        named = keys.key("climbed", seed, iteration, rollout.leaf_key)
        sample = torch.nonzero(valid).flatten()
        if c.samples is not None:
            sample = sample[keys.uniform(named[sample]).argsort()]
            sample = sample[place_in_group(rollout.group[sample]) < c.samples].sort().values
        noise_key = keys.key("copy", named[sample], 0)
        low, high = c.sigma if isinstance(c.sigma, tuple) else (c.sigma, c.sigma)
        sigma = low + (high - low) * keys.uniform(keys.key("level", noise_key))
        # Stable Diffusion was trained on noise levels up to 0.94 only
        most = float(rollout.plan.sigma.max())
        return Columns(
            {
                "prompt": rollout.group[sample],
                "sample": sample,
                "sigma": sigma.clamp(max=most),
                "noise_key": noise_key,
                "weight": torch.ones(len(sample), device=sample.device),
            }
        )

    def score(
        self, policy: base.VelocityField, rollout: Rollout, batch: Columns
    ) -> dict[str, Tensor]:
        """reward (n,) of the estimates."""

        def velocity(x: Tensor, sigma: Tensor) -> Tensor:
            guidance = rollout.guidance
            return policy.velocity(x, sigma, rollout.cond, batch.prompt, guidance=guidance).float()

        x0 = rollout.at(rollout.leaf[batch.sample])
        x = noised(x0, batch.host("noise_key"), batch.sigma)
        call = partial(recomputed, velocity)
        x0 = estimated(call, x, batch.sigma, rescale=True)
        return {"reward": policy.reward(x0, rollout, batch.sample, 0.0)}

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        reward = scores["reward"]
        return base.summed(-self.config.scale * reward, {"gradient/reward": reward}, batch)
