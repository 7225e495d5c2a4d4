"""Images and videos from a policy: the sampler that evaluation, `flowrl generate` and scripts
share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.data.conditions import Conditions, context_of, loaded, of
from flowrl.data.given import records
from flowrl.policy import Cond, Policy
from flowrl.policy.load import as_policy
from flowrl.policy.pipeline import PipelinePolicy
from flowrl.rewards import load_set, score
from flowrl.rollouts.roll_out import noise_of, velocity_of
from flowrl.rollouts.scorer import media_of
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.log import logger
from flowrl.samplers import keys, plan, tree
from flowrl.types import Solver


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[str],
    noise_keys: Tensor,
    *,
    steps: int,
    guidance: float | str,
    conditions: Sequence[Conditions] | None = None,
    solver: Solver = "euler",
    rlg: float = 1.0,
    micro: int = 64,
    ledger: Ledger | None = None,
) -> tuple[Tensor, Tensor, tuple[Cond, Tensor]]:
    """Deterministic ODE samples -> (x (n, *L), sigma (n,), whose they are) for `media_of`.

    noise_keys: (n,) int64, the initial noise of each prompt is a function of its key. conditions:
    of each prompt, see Policy.encode; equal ones are the same objects. rlg: weight w
    of Reinforcement Learning Guidance (arXiv:2508.21016), v = v_ref + w (v - v_ref); 1 is the
    policy itself, 0 the reference, and any other value costs twice the calls.
    """
    ledger = ledger or Ledger(policy.device)
    cond, rows = _encoded(policy, prompts, conditions)
    tuned = velocity_of(policy, cond, guidance=guidance, ledger=ledger)

    def guided(x: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        with policy.view("reference"):
            reference = tuned(x, sigma, rows)
        return reference + rlg * (tuned(x, sigma, rows) - reference)

    path = plan.ode(policy.schedule(steps).sigmas, solver=solver)
    grown = tree.grow(
        tuned if rlg == 1 else guided,
        noise_of(policy),
        path,
        shape=policy.latent_shape,
        rows=rows,
        prompt_keys=noise_keys,
        copies=torch.zeros_like(rows),
        init=partial(policy.start, sigma=path.sigma.max().item(), cond=cond),
        micro=policy.states(micro, guidance),
    )
    return grown.leaves, grown.state_sigma[grown.leaf], (cond, rows[grown.group.cpu()])


def _encoded(
    policy: Policy, prompts: Sequence[str], conditions: Sequence[Conditions] | None
) -> tuple[Cond, Tensor]:
    """Equal prompts under equal conditions encoded once -> (cond, its row for each prompt)."""
    each = [{} for _ in prompts] if conditions is None else list(conditions)
    names = [
        (p, *sorted((k, v if isinstance(v, str) else id(v)) for k, v in own.items()))
        for p, own in zip(prompts, each, strict=True)
    ]
    place = {name: row for row, name in enumerate(dict.fromkeys(names))}
    first = [names.index(name) for name in place]
    own = None if conditions is None else [each[i] for i in first]
    cond = policy.encode([prompts[i] for i in first], own)
    return cond, torch.tensor([place[name] for name in names])


def _own_conditions(
    policy: Policy,
    texts: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    given: Any,
) -> list[Conditions] | None:
    """Conditions of each prompt, loaded: those of records, or those given beside texts."""
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
    """Warn where media are not of the size that was asked for."""
    if isinstance(policy, PipelinePolicy):
        unlike = policy.prober.runner.unlike_asked(media.shape[-2:])
        if unlike:
            logger.warning(unlike)


@torch.no_grad()
def generate(
    policy: Any,
    prompts: str | Sequence[str | Mapping[str, Any]],
    *,
    steps: int = 28,
    guidance: float | str = "pipeline",
    seed: int = 0,
    rlg: float = 1.0,
    best_of: int = 1,
    reward: Any = None,
    meta: Sequence[dict[str, Any]] | None = None,
    conditions: Sequence[Conditions] | None = None,
    solver: Solver = "euler",
    micro: int = 64,
    decode: int = 16,
) -> Tensor:
    """One image or video a prompt -> (P, 3, H, W) or (P, F, 3, H, W) fp32 in [0, 1]; of a module,
    whatever its decode makes, (P, *D).

    policy: a Policy, or what load_policy takes: a live pipeline, a folder, a name. prompts: texts,
    or records {"prompt": text, **meta}, which bring meta and conditions of their own.
    guidance: "pipeline" as the pipeline does it, "none", or a scale. seed: prompt p, candidate c
    has the noise of (seed, p, c). conditions: of each prompt, its own arguments of the pipeline's
    call (a picture to edit, a mask).
    best_of: candidates a prompt, of which the one with the highest reward (a name, a function or a
    dict as in `flowrl.score`) is kept.
    """
    policy = as_policy(policy)
    texts, rows = _texts(prompts)
    if steps < 1 or micro < 1 or decode < 1:
        raise ValueError(f"steps={steps}, micro={micro} and decode={decode} should be at least 1")
    conditions = _own_conditions(policy, texts, rows, conditions)
    meta = meta or rows or None
    if best_of < 1 or (best_of > 1 and reward is None):
        raise ValueError(
            f"best_of={best_of} needs best_of >= 1 and, above 1, a reward to choose by, such as"
            " reward='clip'"
        )
    number = torch.arange(len(texts) * best_of)
    each_text = [texts[i // best_of] for i in number.tolist()]
    noise = keys.key(seed, "generate", number // best_of, number % best_of)
    each = None if conditions is None else [conditions[i // best_of] for i in number.tolist()]
    x, sigma, whose = sample(
        policy,
        each_text,
        noise,
        steps=steps,
        guidance=guidance,
        conditions=each,
        solver=solver,
        rlg=rlg,
        micro=micro,
    )
    chunks = media_of(policy, x, sigma, whose, decode=decode, ledger=Ledger(policy.device))
    media = torch.cat([m for _, m in chunks])
    _say_size(policy, media)
    if best_of == 1:
        return media
    each_meta = [meta[i // best_of] for i in number.tolist()] if meta else None
    return media[_best(media, each_text, reward, each_meta, best_of)]


def _texts(
    prompts: str | Sequence[str | Mapping[str, Any]],
) -> tuple[list[str], list[dict[str, Any]]]:
    """The texts, and their records where prompts are given as records."""
    given: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    rows = records(given) if any(isinstance(prompt, Mapping) for prompt in given) else []
    texts: list[str] = [row["prompt"] for row in rows] or given
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("prompts is empty or not text; give one text or a list of texts")
    return texts, rows


def _best(
    media: Tensor,
    texts: list[str],
    reward: Any,
    meta: list[dict[str, Any]] | None,
    best_of: int,
) -> Tensor:
    """Places (P,) of the candidates with the highest reward, of best_of a prompt."""
    context = context_of(meta, media) if meta else None
    rewards = load_set(reward)
    total = score(media, texts, rewards, context).total.nan_to_num(-torch.inf)
    best = total.reshape(-1, best_of).argmax(1)
    return best + torch.arange(len(best), device=total.device) * best_of
