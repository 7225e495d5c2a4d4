"""Rewards with one fault each, for tests of the reward checks."""

from __future__ import annotations

from flowrl import rewards
from flowrl.rewards.checks import check as reward_checks
from flowrl.rewards.checks.subject import Subject
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


def check(reward, examples, **options):
    """Findings of a check by name."""
    return {f.name: f for f in reward_checks.check(reward, examples, **options)}


def tried(one, reward, examples):
    """Findings of one of the checks."""
    return one(Subject(reward, examples, "cpu"))
