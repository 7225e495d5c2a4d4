"""The reward of samples as a function of their latents, with a gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowrl.data import conditions
from flowrl.policy import Policy
from flowrl.rewards import RewardSet
from flowrl.rewards.core.climb import climb
from flowrl.types import PromptBatch, Rollout


@dataclass(frozen=True, kw_only=True)
class GradientScorer:
    """Decodes and scores samples of an iteration."""

    policy: Policy  # policy that decodes the latents
    rewards: RewardSet  # the rewards that are climbed, with their weights
    batch: PromptBatch  # the prompts of the samples, which rewards read

    def __call__(self, x: Tensor, rollout: Rollout, samples: Tensor, sigma: float = 0.0) -> Tensor:
        """Weighted rewards (n,) fp32 of latents x (n, *L) at sigma, which take the place of the
        rollout's `samples` (n,)."""
        group = rollout.group[samples]
        media = self.policy.decode(x, sigma, rollout.cond, group)
        check_gradient(x, media)
        rows = group.tolist()
        context = conditions.context_of([self.batch.meta[g] for g in rows], media.detach(), group)
        return climb(media.float(), [self.batch.text[g] for g in rows], self.rewards, context)


def check_gradient(x: Tensor, media: Tensor) -> None:
    """Raise ValueError where media have no gradient in the latents that they were decoded from."""
    if x.requires_grad and not media.requires_grad:
        raise ValueError(
            "the decoder of this policy passes no gradient on, which climbing a reward's gradient"
            " needs; a decode of your own must be made of torch operations"
        )
