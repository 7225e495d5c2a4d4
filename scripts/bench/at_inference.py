"""Readings of docs/results.md for which nothing is trained: searches and rewritten prompts by the
calls that a training costs, and weights of RLG of a run that has ended."""

from __future__ import annotations

from typing import Any, cast

import cells
import torch
from cells import Cell
from torch import Tensor

from flowrl import generate, load_policy, score
from flowrl.data.prompts import load_prompts
from flowrl.policy import Policy
from flowrl.rewards import RewardSet, load_set, parse_words
from flowrl.rewards.core.reward import Reward
from flowrl.rollouts.inference.refine import Refine
from flowrl.rollouts.search import Search
from flowrl.training.loop import Trainer
from flowrl.types import MediaContext

STEPS = 8
SEED = 0  # of the pictures by RLG
TURNED = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
Prompt = dict[str, Any]


class Rephrase(Reward):
    """A judge that says the same in the other order; it scores nothing, a verifier beside it does.

    "a red circle left of a blue square" -> "a blue square right of a red circle".
    """

    def __call__(self, media: Tensor, prompts: list[str], context: Any = None) -> Tensor:
        return torch.zeros(len(media))

    def refine(self, media: Tensor, prompts: list[str], context: Any = None) -> list[str | None]:
        return [turned(text) for text in prompts]


def turned(text: str) -> str | None:
    """The prompt in the other order; None where it names one thing."""
    for word, other in {**TURNED, "and": "and"}.items():
        first, found, second = text.partition(f" {word} ")
        if found:
            return f"{second} {other} {first}"
    return None


def searched(c: Cell) -> Cell:
    """Run a cell of cells.SEARCHES: each held-out prompt's best sample by the chooser.

    -> calls a picture, and the verdicts of the strict verifier on the first sample of each prompt
    and on the best.
    """
    policy, prompts = load_policy("shapes-sd3"), prompts_of(cells.IMAGES)
    verifier, judges = verifier_of(), dict(parse_words([c["chooser"]]))
    way: dict[str, Any] = {"search": Search(how="random", calls=STEPS * c["samples"])}
    if c["refined"]:
        way, judges["rephrase"] = {"refine": Refine()}, Rephrase()
    chooser = load_set(judges)
    how: dict[str, Any] = {"steps": STEPS, "guidance": "none", "solver": "dpm2", "seed": c["seed"]}
    first = generate(policy, prompts, **how)
    before = policy.calls
    best = generate(policy, prompts, **how, **way, reward=chooser)
    return c | {
        "calls": (policy.calls - before) / len(prompts),
        "images_before": verdicts(first, prompts, verifier),
        "images": verdicts(best, prompts, verifier),
    }


def by_weight(trainer: Trainer) -> list[dict[str, float]]:
    """Read strict accuracy and distance from the base model with the averaged weights, at each
    weight of cells.RLG.

    distance: root mean square difference of pixels in [0, 1] to the base's pictures of the same
    noise, the mean over pictures.
    """
    parts = trainer.parts
    policy, prompts, verifier = parts.source.policy, prompts_of(cells.IMAGES), verifier_of()
    with parts.weights.ema.swapped(), policy.view("default"):
        base = pictures(policy, prompts, 0.0)
        return [read(policy, prompts, weight, base, verifier) for weight in cells.RLG]


def read(
    policy: Policy, prompts: list[Prompt], weight: float, base: Tensor, verifier: RewardSet
) -> dict[str, float]:
    media = pictures(policy, prompts, weight)
    marks = verdicts(media, prompts, verifier)
    away = (media - base).square().flatten(1).mean(1).sqrt().mean()
    return {"rlg": weight, "strict": marks.count("1") / len(marks), "distance": float(away)}


def pictures(policy: Policy, prompts: list[Prompt], weight: float) -> Tensor:
    how: dict[str, Any] = {"steps": STEPS, "guidance": "none", "solver": "dpm2", "seed": SEED}
    return generate(policy, prompts, **how, rlg=weight)


def verdicts(media: Tensor, prompts: list[Prompt], verifier: RewardSet) -> str:
    """Right (1), wrong (0) or missing (.) of each picture."""
    texts = [prompt["prompt"] for prompt in prompts]
    values = score(media, texts, verifier, MediaContext(meta=prompts)).total
    return "".join("." if v != v else str(int(v)) for v in values.tolist())


def verifier_of() -> RewardSet:
    return load_set(parse_words(["shapes.reading=strict"]))


def prompts_of(count: int) -> list[Prompt]:
    """The first held-out prompts, over and over, as an evaluation reads them."""
    known = load_prompts("shapes:eval")
    return [dict(cast(Prompt, known[i % len(known)])) for i in range(count)]
