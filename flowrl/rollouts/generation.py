"""Images and videos from a policy: the sampler that evaluation, `flowrl generate` and scripts
share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.data.conditions import Conditions, context_of
from flowrl.policy import Cond, Policy
from flowrl.rewards import load_set, score
from flowrl.rollouts.roll_out import noise_of, velocity_of
from flowrl.rollouts.scorer import media_of
from flowrl.runtime.ledger import Ledger
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
        init=partial(policy.init, sigma=path.sigma.max().item(), cond=cond),
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


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: str | Sequence[str],
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
    """One image or video a prompt -> (P, 3, H, W) or (P, F, 3, H, W) fp32 in [0, 1].

    guidance: "pipeline" as the pipeline does it, "none", or a scale. seed: prompt p, candidate c
    has the noise of (seed, p, c). conditions: of each prompt, its own arguments of the pipeline's
    call (a picture to edit, a mask).
    best_of: candidates a prompt, of which the one with the highest reward (a name or a dict as in
    `flowrl.score`) is kept.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts or not all(isinstance(p, str) for p in prompts):
        raise ValueError("prompts is empty or not text; give one text or a list of texts")
    if best_of < 1 or (best_of > 1 and reward is None):
        raise ValueError(
            f"best_of={best_of} needs best_of >= 1 and, above 1, a reward to choose by, such as"
            " reward='clip'"
        )
    number = torch.arange(len(prompts) * best_of)
    texts = [prompts[i // best_of] for i in number.tolist()]
    noise = keys.key(seed, "generate", number // best_of, number % best_of)
    each = None if conditions is None else [conditions[i // best_of] for i in number.tolist()]
    x, sigma, whose = sample(
        policy,
        texts,
        noise,
        steps=steps,
        guidance=guidance,
        conditions=each,
        solver=solver,
        rlg=rlg,
        micro=micro,
    )
    ledger = Ledger(policy.device)
    chunks = media_of(policy, x, sigma, whose, decode=decode, ledger=ledger)
    media = torch.cat([m for _, m in chunks])
    if best_of == 1:
        return media
    each_meta = [meta[i // best_of] for i in number.tolist()] if meta else None
    return media[_best(media, texts, reward, each_meta, best_of)]


def _best(
    media: Tensor,
    texts: list[str],
    reward: Any,
    meta: list[dict[str, Any]] | None,
    best_of: int,
) -> Tensor:
    """Places (P,) of the candidates with the highest reward, of best_of a prompt."""
    context = context_of(meta, media) if meta else None
    rewards = load_set({reward: 1.0} if isinstance(reward, str) else reward)
    total = score(media, texts, rewards, context).total.nan_to_num(-torch.inf)
    best = total.reshape(-1, best_of).argmax(1)
    return best + torch.arange(len(best), device=total.device) * best_of
