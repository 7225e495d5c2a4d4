"""Rewards: media, prompts and declared context in, one number a sample out.

One file a reward; `flowrl list rewards` names them.
"""

from flowrl.rewards.core.reward import (
    Reward,
    RewardBug,
    RewardUnavailable,
    Settings,
    load,
    reward,
    reward_class,
)
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
