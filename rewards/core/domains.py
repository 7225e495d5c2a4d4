"""Rewards by domain: which samples a reward is asked for.

A prompt's facts name its domain. A reward that states domains is asked for their samples alone. For
others it is absent: its score is NaN, no mean, deviation or total reads it, and the sample stays
valid. Where no reward states domains, nothing reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.rewards.core.reward_set import RewardSet
from flowrl.runtime.registry import did_you_mean
from flowrl.runtime.text import printable

TAKEN = ("total", "macro")  # names of eval/NAME that no domain may have


def domains_of(chosen: RewardSet, meta: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """The domain of each of B samples, from their facts; None: no reward states domains."""
    return [domain_of(chosen, facts) for facts in meta] if chosen.domains else None


def domain_of(chosen: RewardSet, facts: Mapping[str, Any], whose: str = "a sample") -> str:
    """The domain that facts name; ValueError where they name none. whose: as the error says it."""
    name = facts.get(chosen.domain_field)
    if isinstance(name, bool) or not isinstance(name, str | int) or not str(name).strip():
        label, field = next(iter(chosen.domains)), chosen.domain_field
        found = "is not there" if name is None else f"is {printable(repr(name), 60)}"
        raise ValueError(
            f'reward "{label}" states domains, and "{field}" of {whose} {found}; give every prompt'
            f' its domain as a text, as in {{"prompt": ..., "{field}": "photo"}}, or name another'
            " column by data.domain"
        )
    return str(name)


def asked_for(chosen: RewardSet, label: str, domain: str) -> bool:
    """Whether a reward is asked for samples of a domain."""
    return label not in chosen.domains or domain in chosen.domains[label]


def is_asked(chosen: RewardSet, label: str, facts: Mapping[str, Any]) -> bool:
    """Whether a reward is asked for samples with these facts."""
    return label not in chosen.domains or domain_of(chosen, facts) in chosen.domains[label]


def covers(chosen: RewardSet, domains: Sequence[str] | None) -> dict[str, Tensor]:
    """Label of each reward that states domains -> whether it is asked for a sample, (B,) bool on
    the CPU. domains: (B,) of the samples."""
    labels = [] if domains is None else [k for k in chosen.rewards if k in chosen.domains]
    return {k: torch.tensor([asked_for(chosen, k, name) for name in domains or ()]) for k in labels}


def check_domains(
    chosen: RewardSet,
    sources: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    whole: bool = False,
    scored: bool = True,
) -> None:
    """Check that prompts and rewards name the same domains; ValueError that says which does not.

    whole: the sources are all prompts of a run, so that each domain of a reward has one. scored:
    a prompt needs a reward.
    """
    if not chosen.domains:
        return
    known: dict[str, str] = {}  # domain -> where its first prompt is
    for source, prompts in sources.items():
        for prompt in prompts:
            where = f'the prompt "{printable(prompt["prompt"], 60)}" in {source}'
            known.setdefault(domain_of(chosen, prompt, where), where)
    for name, where in known.items():
        if scored and not any(asked_for(chosen, label, name) for label in chosen.rewards):
            stated = dict.fromkeys(d for own in chosen.domains.values() for d in own)
            raise ValueError(
                f'no reward is asked for domain "{name}", which {where} has'
                f"{did_you_mean(name, stated)}; add it to the domains of a reward"
            )
        if name in chosen.rewards or name in TAKEN or "/" in name:
            raise ValueError(
                f'{where} has domain "{name}", and metrics are called eval/DOMAIN/REWARD beside'
                f" eval/REWARD/PART, so that a domain is neither a reward nor {' nor '.join(TAKEN)}"
                " and has no /; give it another name"
            )
    for label, own in chosen.domains.items():
        if whole and (unknown := [name for name in own if name not in known]):
            raise ValueError(
                f'reward.{label}.domains names "{unknown[0]}", which no prompt has'
                f"{did_you_mean(unknown[0], known)}"
            )
