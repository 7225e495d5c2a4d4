"""A reward as a function that can be climbed: scores with a gradient to the media."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flowrl.rewards.core.counted import behind, door
from flowrl.rewards.core.domains import covers, domains_of
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.reward_set import RewardSet
from flowrl.rewards.core.score import Samples, check_columns, check_kind, given_columns, held
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
    gates, which have no gradient. Rewards of weight 0 that are no gate are not called. A reward
    with domains adds nothing, value or gradient, to samples of others."""
    called = {label: r for label, r in rewards.rewards.items() if label in rewards.decisive}
    check_columns(replace(rewards, rewards=called), given_columns(context))
    check_kind(called, media, prompts)
    samples = Samples(media=media, prompts=prompts, context=context)
    asked = covers(rewards, domains_of(rewards, context.meta or []))
    values: dict[str, Tensor] = {}
    for label, reward in called.items():
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(rewards.weights[label])):
            rows = asked[label].nonzero().flatten() if label in asked else None
            values[label] = _value(label, reward, samples, rows)
    total = torch.zeros(len(media), device=media.device)
    if asked:  # a batch of samples that no reward is asked for has a gradient, too, which is 0
        total = total + 0.0 * media.flatten(1)[:, 0]
    for label, value in values.items():
        if weight := rewards.weights[label]:
            gates = rewards.gates(label)
            total = total + weight * (behind(value, door(gates, values)) if gates else value)
    return total


def _value(label: str, reward: Reward, samples: Samples, rows: Tensor | None) -> Tensor:
    """The value (B,) of a reward for these rows of the samples, None: all; 0 for the others."""
    if rows is None:
        return held(label, reward(*own(samples.seen)), samples.media)
    out = torch.zeros(len(samples.media), device=samples.media.device)
    if not len(rows):
        return out
    some = samples.take(rows)
    found = held(label, reward(*own(some.seen)), some.media)
    return out.index_put((rows.to(out.device),), found)
