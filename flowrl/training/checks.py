"""Checks that try a policy before a run: that it takes the prompts' conditions, and that its media
suit their readers. Rules say which settings do not go together (flowrl/config/rules.py)."""

from __future__ import annotations

import torch

from flowrl.algorithms.common.base import Algorithm
from flowrl.config.schema import Config
from flowrl.data import conditions
from flowrl.data.media import media_kind
from flowrl.data.prompts import Prompts
from flowrl.policy import Policy
from flowrl.policy.pipeline import PipelinePolicy
from flowrl.rewards import RewardSet
from flowrl.rewards.core.features import Features
from flowrl.rollouts.from_files import media_shape
from flowrl.rollouts.gradient_scorer import check_gradient
from flowrl.runtime.log import logger
from flowrl.runtime.memory import ran_out
from flowrl.runtime.text import printable

MOST_KINDS = 8  # most kinds of conditions that are tried before a run


def columns_read(cfg: Config, rewards: RewardSet) -> frozenset[str]:
    """Name the columns of prompts that something other than the pipeline reads."""
    own = {"prompt", "conditions", "reference", cfg.data.sampler.help.column or "prompt"}
    return frozenset(own).union(*(reward.reads for reward in rewards.rewards.values()))


def check_conditions(policy: Policy, prompts: Prompts, read: frozenset[str]) -> None:
    """ValueError if the policy does not take the prompts' conditions: a prompt of each kind is
    tried, so that a run does not stop in the middle."""
    if isinstance(policy, PipelinePolicy):
        policy.check_columns(sorted({key for row in prompts for key in row} - read))
    places = conditions.kinds(prompts)
    if len(places) > MOST_KINDS:
        logger.info(f"{len(places)} kinds of conditions; {MOST_KINDS} are tried before the run")
    for place in places[:MOST_KINDS]:
        if own := conditions.of([prompts[place]]):
            try:
                policy.encode([prompts[place]["prompt"]], own)
            except (ValueError, RuntimeError) as error:
                if ran_out(error):
                    raise
                text = printable(prompts[place]["prompt"], 60)
                raise ValueError(f'the conditions of prompt "{text}": {error}') from error


def check_media(rewards: RewardSet, algorithm: Algorithm, policy: Policy) -> None:
    """ValueError if features or detectors read pictures and the model makes other media, or if a
    reward's gradient does not come through the decoder."""
    check_comparable(rewards.features, policy)
    if rewards.detectors:
        rewards.detectors.check((1, *media_shape(policy)))
    # rules refuse gradients and methods of flows where tokens are drawn
    if (rewards.climbers or "reward" in algorithm.needs) and not policy.unmasks:
        check_decoder(policy)


def check_comparable(features: Features | None, policy: Policy) -> None:
    """ValueError if features are made for pictures, and the model makes other media."""
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
    """ValueError if the decoder passes no gradient on."""
    with torch.enable_grad():
        x = torch.zeros(1, *policy.latent_shape, device=policy.device, requires_grad=True)
        check_gradient(x, policy.decode(x))
