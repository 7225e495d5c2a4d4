"""Whether what a policy decodes suits what reads it: tried on one sample, before a run."""

from __future__ import annotations

import torch

from flowrl.algorithms.common.base import Algorithm
from flowrl.data.media import media_kind
from flowrl.policy import Policy
from flowrl.rewards import RewardSet
from flowrl.rewards.core.features import Features
from flowrl.rollouts.from_files import media_shape
from flowrl.rollouts.gradient_scorer import check_gradient


def check_media(rewards: RewardSet, algorithm: Algorithm, policy: Policy) -> None:
    """ValueError where features or detectors read pictures and the model makes others, or where a
    reward's gradient does not come through the decoder."""
    check_comparable(rewards.features, policy)
    if rewards.detectors:
        rewards.detectors.check((1, *media_shape(policy)))
    if rewards.climbers or "reward" in algorithm.needs:
        check_decoder(policy)


def check_comparable(features: Features | None, policy: Policy) -> None:
    """ValueError where features are those of pictures, and the model makes others."""
    if features is None or not features.pictures:
        return
    shape = media_shape(policy)
    if media_kind((1, *shape)) == "arrays":
        raise ValueError(
            f"diversity.features={features.label} takes images (3, H, W) or videos (F, 3, H, W),"
            f" and the model makes samples of shape {shape}; name a function of your own, as"
            " path/to/file.py:NAME"
        )


def check_decoder(policy: Policy) -> None:
    """ValueError where the decoder passes no gradient on."""
    with torch.enable_grad():
        x = torch.zeros(1, *policy.latent_shape, device=policy.device, requires_grad=True)
        check_gradient(x, policy.decode(x))
