"""Rewards: media, prompts and declared context in, one number a sample out. One file a reward; `flowrl list rewards` names them."""

from flowrl.rewards._base import Reward, RewardBug, Settings, load, reward_class
from flowrl.rewards._score import RewardSet, TooManyInvalid, check_needs, check_valid, concat, load_set, readings, score

__all__ = [
    "Reward", "RewardBug", "RewardSet", "Settings", "TooManyInvalid",
    "check_needs", "check_valid", "concat", "load", "load_set", "readings", "reward_class", "score",
]
