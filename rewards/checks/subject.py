"""The reward that is checked: it scores examples as training does, and holds what several checks
compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from flowrl.data.media import media_kind
from flowrl.rewards import Reward, load_set, score
from flowrl.rewards.checks.examples import Example, context_of
from flowrl.rewards.checks.pictures import NOTHING, RECODINGS, recoded
from flowrl.rewards.core.reward import verifiable
from flowrl.types import MediaContext

CHUNK = 16  # most examples scored at once
ROUNDING = 1e-5  # share of the largest score that the order of fp32 sums may change

Verdict = Literal["ok", "fail", "warn", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check."""

    name: str  # name of the check
    verdict: Verdict  # "fail" and "warn" ask for action; "note" is only information
    value: float | None = None  # the number behind the verdict, if there is one
    says: str  # sentence for the user


class Subject:
    """A reward, examples, and the facts that the checks find out about them on the way.

    kinds: the kind of each example, for a reward that compares the members of a group: "right", the
    attribute of a near miss, or an attack. deterministic, reads_prompt: true until a check finds
    otherwise.
    """

    def __init__(
        self,
        reward: Reward | Callable[..., Tensor],
        examples: Sequence[Example],
        device: torch.device | str,
    ) -> None:
        self.label = getattr(reward, "name", "") or getattr(reward, "__name__", "reward")
        self.rewards = load_set({self.label: reward})
        self.reward = self.rewards.rewards[self.label]
        verifiable(self.reward.verifies)
        self.examples, self.device = list(examples), device
        self.together = "group" in self.reward.needs
        self.kinds: list[str] = []
        self.errors: list[str] = []
        self.seen: list[Tensor] = []  # every score so far
        self.deterministic = self.reads_prompt = True

    def scores(self, examples: Sequence[Example]) -> Tensor:
        """Score examples -> (n,) fp32 on the CPU, NaN where the reward failed; a broken contract ->
        RewardBug."""
        out = torch.full((len(examples),), math.nan)
        for rows in self._batches(examples):
            some = [examples[row] for row in rows]
            media = torch.stack([s.media for s in some]).to(self.device)
            prompts, context = [s.prompt for s in some], context_of(some, self.device)
            with self.reward.uncached():
                found = score(media, prompts, self.rewards, context)
            out[rows] = found.raw[self.label].cpu()
            self.errors += found.errors
        self.seen.append(out)
        return out

    def _batches(self, examples: Sequence[Example]) -> list[list[int]]:
        """Rows of equal size; samples that are compared with each other share a batch."""
        of_shape: dict[torch.Size, list[int]] = {}
        for row, example in enumerate(examples):
            of_shape.setdefault(example.media.shape, []).append(row)
        most = len(examples) if self.together else CHUNK
        return [rows[i : i + most] for rows in of_shape.values() for i in range(0, len(rows), most)]

    @cached_property
    def honest(self) -> Tensor:
        """Scores of the examples as they are."""
        return self.scores(self.examples)

    @property
    def rounding(self) -> float:
        """Largest difference between scores that the order of fp32 sums can make."""
        return ROUNDING * float(self.honest.abs().nan_to_num().max())

    @property
    def deviation(self) -> float:
        """Standard deviation of the honest scores."""
        return deviation(self.honest)

    def blame(self, attack: str) -> Verdict:
        """The verdict if an attack of this name wins."""
        return "fail" if self.reward.quality and attack in NOTHING else "warn"

    def unscored(self, scores: Tensor) -> str | None:
        """Say what is wrong where scores (n,) of changed pictures fail more often than honest
        ones."""
        lost, usual = (~scores.isfinite()).float().mean(), (~self.honest.isfinite()).float().mean()
        if lost <= usual:
            return None
        said = f": {self.errors[-1]}" if self.errors else ""
        return f"{int((~scores.isfinite()).sum())} of {len(scores)} are not scored{said}"

    def blind(self, *attributes: str) -> Verdict:
        """The verdict if the reward does not tell right from wrong in these attributes of
        prompts."""
        return "fail" if self.reward.verifies.issuperset(attributes) else "warn"

    @cached_property
    def noise(self) -> float:
        return self.noise_of(len(RECODINGS))

    def noise_of(self, rounds: int) -> float:
        """See flowrl.rewards.checks.check.noise; 0 for media that are no pictures, as nobody knows
        how to re-encode them."""
        if any(media_kind((1, *s.media.shape)) == "arrays" for s in self.examples):
            return 0.0
        changes = [self._change_under_recoding(number) for number in range(rounds)]
        kept = [change for change in changes if len(change) > 1]
        freedom = sum(len(change) - 1 for change in kept)
        if not freedom:
            return 0.0
        return math.sqrt(sum(float((c - c.mean()).square().sum()) for c in kept) / freedom)

    def _change_under_recoding(self, number: int) -> Tensor:
        """Changes of the scores, fp64, of examples that could be scored both times."""
        copies = [
            replace(s, media=recoded(s.media, number, seed=number * len(self.examples) + i))
            for i, s in enumerate(self.examples)
        ]
        change = self.scores(copies) - self.honest
        return change[change.isfinite()].double()


def deviation(values: Tensor) -> float:
    """Standard deviation of the finite values; 0 without any."""
    values = values[values.isfinite()]
    return float(values.std(correction=0)) if len(values) else 0.0


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference between scores (n,) and (n,); inf where only one of two failed."""
    return float((a - b).abs().masked_fill(a.isnan() & b.isnan(), 0).nan_to_num(math.inf).max())


def middle(values: Tensor) -> float:
    """Median of the values that are not NaN."""
    return float(values.double().nanquantile(0.5))


def examples_of(
    media: Tensor, prompts: list[str], context: MediaContext | None = None
) -> list[Example]:
    """Make samples of training examples: their prompts are known, and what they show is not."""
    context = MediaContext() if context is None else context
    columns = {field.name: getattr(context, field.name) for field in fields(MediaContext)}
    metas = columns.pop("meta") or [{} for _ in prompts]
    given = {name: value for name, value in columns.items() if value is not None}
    return [
        Example(
            media=media[i],
            prompt=prompt,
            meta=metas[i],
            columns={name: value[i] for name, value in given.items()},
        )
        for i, prompt in enumerate(prompts)
    ]
