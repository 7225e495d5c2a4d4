"""Generate, critique, refine: a judge rewrites the prompt, and the picture is made again.

RationalRewards (arXiv:2604.11626), whose authors use one round and leave pictures of 3 and more in
every aspect as they are. Here it works with any reward that has

    refine(media (n, ...), prompts, context) -> a better prompt for each sample, or None

Each picture is made from the noise of the first, criticised and scored against the prompt that was
asked for, and taken only where it scores higher, so that a judge which rewrites the prompt into
another one gains nothing by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowrl.rewards import RewardBug, RewardSet
from flowrl.rollouts.inference.candidates import SampleRequest

WHY = {
    "none": "the judge gave no other prompt",
    "long": "the new prompt was too long",
    "worse": "the new picture scored no higher",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refine:
    """How often prompts are rewritten, and which."""

    rounds: int = 1  # most rewritings of a prompt; one that does not help is its last
    # score from which on a picture is left as it is; None: no picture is
    enough: float | None = None
    longest: int = 1000  # most characters of a new prompt; a longer one has drifted and is not used

    def __post_init__(self) -> None:
        for name in ("rounds", "longest"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"refine {name}={value!r} should be a whole number from 1")
        if self.enough is not None and not isinstance(self.enough, int | float):
            raise ValueError(f"refine enough={self.enough!r} should be a number, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refined:
    """The pictures after refinement."""

    media: Tensor  # (P, *D) the pictures
    texts: list[str]  # (P,) prompts from which they were made
    score: Tensor  # (P,) score of these pictures; -inf where scoring failed
    first: Tensor  # (P,) score of the first pictures; -inf where scoring failed
    calls: int  # network calls of all prompts together
    # reason (a key of WHY, or "enough") -> number of prompts that kept their first picture
    why: Counter[str]

    def said(self) -> str:
        """Say in one sentence what came of it."""
        kept, count = self.why.total(), len(self.texts)
        if kept == self.why["enough"] == count:
            return f"refine: all {count} first pictures were good enough"
        because = ", ".join(f"{WHY[key]} ({n})" for key, n in self.why.items() if key in WHY)
        if kept == count:
            return f"refine improved no picture of {count}: {because}; the first ones are kept"
        better = self.score > self.first
        known = better & self.first.isfinite()
        means = [float(value[known].mean()) for value in (self.first, self.score)]
        gain = ", mean score {:.4g} before and {:.4g} after".format(*means) if known.any() else ""
        return f"refine improved {count - kept} pictures of {count}{gain}" + (
            f"; of the others {because}" if because else ""
        )


def critic_of(rewards: RewardSet) -> Any:
    """Find the reward that rewrites prompts; none or several -> ValueError."""
    found = [r for r in rewards.rewards.values() if callable(getattr(r, "refine", None))]
    if len(found) != 1:
        what = "several of" if found else "none of"
        raise ValueError(
            f"refine needs one judge that rewrites prompts, as rationalrewards does, and {what}"
            f" {', '.join(rewards.rewards)} can"
        )
    return found[0]


def refined(request: SampleRequest, rewards: RewardSet, how: Refine) -> Refined:
    """Sample the prompts asked for, and again with the judge's prompts where that is better by the
    total of `rewards`."""
    critic, before = critic_of(rewards), request.policy.calls
    texts, why = list(request.texts), Counter[str]()
    media = request.pictures(range(len(texts)), texts)
    critic.to(media.device)
    first = request.scores(media, range(len(texts)), rewards)
    score = first.clone()
    going = below(range(len(texts)), score, how.enough)
    why["enough"] = len(texts) - len(going)
    for number in range(how.rounds):
        said = rewritten(critic, request, media, going)
        reason = {p: unusable(new, texts[p], how) for p, new in zip(going, said, strict=True)}
        new = {p: text.strip() for p, text in zip(going, said, strict=True) if not reason[p]}
        made = request.pictures(list(new), list(new.values())) if new else media[:0]
        scores = request.scores(made, list(new), rewards) if new else score[:0]
        better = []
        for p, item, value in zip(new, made, scores, strict=True):
            if value > score[p]:
                media[p], score[p], texts[p] = item, value, new[p]
                better.append(p)
            else:
                reason[p] = "worse"
        # a prompt that was improved once is not among those that kept their first picture
        if number == 0:
            why.update(reason[p] for p in going if p not in better)
        going = below(better, score, how.enough)
        if not going:
            break
    calls = request.policy.calls - before
    return Refined(media=media, texts=texts, score=score, first=first, calls=calls, why=why)


def rewritten(
    critic: Any, request: SampleRequest, media: Tensor, going: Sequence[int]
) -> list[str | None]:
    """Ask the critic for a better prompt of each of these pictures."""
    if not going:
        return []
    shown, texts = media[list(going)], [request.texts[p] for p in going]
    found = critic.refine(shown, texts, request.context(going, shown))
    texts_or_none = isinstance(found, list) and all(isinstance(new, str | None) for new in found)
    if not texts_or_none or len(found) != len(going):
        raise RewardBug(
            f"{type(critic).__name__}.refine returned {found!r:.80}; expected a list of a text or"
            f" None for each of {len(going)} samples"
        )
    return found


def unusable(new: str | None, old: str, how: Refine) -> str:
    """Why a new prompt is not used, a key of WHY; "": it is used."""
    if not new or new.strip() in ("", old):
        return "none"
    return "long" if len(new.strip()) > how.longest else ""


def below(prompts: Sequence[int], score: Tensor, enough: float | None) -> list[int]:
    """The prompts whose picture is not good enough yet."""
    return [p for p in prompts if enough is None or float(score[p]) < enough]
