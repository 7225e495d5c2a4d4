"""The ratio's self-test: the training forward must give the log-probs of the policy that sampled.

If it does not, every ratio is wrong: the loss would evaluate another policy than the one that
sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.common.base import Algorithm
from flowrl.config.build import precision
from flowrl.runtime.ledger import CountedPolicy
from flowrl.runtime.log import logger
from flowrl.training import gradient
from flowrl.training.update import Learner
from flowrl.types import Columns, Rollout

FP32_LIMIT = 1e-5  # most |log ratio| in fp32
CLIP_SHARE = 0.1  # in low precision: most p99 |log ratio|, as a share of the clip range


class RatioError(RuntimeError):
    """Rollout and loss do not evaluate the same policy."""


class RatioCheck:
    """The test, made in the first iteration that has rows to train.

    In low precision it may find that old log-probs must be recomputed by the training forward, in
    every iteration.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.done = False  # whether the test was made
        # whether old log-probs are recomputed in every iteration; a method may not store any
        self.recompute = learner.algorithm.rescored
        self.needed = "log_prob" in learner.algorithm.needs  # whether the next iteration calls it

    def restore(self, *, done: bool, recompute: bool) -> None:
        """Take over the results of an earlier process of the run."""
        self.done, self.recompute = done, recompute
        self.needed = self.needed and (recompute or not done)

    def __call__(self, rollout: Rollout, columns: Columns, metrics: dict[str, float]) -> Columns:
        """Return the columns, with recomputed log-probs if they are needed.

        Adds policy/ratio_error to metrics: max |log ratio| over the rows of all processes.
        """
        learner = self.learner
        with learner.policy.ledger.phase("reference"):
            old = old_scores(learner.algorithm, learner.policy, rollout, columns, learner.micro)
        if learner.algorithm.rescored:  # there is nothing to compare with
            self.done = True
            return Columns({**columns.data, **old})
        recomputed = old.get("log_prob", columns.log_prob)
        if not self.done:
            self.first(recomputed, columns)
        gap = (recomputed - columns.log_prob).abs()
        found = learner.world.collect(float(gap.max()) if len(columns) else None)
        if known := [worst for worst in found if worst is not None]:
            metrics["policy/ratio_error"] = max(known)
        return Columns({**columns.data, **old}) if self.recompute else columns

    def first(self, recomputed: Tensor, columns: Columns) -> None:
        """Make the test. All processes agree on its result."""
        cfg, learner = self.learner.cfg, self.learner
        low = needs_recomputing(
            recomputed, columns, precision=precision(cfg), clip=learner.algorithm.clip_size
        )
        found = torch.tensor([float(len(columns)), float(low)], device=recomputed.device)
        rows, low_anywhere = learner.world.sum(found).tolist()
        self.restore(done=rows > 0, recompute=low_anywhere > 0)


@torch.no_grad()
def old_scores(
    algorithm: Algorithm,
    policy: CountedPolicy,
    rollout: Rollout,
    columns: Columns,
    micro: int,
) -> dict[str, Tensor]:
    """Compute the old policy's scores by the training forward, (n,) each: log_prob, Guard's
    normed."""
    out: dict[str, Tensor] = {}
    columns = columns.brought_near()
    for rows in gradient.split(algorithm, columns, micro):
        at = rows.to(columns.log_prob.device, non_blocking=True)
        for name, value in algorithm.score(policy, rollout, columns[rows]).items():
            if name in columns.data:
                kept = out.setdefault(name, torch.empty_like(columns.log_prob))
                kept[at] = value.to(columns.log_prob)
    return out


def needs_recomputing(recomputed: Tensor, columns: Columns, *, precision: str, clip: float) -> bool:
    """Whether old log-probs must be recomputed each iteration.

    precision: the lowest in use; "no" is fp32, where more than 1e-5 -> RatioError. Low precision:
    recompute when the 99th percentile of |log ratio| exceeds a tenth of clip.
    """
    if not len(columns):
        return False
    gap = (recomputed - columns.log_prob).abs()
    worst = gap.max().item()
    if precision == "no":
        if not worst <= FP32_LIMIT:
            raise RatioError(
                f"ratio self-test: |log ratio| is {worst:.3g} at the behaviour policy, at most"
                f" {FP32_LIMIT:g} is right in fp32; likely causes: dropout or batch norm in train"
                " mode, another guidance in the loss, or weights changed during the rollout"
            )
        return False
    p99 = gap.quantile(0.99).item()
    recompute = not p99 <= CLIP_SHARE * clip
    if recompute:
        logger.warning(
            f"ratio self-test: p99 |log ratio| is {p99:.3g} in {precision}, more than"
            f" {CLIP_SHARE:g} x clip = {CLIP_SHARE * clip:.3g}; old log-probs are recomputed by the"
            f" training forward from now on ({len(columns)} more network rows an iteration)"
        )
    return recompute
