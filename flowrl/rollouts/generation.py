"""Sampling by ODE, without a plan or a reward: for evaluation, `flowrl generate` and scripts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from flowrl.data.conditions import Conditions
from flowrl.policy import Cond, Policy
from flowrl.rollouts.roll_out import noise_of, velocity_of
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.log import Progress
from flowrl.samplers import plan, tree
from flowrl.types import Plan, Solver


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
    """Sample by ODE -> (x (n, *L), sigma (n,), (conditioning, its row for each sample)), which
    `media_of` decodes.

    noise_keys: (n,) int64, the initial noise of each prompt is a function of its key. conditions:
    one for each prompt, see Policy.encode; equal ones are the same objects. rlg: weight of
    Reinforcement Learning Guidance (flowrl/rollouts/velocity.py); 1 is the policy itself, 0 its
    reference.
    """
    ledger = ledger or Ledger(policy.device)
    # An evaluation asks for the same prompt many times: text encoders see it once.
    cond, rows = encoded(policy, prompts, conditions)
    path = path_of(policy, steps, solver)
    velocity = velocity_of(policy, cond, guidance=guidance, ledger=ledger, rlg=rlg)
    with Progress(plan.nfe(path) * len(rows), title="sample", lines=False) as bar:

        def counted(x: Tensor, *at: Tensor) -> Tensor:
            bar.update(bar.done + len(x))
            return velocity(x, *at)

        grown = tree.grow(
            counted,
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


def path_of(policy: Policy, steps: int, solver: Solver) -> Plan:
    """The plan of samples that are not trained: ODE, or for a masked generator the unmasking of its
    tokens in random order, at temperature 1. ValueError for a solver there."""
    if policy.unmasks and solver != "euler":
        raise ValueError(
            f"solver={solver} solves the ODE of flows, and a masked generator draws tokens; leave"
            " it out"
        )
    sigmas = policy.schedule(steps).sigmas
    return plan.unmask(sigmas) if policy.unmasks else plan.ode(sigmas, solver=solver)


def encoded(
    policy: Policy, prompts: Sequence[str], conditions: Sequence[Conditions] | None
) -> tuple[Cond, Tensor]:
    """Encode equal prompts under equal conditions once -> (cond, its row for each prompt)."""
    each = [{} for _ in prompts] if conditions is None else list(conditions)
    names = [
        (p, *sorted((k, v if isinstance(v, str) else id(v)) for k, v in given.items()))
        for p, given in zip(prompts, each, strict=True)
    ]
    place = {name: row for row, name in enumerate(dict.fromkeys(names))}
    first = [names.index(name) for name in place]
    distinct = None if conditions is None else [each[i] for i in first]
    cond = policy.encode([prompts[i] for i in first], distinct)
    return cond, torch.tensor([place[name] for name in names])
