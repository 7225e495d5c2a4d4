"""Whether media have as many frames as were asked for: pipelines round the number."""

from __future__ import annotations

from torch import Tensor

from flowrl.policy import Policy
from flowrl.policy.pipeline import PipelinePolicy


def other_frames(policy: Policy, media: Tensor) -> str | None:
    """Write a sentence about media (B, F, 3, H, W) if another number of frames was asked for; None
    if not."""
    own = policy.prober.runner.kwargs if isinstance(policy, PipelinePolicy) else {}
    made = media.shape[1] if media.ndim == 5 else 1
    if (asked := own.get("num_frames")) in (None, made):
        return None
    return f"the pipeline makes num_frames={made}, and was asked for num_frames={asked}"
