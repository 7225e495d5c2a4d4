"""Methods, one file each: which steps or samples are trained, how they get credit, and the loss.

Each file of this folder is a method; common/ holds what they share. A method of one's own is a
subclass of one of the classes here (docs/extending.md).
"""

from flowrl.algorithms.common.base import (
    Algorithm,
    Anchor,
    Anchored,
    Credit,
    Options,
    VelocityField,
    gate_column,
    plus_kl,
    summed,
)
from flowrl.algorithms.common.forward import Follower, ForwardConfig, ForwardMethod
from flowrl.algorithms.common.transition_config import TransitionConfig
from flowrl.algorithms.common.transitions import GroupMethod, TransitionMethod
from flowrl.algorithms.grpo import GRPO, GRPOConfig

__all__ = [
    "GRPO",
    "Algorithm",
    "Anchor",
    "Anchored",
    "Credit",
    "Follower",
    "ForwardConfig",
    "ForwardMethod",
    "GRPOConfig",
    "GroupMethod",
    "Options",
    "TransitionConfig",
    "TransitionMethod",
    "VelocityField",
    "gate_column",
    "plus_kl",
    "summed",
]
