"""The records that the training loop gives to others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.types import Rewards, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What one iteration did: number (from 1), rollout, rewards and the line that metrics.jsonl
    holds."""

    number: int
    rollout: Rollout
    rewards: Rewards
    metrics: dict[str, float]


@dataclass(slots=True)
class Run:
    """A finished or stopped run. stopped: why it ended before its last iteration, or None."""

    path: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)
    stopped: str | None = None


class Failed(RuntimeError):
    """The run cannot go on; its last checkpoint stands."""


def reward_metrics(rewards: Rewards) -> dict[str, float]:
    """reward/<name>/mean|std, reward/total and reward/invalid of an iteration."""
    out = {
        "reward/total": rewards.total.nanmean().item(),
        "reward/invalid": float((~rewards.valid).sum()),
    }
    for name, value in rewards.raw.items():
        value = value[~value.isnan()]
        out |= (
            {
                f"reward/{name}/mean": value.mean().item(),
                f"reward/{name}/std": value.std(correction=0).item(),
            }
            if len(value)
            else {}
        )
    return out
