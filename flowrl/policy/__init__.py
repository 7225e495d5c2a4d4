"""Any diffusers pipeline, or a plain nn.Module, as a policy: a velocity field in flow coordinates
with trainable parts."""

from flowrl.policy.base import Policy
from flowrl.policy.check import SelfCheck
from flowrl.policy.load import load_policy
from flowrl.policy.replay.call import Cond
from flowrl.policy.replay.coords import Schedule
from flowrl.policy.replay.record import UnreplayableError

__all__ = ["Cond", "Policy", "Schedule", "SelfCheck", "UnreplayableError", "load_policy"]
