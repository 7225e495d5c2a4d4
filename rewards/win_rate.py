"""Win rate within a group (Pref-GRPO, arXiv:2508.20751).

A sample's reward is how often it is preferred to the others of its prompt. Pairwise preferences
cannot be inflated by a model that learns to please a score: the rates of a group always sum to
G / 2. Reference: github.com/CodeGoat24/Pref-GRPO, fastvideo/rewards.

Departures:
* A pair that the judge could not decide counts for neither; in the reference it is a tie, 0.5 to
  both, as is an unreadable answer.
* The reference rounds rates to 3 decimals; here they stay exact.
* A sample without another of its group is NaN, with the reason in the log; in the reference it
  scores 0.
* Any pointwise reward may be the judge, both orders may be asked (`swap`), and pairs may be sampled
  (`opponents`).
"""

from __future__ import annotations

from typing import Any

import pydantic
from torch import Tensor

from flowrl.rewards.core.settings import Settings as Base
from flowrl.rewards.core.wrap import Around
from flowrl.rewards.judge.compare import (
    Comparator,
    alone,
    ask,
    from_pointwise,
    groups_of,
    pairs_of,
    win_rates,
)
from flowrl.types import MediaContext


class Settings(Base):
    judge: Any = pydantic.Field(
        None,
        description=(
            "Name of the reward that prefers, by pairs if it can compare, else by its scores;"
            " Python may also give an object."
        ),
    )
    judge_settings: dict[str, Any] = pydantic.Field(
        default_factory=dict, description="Settings of the judge."
    )
    temperature: float = pydantic.Field(
        0.0,
        ge=0,
        description=(
            "Temperature of sigmoid(difference / temperature), by which a pointwise judge prefers;"
            " 0: it gives 1 or 0."
        ),
    )
    swap: bool = pydantic.Field(
        False,
        description=(
            "Ask a judge that compares in both orders and average, which costs twice as much and"
            " removes position bias."
        ),
    )
    opponents: int | None = pydantic.Field(
        None, ge=1, description="About how many others each sample is compared with; null: all."
    )
    chunk: int = pydantic.Field(
        32, ge=1, description="Most pairs in one call of a judge that compares."
    )


class WinRate(Around):
    """Mean win probability over the other members of the group, in [0, 1].

    The mean of every group is 0.5.
    """

    Settings = Settings
    name = "win_rate"
    asks = "judge"
    scale = (
        "share of the group's other members that a sample is preferred to, 0 to 1 (ties count half)"
    )
    range = (0.0, 1.0)
    needs = frozenset({"group"})

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        self.judge: Comparator = (inner := self.inner)
        if not hasattr(inner, "compare"):
            self.judge = from_pointwise(inner, temperature=s.temperature)
        elif s.temperature:
            name = getattr(inner, "name", type(inner).__name__)
            raise ValueError(
                f"reward.win_rate: temperature={s.temperature:g} is for judges that score, and"
                f" {name} compares; leave it out"
            )

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        s = self.settings
        groups = groups_of(prompts, context, reward=self.name)
        pairs = pairs_of(groups, opponents=s.opponents)
        answers = ask(self.judge, media, prompts, context, pairs, swap=s.swap, chunk=s.chunk)
        self.problem = getattr(self.inner, "problem", None) or alone(groups)
        return win_rates(pairs, answers.to(media.device), len(media))


REWARD = WinRate
