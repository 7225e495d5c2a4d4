"""Any diffusers pipeline, or a plain nn.Module, as a policy: a velocity field in flow coordinates
with trainable parts."""

from flowrl.policy.base import Policy
from flowrl.policy.check import SelfCheck
from flowrl.policy.coords import Schedule
from flowrl.policy.load import load_policy
from flowrl.policy.record import UnreplayableError
from flowrl.policy.replay import Cond

__all__ = ["Cond", "Policy", "Schedule", "SelfCheck", "UnreplayableError", "load_policy"]
