"""Any diffusers pipeline, or a plain nn.Module, as a velocity field with trainable parts."""

from flowrl.policy.base import Policy
from flowrl.policy.check import SelfCheck
from flowrl.policy.generator import GeneratorPolicy
from flowrl.policy.load import load_policy
from flowrl.policy.replay.arguments import Cond
from flowrl.policy.replay.coords import Schedule
from flowrl.policy.replay.errors import UnreplayableError

__all__ = [
    "Cond",
    "GeneratorPolicy",
    "Policy",
    "Schedule",
    "SelfCheck",
    "UnreplayableError",
    "load_policy",
]
