"""Rewards: media, prompts and declared context in, one number a sample out.

One file a reward; `flowrl list rewards` names them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.rewards.core.failures import RewardBug, RewardUnavailable
    from flowrl.rewards.core.reward import Reward, load, reward, reward_class
    from flowrl.rewards.core.reward_set import RewardSet, load_set
    from flowrl.rewards.core.score import (
        TooManyInvalid,
        check_needs,
        check_valid,
        concat,
        readings,
        reward_metrics,
        score,
    )
    from flowrl.rewards.core.settings import Settings
    from flowrl.rewards.core.words import parse_words

__all__ = [
    "Reward",
    "RewardBug",
    "RewardUnavailable",
    "RewardSet",
    "Settings",
    "TooManyInvalid",
    "check_needs",
    "check_valid",
    "concat",
    "load",
    "load_set",
    "parse_words",
    "readings",
    "reward",
    "reward_class",
    "reward_metrics",
    "score",
]
_HOMES = {
    "core.failures": ("RewardBug", "RewardUnavailable"),
    "core.reward": ("Reward", "load", "reward", "reward_class"),
    "core.reward_set": ("RewardSet", "load_set"),
    "core.settings": ("Settings",),
    "core.words": ("parse_words",),
}


def __getattr__(name: str) -> Any:
    """Names load when first used: those of words need no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "core.score")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
