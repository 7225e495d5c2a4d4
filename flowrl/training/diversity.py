"""Credit that depends on the likeness of a prompt's samples: section `diversity` of a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from flowrl.advantages import diversity
from flowrl.config.training import DiversityConfig
from flowrl.types import Rewards


@dataclass(frozen=True, slots=True)
class Diversity:
    """Stands between rewards and the method that turns them into advantages."""

    config: DiversityConfig  # features that are compared, and the cost of likeness

    def __call__(
        self,
        leaf_advantages: Callable[[Rewards, Tensor], Tensor],
        rewards: Rewards,
        group: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """Turn rewards and groups (B,) of all processes into (advantages (B,), diversity/*)."""
        c = self.config
        if rewards.features is None:
            return leaf_advantages(rewards, group), {}
        options = {"temperature": c.temperature, "threshold": c.threshold}
        found = diversity.spread(rewards.features, group, rewards.valid, **options)
        changed = diversity.adjusted(
            rewards,
            group,
            found,
            redundancy=c.redundancy,
            above=c.above,
            novelty=c.novelty,
        )
        adv = diversity.scaled(leaf_advantages(changed, group), found, c.entropy)
        return adv, metrics(found, c.redundancy)


def metrics(found: diversity.Spread, redundancy: float = 0.0) -> dict[str, float]:
    """Make diversity/*: means over samples with another one in their group; {}: there are none."""
    rows = found.compared
    if not bool(rows.any()):
        return {}
    out = {
        "diversity/similarity": found.cosine[rows].mean().item(),
        "diversity/novelty": found.novelty[rows].mean().item(),
        "diversity/entropy": found.entropy[rows].mean().item(),
    }
    if redundancy:
        discount = 1 / (1 + redundancy * found.similarity[rows])
        out["diversity/discount"] = discount.mean().item()
    return out
