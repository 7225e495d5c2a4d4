"""The ratio's self-test: at the behaviour policy the training forward must give the rollout's
log-probs, or every ratio is wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.common.base import Algorithm
from flowrl.runtime.log import logger
from flowrl.training import gradient
from flowrl.types import Columns, Rollout

FP32_LIMIT = 1e-5  # |log ratio|
CLIP_SHARE = 0.1  # in low precision: p99 |log ratio| at most this share of the clip range


class RatioError(RuntimeError):
    """Rollout and loss do not evaluate the same policy."""


@torch.no_grad()
def old_scores(
    algorithm: Algorithm, policy: Any, rollout: Rollout, columns: Columns, micro: int
) -> dict[str, Tensor]:
    """Columns that hold scores of the old policy (log_prob, and normed of GRPO-Guard), (n,) each,
    by the training forward."""
    out: dict[str, Tensor] = {}
    for rows in gradient.split(algorithm, columns, micro):
        for name, value in algorithm.score(policy, rollout, columns[rows]).items():
            if name in columns.data:
                out.setdefault(name, torch.empty_like(columns.log_prob))[rows] = value.to(
                    columns.log_prob
                )
    return out


def prove(recomputed: Tensor, columns: Columns, *, precision: str, clip: float) -> bool:
    """Whether old log-probs must be recomputed each iteration. precision: the lowest at work, "no"
    is fp32.

    fp32 above 1e-5 -> RatioError. Low precision: recompute when the 99th percentile exceeds a tenth
    of clip.
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
