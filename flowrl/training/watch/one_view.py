"""Warn where the trained policy and the old one are the same weights, so that nothing is compared.

Where both are one, losses that compare them lose their second term and still go down, which no
other metric shows.
"""

from __future__ import annotations

from flowrl.runtime.log import logger
from flowrl.training.observe import Observation
from flowrl.training.update import Learner

STEPS = 10  # optimizer steps in a row without any deviation, after which there is a warning


class OneView:
    """Counts optimizer steps at which policy/old_deviation is exactly 0 though the old policy lags
    behind: its decay is above 0, or an iteration has several steps."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.equal, self.before = learner, 0, learner.step

    def __call__(self, seen: Observation) -> dict[str, float]:
        """Look at an iteration; it logs nothing."""
        steps, self.before = self.learner.step - self.before, self.learner.step
        far = seen.metrics.get("policy/old_deviation")
        decay = self.learner.algorithm.follow(self.learner.step, seen.number - 1).get("old", 0.0)
        if far is None or not steps or not (decay or steps > 1):
            return {}
        self.equal = self.equal + steps if far == 0 else 0
        if self.equal - steps < STEPS <= self.equal:
            logger.warning(
                f"policy/old_deviation was exactly 0 over {self.equal} optimizer steps: the trained"
                " policy and the old one are one view of the weights, so the loss compares nothing;"
                " look at what Algorithm.follow and your module's views copy"
            )
        return {}
