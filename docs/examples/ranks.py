"""Regression by ranks: samples that beat others of their prompt are learned, and those that lose to
them are unlearned, until their error reaches a margin.

    A = (samples that it beats - samples that beat it) / (samples - 1), from -1 to 1
    L = A e where A > 0, and -A max(0, margin - e) where A < 0;   e = mean (x0 of the policy - x0)^2
"""

from flowrl.algorithms import ForwardConfig, ForwardMethod, plus_kl, summed


class RanksConfig(ForwardConfig):
    steps: int = 2  # noise levels at which each sample is trained
    error: str = "x0"  # what is compared: data, not velocities
    margin: float = 1.0  # error from which on a bad sample is left alone


class Ranks(ForwardMethod):
    Config = RanksConfig

    def leaf_advantages(self, rewards, group):
        """Rewards of samples (B,) and their prompts (B,) -> A (B,), NaN without a reward."""
        rivals = group[:, None] == group
        beats = rivals & (rewards.total[:, None] > rewards.total)
        adv = (beats.sum(1) - beats.sum(0)) / (rivals.sum(1) - 1).clamp(min=1)
        return adv.masked_fill(~rewards.valid, float("nan"))

    def loss(self, scores, batch):
        """Errors (n,) of samples that were noised again, and their rows (n,) -> summed loss."""
        error, good = scores["error"], batch.adv > 0
        short = (self.config.margin - error).clamp(min=0)
        term = batch.adv.abs() * error.where(good, short)
        metrics = {"policy/error": error}
        return summed(plus_kl(term, scores, metrics, self.config.kl_weight), metrics, batch)
