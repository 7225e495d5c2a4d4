"""A reward on trial: it scores specimens as training does, and holds what several canaries compare
with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from flowrl.rewards import Reward, load_set, score
from flowrl.rewards.checks.examples import Specimen, context_of
from flowrl.rewards.checks.pictures import NOTHING, RECODINGS, recoded
from flowrl.types import MediaContext, replace

CHUNK = 16  # specimens scored at once
ROUNDING = 1e-5  # of the largest score: what the order of fp32 sums may change

Verdict = Literal["ok", "fail", "warn", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer of a canary. value: the number behind the verdict, where there is one; says: a
    sentence."""

    name: str
    verdict: Verdict
    value: float | None = None
    says: str


class Trial:
    """A reward, specimens, and what is found out about them on the way.

    kinds: of a reward that compares the members of a group, what each specimen is: "right", a
    foil's attribute, or an attack. deterministic, reads_prompt: taken for granted until a canary
    finds otherwise.
    """

    def __init__(
        self,
        reward: Reward | Callable[..., Tensor],
        specimens: Sequence[Specimen],
        device: torch.device | str,
    ) -> None:
        self.label = getattr(reward, "name", "") or getattr(reward, "__name__", "reward")
        self.rewards = load_set({self.label: reward})
        self.reward = self.rewards.rewards[self.label]
        self.specimens, self.device = list(specimens), device
        self.together = "group" in self.reward.needs
        self.kinds: list[str] = []
        self.errors: list[str] = []
        self.seen: list[Tensor] = []  # every score so far
        self.deterministic = self.reads_prompt = True

    def scores(self, specimens: Sequence[Specimen]) -> Tensor:
        """(n,) fp32 on the CPU, NaN where the reward failed; a broken contract -> RewardBug."""
        out = torch.full((len(specimens),), math.nan)
        for rows in self._batches(specimens):
            some = [specimens[row] for row in rows]
            media = torch.stack([s.media for s in some]).to(self.device)
            with self.reward.uncached():
                found = score(
                    media, [s.prompt for s in some], self.rewards, context_of(some, self.device)
                )
            out[rows] = found.raw[self.label].cpu()
            self.errors += found.errors
        self.seen.append(out)
        return out

    def _batches(self, specimens: Sequence[Specimen]) -> list[list[int]]:
        """Rows of equal size; what is compared with each other is in one batch."""
        of_shape: dict[torch.Size, list[int]] = {}
        for row, specimen in enumerate(specimens):
            of_shape.setdefault(specimen.media.shape, []).append(row)
        most = len(specimens) if self.together else CHUNK
        return [rows[i : i + most] for rows in of_shape.values() for i in range(0, len(rows), most)]

    @cached_property
    def honest(self) -> Tensor:
        """Scores of the specimens as they are."""
        return self.scores(self.specimens)

    @property
    def rounding(self) -> float:
        """Differences up to this are none."""
        return ROUNDING * float(self.honest.abs().nan_to_num().max())

    @property
    def deviation(self) -> float:
        """Standard deviation of the honest scores."""
        return deviation(self.honest)

    def blame(self, attack: str) -> Verdict:
        """What it deserves if an attack of this name wins."""
        return "fail" if self.reward.quality and attack in NOTHING else "warn"

    @cached_property
    def noise(self) -> float:
        return self.noise_of(len(RECODINGS))

    def noise_of(self, rounds: int) -> float:
        """See flowrl.rewards.checks.check.noise."""
        changes = []
        for number in range(rounds):
            copies = [
                replace(s, media=recoded(s.media, number, seed=number * len(self.specimens) + i))
                for i, s in enumerate(self.specimens)
            ]
            change = self.scores(copies) - self.honest
            changes.append(change[change.isfinite()].double())
        kept = [change for change in changes if len(change) > 1]
        freedom = sum(len(change) - 1 for change in kept)
        return (
            math.sqrt(sum(float((c - c.mean()).square().sum()) for c in kept) / freedom)
            if freedom
            else 0.0
        )


def deviation(values: Tensor) -> float:
    """Standard deviation of those that are finite; 0 without any."""
    values = values[values.isfinite()]
    return float(values.std(correction=0)) if len(values) else 0.0


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference; inf where only one of the two failed."""
    return float((a - b).abs().masked_fill(a.isnan() & b.isnan(), 0).nan_to_num(math.inf).max())


def middle(values: Tensor) -> float:
    """Median of those that are no NaN."""
    return float(values.double().nanquantile(0.5))


def specimens_of(
    media: Tensor, prompts: list[str], context: MediaContext | None = None
) -> list[Specimen]:
    """Samples of training as specimens: nothing is known about what they show."""
    given = (
        {f.name: getattr(context, f.name) for f in fields(MediaContext)}
        if context is not None
        else {}
    )
    metas = given.pop("meta", None) or [{} for _ in prompts]
    columns: dict[str, Tensor] = {name: value for name, value in given.items() if value is not None}
    return [
        Specimen(
            media=media[i],
            prompt=prompt,
            meta=metas[i],
            columns={name: value[i] for name, value in columns.items()},
        )
        for i, prompt in enumerate(prompts)
    ]
