"""Rank within a group by any other reward, for scores of which only the order counts.

`flow_factory` is Flow-Factory's groupwise reward (github.com/X-GenGroup/Flow-Factory,
rewards/pick_score.py), which ranks by PickScore only: rank 0 for the worst, over n. Departures:
ties share their mean rank (in Flow-Factory argsort breaks them by place in the batch); a sample
that could not be scored takes no rank and does not count in n. `unit` equals win_rate with a hard
pointwise judge.
"""

from __future__ import annotations

from typing import Any, Literal

import pydantic
import torch
from torch import Tensor

from flowrl.rewards.core.settings import Settings as Base
from flowrl.rewards.core.wrap import Around
from flowrl.rewards.judge.compare import alone, groups_of
from flowrl.types import MediaContext

SCALES = {
    "flow_factory": "rank within the group over its size, 0 (worst) to (n - 1) / n",
    "unit": "rank within the group over its size less one, 0 (worst) to 1 (best)",
    "centred": "rank within the group from -1 (worst) to 1 (best), with mean 0",
}


class Settings(Base):
    reward: Any = pydantic.Field(
        None,
        description=(
            "Name of the pointwise reward that ranks samples; Python may also give a loaded one,"
            " or a function."
        ),
    )
    reward_settings: dict[str, Any] = pydantic.Field(
        default_factory=dict, description="Settings of that reward."
    )
    form: Literal["flow_factory", "unit", "centred"] = pydantic.Field(
        "flow_factory",
        description=(
            "Scale of ranks: rank / n (flow_factory), rank / (n - 1) (unit), or from -1 to 1"
            " (centred)."
        ),
    )


class Rank(Around):
    """Rank of the inner reward's score among the members of the group; ties share their mean rank.

    It is NaN where fewer than two members could be scored.
    """

    Settings = Settings
    name = "rank"
    scale = SCALES["flow_factory"]
    needs = frozenset({"group"})

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        if not callable(self.inner):
            raise ValueError(
                f"reward.rank.reward={type(self.inner).__name__} compares and gives no score; rank"
                " by a reward, or use win_rate"
            )
        self.scale = SCALES[s.form]
        self.range = (-1.0 if s.form == "centred" else 0.0, 1.0)

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        groups = groups_of(prompts, context, reward=self.name)
        values = self.inner(media, prompts, context)
        self.problem = getattr(self.inner, "problem", None) or alone(groups)
        out = torch.full_like(values, torch.nan)
        for rows in groups.values():
            kept = [row for row in rows if bool(values[row].isfinite())]
            if len(kept) > 1:
                out[kept] = self._placed(mean_ranks(values[kept]))
        return out

    def _placed(self, ranks: Tensor) -> Tensor:
        """Ranks 0 .. n-1 on the scale of the form."""
        n = len(ranks)
        match self.settings.form:
            case "flow_factory":
                return ranks / n
            case "unit":
                return ranks / (n - 1)
            case _:  # centred
                return 2 * ranks / (n - 1) - 1


def mean_ranks(values: Tensor) -> Tensor:
    """Ranks (n,) fp32 of values (n,): how many are lower, plus half of the equal others."""
    lower, equal = values[None] < values[:, None], values[None] == values[:, None]
    return lower.sum(1) + (equal.sum(1) - 1) / 2


REWARD = Rank
