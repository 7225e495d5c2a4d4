"""The policy as a sampling engine sees it: velocity, initial state, noise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flowrl.policy import Cond, Policy
from flowrl.runtime.ledger import Ledger
from flowrl.samplers import keys
from flowrl.types import MediaContext, Plan

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]


def velocity_of(policy: Policy, cond: Cond, *, guidance: float | str, ledger: Ledger) -> Velocity:
    """velocity(x, sigma, rows) of the policy for an engine that samples; its time, FLOPs and
    network rows are booked."""

    @torch.no_grad()
    def velocity(x: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        before = policy.calls
        with ledger.work("network", rows=len(x)):
            v = policy.velocity(x, sigma, cond, rows, guidance=guidance)
        ledger.add_nfe("rollout", policy.calls - before)
        return v

    return velocity


def rows_of(micro: int, policy: Policy, guidance: float | str) -> int:
    """States that fit into a forward of at most `micro` network rows."""
    return max(1, micro // policy.branches(guidance))


def init_of(policy: Policy, plan: Plan) -> Callable[[Tensor], Tensor]:
    """Standard normal noise -> states at the plan's first sigma."""
    return functools.partial(policy.init, sigma=plan.sigma.max().item())


def noise_of(policy: Policy) -> Callable[[Tensor], Tensor]:
    """Standard normal latents by key."""
    return lambda k: keys.gaussian(k, policy.latent_shape, policy.device)


@torch.no_grad()
def media_of(
    policy: Policy, x: Tensor, sigma: Tensor, *, decode: int, ledger: Ledger
) -> Iterator[tuple[slice, Tensor]]:
    """Decode (B, *L) final states at sigma (B,), the same for all, in chunks of `decode` -> (rows,
    media)."""
    assert bool((sigma == sigma[0]).all())
    for i in range(0, len(x), decode):
        rows = slice(i, min(i + decode, len(x)))
        with ledger.phase("decode"), ledger.work("vae"):
            media = policy.decode(x[rows], float(sigma[0]))
        yield rows, media


def meta_rows(prompts: list[dict[str, Any]], ids: list[int]) -> tuple[list[str], MediaContext]:
    """Text and context of prompts[i] for i in ids."""
    chosen = [prompts[i] for i in ids]
    meta = [{k: v for k, v in p.items() if k != "prompt"} for p in chosen]
    return [p["prompt"] for p in chosen], MediaContext(meta=meta, group=torch.tensor(ids))
