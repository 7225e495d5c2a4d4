"""Images and videos from a policy: the sampler that evaluation, `flowrl generate` and scripts
share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.policy import Policy
from flowrl.rewards import load_set, score
from flowrl.rollouts.roll_out import noise_of, rows_of, velocity_of
from flowrl.rollouts.scorer import media_of
from flowrl.runtime.ledger import Ledger
from flowrl.samplers import keys, plan, tree
from flowrl.types import MediaContext, Solver


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[str],
    noise_keys: Tensor,
    *,
    steps: int,
    guidance: float | str,
    solver: Solver = "euler",
    rlg: float = 1.0,
    micro: int = 64,
    ledger: Ledger | None = None,
) -> tuple[Tensor, Tensor]:
    """Deterministic ODE samples -> (x (n, *L), sigma (n,)) for `policy.decode`.

    noise_keys: (n,) int64, the initial noise of each prompt is a function of its key. rlg: weight w
    of Reinforcement Learning Guidance (arXiv:2508.21016), v = v_ref + w (v - v_ref); 1 is the
    policy itself, 0 the reference, and any other value costs twice the calls.
    """
    ledger = ledger or Ledger(policy.device)
    unique = list(dict.fromkeys(prompts))
    cond, rows = policy.encode(unique), torch.tensor([unique.index(p) for p in prompts])
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
        init=partial(policy.init, sigma=path.sigma.max().item()),
        micro=rows_of(micro, policy, guidance),
    )
    return grown.leaves, grown.state_sigma[grown.leaf]


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
    solver: Solver = "euler",
    micro: int = 64,
    decode: int = 16,
) -> Tensor:
    """One image or video a prompt -> (P, 3, H, W) or (P, F, 3, H, W) fp32 in [0, 1].

    guidance: "pipeline" as the pipeline does it, "none", or a scale. seed: prompt p, candidate c
    has the noise of (seed, p, c).
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
    x, sigma = sample(
        policy, texts, noise, steps=steps, guidance=guidance, solver=solver, rlg=rlg, micro=micro
    )
    ledger = Ledger(policy.device)
    media = torch.cat([m for _, m in media_of(policy, x, sigma, decode=decode, ledger=ledger)])
    if best_of == 1:
        return media
    context = (
        MediaContext(meta=[dict(meta[i // best_of]) for i in number.tolist()]) if meta else None
    )
    total = score(
        media, texts, load_set({reward: 1.0} if isinstance(reward, str) else reward), context
    ).total
    best = (
        total.nan_to_num(-torch.inf).reshape(-1, best_of).argmax(1)
        + torch.arange(len(prompts), device=total.device) * best_of
    )
    return media[best]
