"""flowrl.generate: one image or video a prompt, as it comes, searched for, or refined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from flowrl.data.conditions import Conditions, loaded, of
from flowrl.data.given import records
from flowrl.policy import Policy
from flowrl.policy.load import as_policy
from flowrl.policy.pipeline import PipelinePolicy
from flowrl.rewards import load_set
from flowrl.rollouts.asked import other_frames
from flowrl.rollouts.inference.candidates import SampleRequest
from flowrl.rollouts.inference.refine import Refine, refined
from flowrl.rollouts.search import Search, searched
from flowrl.runtime.log import logger
from flowrl.types import Solver


@torch.no_grad()
def generate(
    policy: Any,
    prompts: str | Sequence[str | Mapping[str, Any]],
    *,
    steps: int = 28,
    guidance: float | str = "pipeline",
    seed: int | Sequence[int] = 0,
    places: Sequence[int] | None = None,
    rlg: float = 1.0,
    best_of: int = 1,
    search: Search | None = None,
    refine: Refine | None = None,
    reward: Any = None,
    meta: Sequence[dict[str, Any]] | None = None,
    conditions: Sequence[Conditions] | None = None,
    solver: Solver = "euler",
    micro: int = 64,
    decode: int = 16,
) -> Tensor:
    """Make one image or video for each prompt -> (P, 3, H, W) or (P, F, 3, H, W) fp32 in [0, 1]; of
    a module, whatever its decode makes, (P, *D).

    policy: a Policy, or what load_policy takes: a live pipeline, a folder, a name. prompts: texts,
    or records {"prompt": text, **meta}, which bring meta and conditions of their own. guidance:
    "pipeline" as the pipeline does it, "none", or a scale. seed: of all prompts, or one for each;
    prompt p, candidate c has the noise of (seed, p, c). places: those p, where the prompts are some
    of a longer list. rlg: weight of Reinforcement Learning Guidance
    (flowrl/rollouts/velocity.py). conditions: of each prompt, its own arguments of the pipeline's
    call (a picture to edit, a mask). One of three ways to make a sample better by a reward (a name,
    a function or a dict as in `flowrl.score`). best_of: candidates a prompt, of which the best is
    kept; search: within network calls (flowrl/rollouts/search.py); refine: with prompts that a
    judge rewrites (refine.py).
    """
    policy = as_policy(policy)
    texts, rows = _texts(prompts)
    for name, count in {"steps": steps, "micro": micro, "decode": decode}.items():
        if not isinstance(count, Integral) or count < 1:
            raise ValueError(f"{name}={count} should be a whole number from 1")
    policy.say_cut(texts)
    # everything that a user gave is checked before the first network call
    request = SampleRequest(
        policy=policy,
        texts=texts,
        conditions=_own_conditions(policy, texts, rows, conditions),
        meta=meta or rows or None,
        seeds=_each(texts, "seed", seed if isinstance(seed, Sequence) else [seed] * len(texts)),
        places=_each(texts, "places", range(len(texts)) if places is None else places),
        steps=steps,
        guidance=guidance,
        rlg=rlg,
        solver=solver,
        micro=micro,
        decode=decode,
    )
    brought = {key for row in request.conditions or () for key in row}
    for sentence in policy.unread([guidance], brought):
        logger.warning(sentence)
    media = _made(request, _way(request, best_of, search, refine, reward), reward)
    _say_size(policy, media)
    return media


def _each(texts: list[str], name: str, given: Sequence[int]) -> Tensor:
    """Make a tensor (P,) of a number for each prompt; ValueError where there are not so many."""
    if len(given) != len(texts):
        raise ValueError(f"{name} has {len(given)} entries; give one for each prompt")
    return torch.tensor([int(number) for number in given])


def _way(
    request: SampleRequest, best_of: int, search: Search | None, refine: Refine | None, reward: Any
) -> Search | Refine | None:
    """Choose how samples are made better; None: they are not. ValueError: see `check_way`."""
    check_way(best_of, search, refine, reward)
    return Search(how="random", calls=best_of * request.cost) if best_of > 1 else search or refine


def check_way(best_of: int, search: Any, refine: Any, reward: Any) -> None:
    """ValueError for two ways to make samples better, or for one without a reward."""
    if best_of < 1 or (best_of > 1 and reward is None):
        raise ValueError(
            f"best_of={best_of} needs best_of >= 1 and, above 1, a reward to choose by, such as"
            " reward='clip'"
        )
    given = {"best_of": best_of if best_of > 1 else None, "search": search, "refine": refine}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} cannot be combined; give one of them")
    if named and reward is None:
        raise ValueError(
            f"{named[0]} needs a reward that says which sample is better, such as"
            f" reward='{'clip' if search else 'rationalrewards'}'"
        )


def _made(request: SampleRequest, way: Search | Refine | None, reward: Any) -> Tensor:
    """Make the media (P, *D), and log a sentence about the search."""
    if way is None:
        return request.pictures(range(len(request.texts)), request.texts)
    if isinstance(way, Refine):
        better = refined(request, load_set(reward), way)
        logger.info(better.said())
        return better.media
    found = searched(request, load_set(reward), way)
    logger.info(found.said())
    return found.media


def _texts(
    prompts: str | Sequence[str | Mapping[str, Any]],
) -> tuple[list[str], list[dict[str, Any]]]:
    """Split prompts into texts, and their records where prompts are given as records."""
    given: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    rows = records(given) if any(isinstance(prompt, Mapping) for prompt in given) else []
    texts: list[str] = [row["prompt"] for row in rows] or given
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("prompts is empty or not text; give one text or a list of texts")
    return texts, rows


def _own_conditions(
    policy: Policy,
    texts: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    given: Any,
) -> list[Conditions] | None:
    """Load the conditions of each prompt: those of records, or those given beside texts."""
    if isinstance(policy, PipelinePolicy):
        policy.check_columns(
            sorted({key for row in rows for key in row} - {"prompt", "conditions"})
        )
    own = of(rows)
    if given is None:
        return own
    if own is not None:
        raise ValueError("the prompts bring conditions, and conditions= gives others; give one")
    each = isinstance(given, Sequence) and all(isinstance(entry, Mapping) for entry in given)
    if not each or len(given) != len(texts):
        what = f"{len(given)} entries" if each else f"a {type(given).__name__}"
        raise ValueError(
            f"conditions is {what}; give one mapping of arguments for each of the {len(texts)}"
            ' prompts, such as {"image": picture}'
        )
    return [loaded(entry) for entry in given]


def _say_size(policy: Policy, media: Tensor) -> None:
    """Warn where media are not of the size, or of the number of frames, that was asked for."""
    if isinstance(policy, PipelinePolicy):
        unlike = policy.prober.runner.unlike_asked(media.shape[-2:])
        for sentence in filter(None, (unlike, other_frames(policy, media))):
            logger.warning(sentence)
