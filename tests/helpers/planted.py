"""Rewards with one fault each, for tests of the canaries."""

from __future__ import annotations

from flowrl import rewards
from flowrl.rewards.checks import check as canaries
from flowrl.rewards.checks.subject import Trial
from flowrl.rewards.core.reward import FunctionReward
from flowrl.types import MediaContext

SHAPES = rewards.load("shapes", reading="partial")


def planted(function, **attributes):
    """A reward of any function (media, prompts, context) with any attributes."""
    reward = FunctionReward(function, "planted")
    for name, value in attributes.items():
        setattr(reward, name, value)
    return reward


def reading_clauses(function):
    """A reward that reads the clauses of each prompt."""
    return planted(function, needs=frozenset({"meta"}), reads=frozenset({"include"}))


def brightness(media, prompts=None, context=None):
    return media.flatten(1).mean(1)


def shapes_of(edit, media, prompts, context):
    """The shapes reward where every clause is edited."""
    metas = [
        meta | {"include": [edit(clause) for clause in meta["include"]]} for meta in context.meta
    ]
    return SHAPES(media, prompts, MediaContext(meta=metas))


def check(reward, specimens, **options):
    """Findings of a check by name."""
    return {f.name: f for f in canaries.check(reward, specimens, **options)}


def tried(canary, reward, specimens):
    """Findings of one canary."""
    return canary(Trial(reward, specimens, "cpu"))
