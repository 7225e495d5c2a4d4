"""Rollouts made of others: cut to some leaves, joined to one, or with leaves brought to sigma 0."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowrl.policy import Policy
from flowrl.types import Plan, Rollout


def take(rollout: Rollout, rows: Tensor) -> Rollout:
    """The rollout with the leaves `rows` (n,) only; its states and transitions stay as they are."""
    rows = rows.to(rollout.leaf.device)
    names = ["leaf", "leaf_edge", "leaf_key", "group", "tree"]
    names += ["start_key"] if rollout.start_key is not None else []
    stated = {name: value[rows] for name, value in rollout.stated.items()}
    return replace(rollout, stated=stated, **{name: getattr(rollout, name)[rows] for name in names})


def join(rollouts: list[Rollout], rows: list[Tensor]) -> Rollout:
    """Join rollouts of the same plan to one. rows[i] (P,): for each prompt of rollout i, the row of
    the conditioning that it has in the whole."""
    # Columns that number states, transitions or trees go on where the rollout before ended.
    states = transitions = trees = 0
    parts: dict[str, list[Tensor]] = {
        f.name: []
        for f in dataclasses.fields(Rollout)
        if f.name not in ("plan", "nfe", "cond", "guidance", "stated")
    }
    for r, at in zip(rollouts, rows, strict=True):
        place = at.to(r.prompt.device)
        moved = {
            "states": r.states.to(rollouts[0].states.device),
            "prompt": place[r.prompt],
            "group": place[r.group],
            "src": r.src + states,
            "dst": r.dst + states,
            "leaf": r.leaf + states,
            "parent": torch.where(r.parent < 0, -1, r.parent + transitions),
            "leaf_edge": torch.where(r.leaf_edge < 0, -1, r.leaf_edge + transitions),
            "tree": r.tree + trees,
        }
        for name, column in parts.items():
            column.append(moved.get(name, getattr(r, name)))
        states += len(r.states)
        transitions += len(r.src)
        trees += int(r.tree.max()) + 1
    whole = {
        name: None if any(value is None for value in column) else torch.cat(column)
        for name, column in parts.items()
    }
    return replace(rollouts[0], nfe=sum(r.nfe for r in rollouts), **whole)


def of_leaves(x0: Tensor, names: Tensor, group: Tensor, plan: Plan, cond: Any) -> Rollout:
    """A rollout of samples x0 (B, *L) at sigma 0 without any transition.

    names (B,) int64: their keys. group (B,) int64: their rows of cond. plan: gives noise levels.
    """
    # Without transitions all columns of transitions are empty, and each sample is its own tree.
    device, number = x0.device, torch.arange(len(x0), device=x0.device)
    index = torch.empty(0, dtype=torch.int64, device=device)
    real = torch.empty(0, dtype=torch.float64, device=device)
    return Rollout(
        states=x0,
        prompt=group,
        state_sigma=torch.zeros(len(x0), dtype=torch.float64, device=device),
        src=index,
        dst=index,
        parent=index,
        edge=index,
        sigma=real,
        sigma_next=real,
        eta=real,
        noise_key=index,
        log_prob=None,
        trained=index.bool(),
        leaf=number,
        leaf_edge=torch.full_like(group, -1),
        leaf_key=names,
        group=group,
        tree=number,
        plan=plan,
        nfe=0,
        cond=cond,
    )


def with_clean_leaves(policy: Policy, grown: Rollout) -> Rollout:
    """Replace leaves above sigma 0, where some schedules end, by the data that decode sees in them.

    They become states of their own: transitions keep the states that they end in.
    """
    end = grown.state_sigma[grown.leaf]
    return replace(
        grown,
        states=torch.cat([grown.states, policy.clean(grown.leaves, end)]),
        state_sigma=torch.cat([grown.state_sigma, torch.zeros_like(end)]),
        prompt=torch.cat([grown.prompt, grown.prompt[grown.leaf]]),
        leaf=torch.arange(len(grown.leaf), device=grown.leaf.device) + len(grown.states),
    )
