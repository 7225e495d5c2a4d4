"""AWM, Advantage Weighted Matching (arXiv:2509.25050): a flow-matching error as log-likelihood.

The policy gradient of l(x0; s, eps) = -w(m), at the same noise for the trained and the old policy:
PPO's clipped ratio exp(l - l_old) of each row, or of the mean over a sample's noise levels
(ratio="sample": GSPO). A is clipped to +-adv_clip and divided by it. Rollouts may use any solver.

docs/algorithms/awm.md says how it differs from the authors' code.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from flowrl.algorithms.common import base, forward
from flowrl.runtime.rule import read_above, read_when
from flowrl.types import Advantages, Columns, LossOutput, Rollout

TINY = 1e-10  # added to m before a root, whose derivative is infinite at 0
OFF_POLICY = read_when("algorithm.off_policy", True)
KEEPS_OLD = OFF_POLICY | read_above("algorithm.ema_weight", 0)


class AWMConfig(forward.ForwardConfig, forward.Follower):
    levels: forward.Levels = Field(
        "stratified",
        description=(
            "Which noise levels are trained: levels of the schedule, one from each of its equal"
            " parts (stratified), or continuous levels."
        ),
    )
    share: Literal["sample", "group", "all"] = Field(
        "all", description="Which samples are trained at the same noise levels."
    )
    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = Field(
        "ghuber",
        description="w(m): m, s m, s^2 m, s sqrt(m), or s m^power / power (generalised Huber).",
    )
    power: Annotated[PositiveFloat, read_when("algorithm.weighting", "ghuber")] = Field(
        0.25, description="Exponent of ghuber."
    )
    ratio: Annotated[Literal["row", "sample"], OFF_POLICY] = Field(
        "row", description="One ratio for each noise level, or one for each sample."
    )
    clip: Annotated[tuple[PositiveFloat, PositiveFloat], OFF_POLICY] = Field(
        (1.0, 1.0), description="The ratio is clipped to 1 - first .. 1 + second."
    )
    ema_weight: NonNegativeFloat = Field(
        1.0, description="Weight of the mean square distance of velocities to the old policy."
    )
    off_policy: bool = Field(
        False,
        description=(
            "The old policy samples the rollouts, and ratios compare with it; off: the current"
            " policy samples, and its ratio is 1."
        ),
    )
    old_slope: Annotated[forward.Slope, KEEPS_OLD] = 0.001
    old_decay: Annotated[forward.Decay, KEEPS_OLD] = 0.3


class AWM(forward.ForwardMethod):
    Config = AWMConfig
    config: AWMConfig

    def __init__(self, config: AWMConfig):
        self.rollout_view = "old" if config.off_policy else "default"
        self.reads_old = config.off_policy or config.ema_weight > 0
        super().__init__(config)
        self.couples = "sample" if config.ratio == "sample" else "row"

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        rows = super().columns(rollout, advantages, seed=seed, iteration=iteration)
        return Columns({**rows.data, "unit": rows.state})

    def compared(
        self, rows: forward.Noised, v: Tensor, other: forward.OtherVelocity
    ) -> dict[str, Tensor]:
        """fit = -w(m), fit_old (n,); old (n,): distance to the old policy, where it is read."""
        fit = -self.weighted(rows.error(v), rows.level)
        # on-policy, the old weights are those with which the update starts
        scores = {"fit": fit, "fit_old": fit.detach()}
        if self.reads_old:
            v_old = other("old")
            scores["old"] = forward.distance(v, v_old)
            if self.config.off_policy:
                scores["fit_old"] = -self.weighted(rows.error(v_old), rows.level)
        return scores

    def weighted(self, m: Tensor, sigma: Tensor) -> Tensor:
        """w(m) of errors and noise levels (n,) -> (n,) fp32; roots in fp64."""
        s, m, p = sigma.double(), m.double(), self.config.power
        return {
            "uniform": lambda: m,
            "t": lambda: s * m,
            "t2": lambda: s.square() * m,
            "huber": lambda: s * ((m + TINY).sqrt() - TINY**0.5),
            "ghuber": lambda: s * ((m + TINY) ** p - TINY**p) / p,
        }[self.config.weighting]().float()

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        c, (low, high) = self.config, self.config.clip
        log_ratio = scores["fit"] - scores["fit_old"]
        if c.ratio == "sample":
            log_ratio = base.mean_of_unit(log_ratio, batch.host("unit"))
        ratio, adv = log_ratio.exp(), batch.adv / c.adv_clip
        term, stopped = base.clipped_surrogate(ratio, ratio.clamp(1 - low, 1 + high), adv)
        metrics = {
            "policy/clip_fraction": stopped,
            "policy/log_ratio": log_ratio.abs(),
            "policy/error": -scores["fit"],
        }
        if "old" in scores:
            term = term + c.ema_weight * scores["old"]
            metrics["policy/old_distance"] = scores["old"]
        term = base.plus_kl(term, scores, metrics, c.kl_weight)
        return base.summed(term, metrics, batch)


ALGORITHM = AWM
