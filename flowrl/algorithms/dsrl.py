"""Noise-space RL (DSRL, arXiv:2506.15799): the generator stays as it is, and a small network learns
which initial noise suits a prompt.

    z = mu(c) + s(c) eps,   w = z |eps| / |z|,   media = G(w, c)
    L = max(-A rho, -A clip(rho)) + kl_weight KL(N(mu, s^2) || N(0, 1)),   rho = pi(z | c) / pi_old

G is the sampler's ODE, or any function of prompts and noise: nothing of it needs a gradient. The
paper's actor-critic is for control; with one action a sample, the group is the baseline.

docs/algorithms/dsrl.md says how it differs from the paper and its code.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from flowrl.algorithms.common import base
from flowrl.samplers import keys
from flowrl.samplers import plan as plans
from flowrl.types import Advantages, Columns, LossOutput, Plan, Rollout, Solver, Transition


class DSRLConfig(base.Credit):
    offset: PositiveFloat = Field(
        1.5, description="Largest mean of the initial noise, in its standard deviations."
    )
    spread: float = Field(
        2.0,
        ge=1,
        description=(
            "Largest factor by which the noise's standard deviation may grow or shrink; 1: it is"
            " fixed."
        ),
    )
    cells: PositiveInt = Field(
        1,
        description=(
            "Number of cells along each axis but the channels'; mean and deviation are the same"
            " within a cell. 1: one mean and one deviation a channel."
        ),
    )
    solver: Solver = Field("euler", description="Solver of rollouts.")
    clip: tuple[PositiveFloat, PositiveFloat] = Field(
        (1e-3, 1e-3), description="The ratio is clipped to 1 - first .. 1 + second."
    )
    kl_weight: NonNegativeFloat = Field(
        1e-3, description="Weight of the KL to the standard normal, a mean over latent dims."
    )


class DSRL(base.Algorithm):
    Config = DSRLConfig
    config: DSRLConfig
    needs = frozenset({"start", "old"})
    trains_network = False

    @property
    def heads(self) -> dict[str, dict[str, Any]]:
        c = self.config
        return {"initial_noise": {"offset": c.offset, "spread": c.spread, "cells": c.cells}}

    def plan(self, sigmas: Tensor, *, sampler: base.Sampler, iteration: int, seed: int) -> Plan:
        return plans.ode(sigmas, solver=self.config.solver, init=sampler.init_noise)

    def most_rows(self, plan: Plan, group: int) -> int:
        return min(group, self.config.keep or group)

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        """One row for each sample with a signal; noise_key names the noise from which it began."""
        assert rollout.start_key is not None
        signal = advantages.leaf.nan_to_num() != 0
        sample = torch.nonzero(signal).flatten()
        return Columns(
            {
                "prompt": rollout.group[sample],
                "adv": advantages.leaf[sample].float(),
                "weight": torch.ones(len(sample), device=sample.device),
                "noise_key": rollout.start_key[sample],
            }
        )

    def drawn(
        self, policy: base.VelocityField, rollout: Rollout, batch: Columns
    ) -> tuple[Tensor, Transition]:
        """z (n, *L) as the rollout drew it, and the Gaussian that it was drawn from."""
        with torch.no_grad(), policy.view("old"):
            old = policy.initial(rollout.cond, batch.prompt)
        noise = keys.gaussian(batch.host("noise_key"), old.mean.shape[1:], old.mean.device)
        return old.sample(noise), old

    def score(
        self, policy: base.VelocityField, rollout: Rollout, batch: Columns
    ) -> dict[str, Tensor]:
        """log_ratio of z to the rollout's Gaussian, kl to the standard normal: means over latent
        dims, (n,)."""
        z, old = self.drawn(policy, rollout, batch)
        new = policy.initial(rollout.cond, batch.prompt)
        var = new.std.square()
        kl = 0.5 * (var + new.mean.square() - 1 - var.log())
        scores = {"log_ratio": new.log_prob(z) - old.log_prob(z), "kl": kl.flatten(1).mean(1)}
        scores["offset"] = new.mean.square().flatten(1).mean(1).sqrt().detach()
        return scores

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        low, high = self.config.clip
        ratio = scores["log_ratio"].exp()
        term, stopped = base.clipped_surrogate(ratio, ratio.clamp(1 - low, 1 + high), batch.adv)
        metrics = {
            "policy/clip_fraction": stopped,
            "policy/log_ratio": scores["log_ratio"].abs(),
            "policy/offset": scores["offset"],
        }
        term = base.plus_kl(term, scores, metrics, self.config.kl_weight)
        return base.summed(term, metrics, batch)

    def fit(self, policy: base.VelocityField, rollout: Rollout, batch: Columns) -> Tensor:
        return policy.initial(rollout.cond, batch.prompt).log_prob(
            self.drawn(policy, rollout, batch)[0]
        )

    def follow(self, step: int, iteration: int) -> dict[str, float]:
        return {"old": 0.0}


ALGORITHM = DSRL
