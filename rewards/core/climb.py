"""A reward as a function that can be climbed: scores with a gradient to the media."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flowrl.rewards.core.counted import behind, door
from flowrl.rewards.core.reward_set import RewardSet
from flowrl.rewards.core.score import check_columns, check_kind, given_columns, held
from flowrl.runtime.copies import own
from flowrl.types import MediaContext


def without_gradient(rewards: RewardSet) -> str:
    """Why rewards cannot be climbed as they are loaded: names those that give no gradient; "" where
    all weighted ones give one."""
    for label, primary in rewards.strata.items():
        return (
            f"the method climbs the gradient of rewards, and reward.{label}.stratify={primary} has"
            f" none; write reward.{label}.gate.{primary}=0.5 in its place"
        )
    flat = [
        label
        for label, reward in rewards.rewards.items()
        if label in rewards.weighted and not reward.differentiable
    ]
    if not flat:
        return ""
    return (
        f"the method climbs the gradient of rewards, and {', '.join(flat)} as loaded gives none:"
        " leave it out, give it weight 0, or load a model-based one with rounding=false"
    )


def climb(media: Tensor, prompts: list[str], rewards: RewardSet, context: MediaContext) -> Tensor:
    """Weighted sum of rewards (B,) fp32 of media (B, *D), differentiable in the media, but for
    gates, which have no gradient. Rewards of weight 0 that are no gate are not called."""
    asked = {label: r for label, r in rewards.rewards.items() if label in rewards.decisive}
    check_columns(replace(rewards, rewards=asked), given_columns(context))
    check_kind(asked, media, prompts)
    values: dict[str, Tensor] = {}
    for label, reward in asked.items():
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(rewards.weights[label])):
            values[label] = held(label, reward(*own((media, prompts, context))), media)
    total = torch.zeros(len(media), device=media.device)
    for label, value in values.items():
        if weight := rewards.weights[label]:
            gates = rewards.gates(label)
            total = total + weight * (behind(value, door(gates, values)) if gates else value)
    return total
