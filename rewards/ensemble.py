"""Several rewards as one cautious reward: the worst of them, or their mean less their spread.

It counters over-optimization of a proxy, as ensembles of reward models do (arXiv:2310.02743:
worst-case and uncertainty-weighted optimization). Departures: members are any rewards, not one
network trained from several seeds, so each is brought to a common scale by constants that you
state, and the spread is a standard deviation (in the paper a variance).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
import torch
from torch import Tensor

from flowrl.rewards.core.find import check_settings
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.reward_set import load_set, sizes
from flowrl.rewards.core.rules import parse_rule
from flowrl.rewards.core.score import held
from flowrl.rewards.core.settings import Settings as Base
from flowrl.rewards.core.sizes import together
from flowrl.runtime.copies import own
from flowrl.runtime.registry import did_you_mean
from flowrl.types import MediaContext

Positive = Annotated[pydantic.FiniteFloat, pydantic.Field(gt=0)]


class Settings(Base):
    members: dict[str, Any] = pydantic.Field(
        {}, description="Members, two rewards or more: label -> 1.0, or label -> {name, settings}."
    )
    how: Literal["min", "spread"] = pydantic.Field(
        "min",
        description=(
            "How members become one score: the worst member (min), or their mean less k standard"
            " deviations (spread)."
        ),
    )
    k: pydantic.FiniteFloat = pydantic.Field(
        1.0, ge=0, description="Number of standard deviations that how=spread subtracts."
    )
    shift: dict[str, pydantic.FiniteFloat] = pydantic.Field(
        {}, description="Label -> number that is subtracted from the member's value, 0 by default."
    )
    scale: dict[str, Positive] = pydantic.Field(
        {}, description="Label -> number by which the member's value is then divided, 1 by default."
    )


class Ensemble(Reward):
    """min: the least of (r - shift) / scale over members; spread: their mean less k times their
    standard deviation (n in the denominator). NaN where a member failed."""

    Settings = Settings
    name = "ensemble"
    scale = "the worst member's (r - shift) / scale, or the members' mean less k of their spread"

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        _check(s)
        self.members = load_set(s.members).rewards
        shown = list(self.members.values())
        self.needs = frozenset().union(*(r.needs for r in shown))
        self.reads = frozenset().union(*(r.reads for r in shown))
        self.remedies = {column: text for r in shown for column, text in r.remedies.items()}
        self.reads_prompt = any(r.reads_prompt for r in shown)
        self.takes = "pictures" if any(r.takes == "pictures" for r in shown) else "any"
        self.video = _video(self.members)
        self.differentiable = all(r.differentiable for r in shown)
        self.quality = all(r.quality for r in shown)
        self.verifies = frozenset.intersection(*(r.verifies for r in shown))
        if s.how == "min" and all(r.range for r in shown):
            self.range = self._worst("low"), self._worst("high")

    @classmethod
    def network_bytes(cls, settings: Any) -> float | None:
        return together(*sizes(settings.members).values())

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        found = self.parts(media, prompts, context)
        self.problem = next((r.problem for r in self.members.values() if r.problem), None)
        values = torch.stack([self._mapped(label, value) for label, value in found.items()])
        values = values.masked_fill(~values.isfinite(), math.nan)  # (members, B)
        if self.settings.how == "min":
            return values.amin(0)
        return values.mean(0) - self.settings.k * values.std(0, correction=0)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """Each member's own value."""
        return {
            label: held(
                f"{self.name}, member {label}", reward(*own((media, prompts, context))), media
            )
            for label, reward in self.members.items()
        }

    def _mapped(self, label: str, value: Any) -> Any:
        """A member's value on the scale that all share."""
        return (value - self.settings.shift.get(label, 0.0)) / self.settings.scale.get(label, 1.0)

    def _worst(self, end: Literal["low", "high"]) -> float:
        """The least of the members' lowest or highest possible values."""
        ends = {label: r.range[end == "high"] for label, r in self.members.items() if r.range}
        return min(self._mapped(label, value) for label, value in ends.items())

    def inner_rewards(self) -> list[Reward]:
        return list(self.members.values())


def _check(s: Settings) -> None:
    """Raise ValueError, before any member is loaded, where there are fewer than two members, or an
    entry holds more than a name and settings."""
    if len(s.members) < 2:
        raise ValueError(
            f"reward ensemble compares two rewards or more, and members names {len(s.members)};"
            " write reward.ensemble.members={clip: 1.0, pickscore: 1.0}"
        )
    for key, constants in (("shift", s.shift), ("scale", s.scale)):
        for label in sorted(constants.keys() - s.members.keys()):
            near = did_you_mean(label, s.members)
            raise ValueError(f"reward ensemble: {key}.{label} is of no member{near}")
    for label, entry in s.members.items():
        if not callable(entry):
            _check_member(label, dict(entry) if isinstance(entry, Mapping) else {"weight": entry})


def _check_member(label: str, entry: dict[str, Any]) -> None:
    rule = parse_rule(label, entry).stated
    if rule != {"weight": 1.0}:
        raise ValueError(
            f"reward ensemble: member {label} has {rule}, and members have no weight, gate,"
            f" stratify or mode; write members.{label}=1.0, and scale.{label} to make it count less"
            " or more"
        )
    if not callable(entry.get("reward")):
        what = f"reward ensemble, member {label}"
        check_settings(label, entry, what=what, prefix=f"members.{label}.")


def _video(members: Mapping[str, Reward]) -> Literal["yes", "no", "only"]:
    """Media that all members take; raises ValueError where no media suit all."""
    taken = {reward.video: label for label, reward in members.items()}
    if {"no", "only"} <= taken.keys():
        raise ValueError(
            f"reward ensemble: {taken['no']} takes images alone and {taken['only']} videos alone;"
            " wrap the first in the reward video, or leave one of them out"
        )
    return "no" if "no" in taken else "only" if "only" in taken else "yes"


REWARD = Ensemble
