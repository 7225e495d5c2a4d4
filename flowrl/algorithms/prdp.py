"""PRDP (arXiv:2402.08714): regress differences of log-likelihood ratios on differences of rewards,
within a proximity of the old policy.

r_hat of a sample is log pi_theta / pi_ref summed over its stored steps and latent dims. For each
pair of a group,
l = (r_hat_i - r_hat_j - (r_i - r_j) / beta)^2; l_clip is the same with every step's term clipped to
that of the old policy +- clip; the loss is the mean of max(l, l_clip) over pairs. Its optimum is
the KL-regularised one, so the reference is part of the method.

Departures from the paper (it has no public code):
* SDE steps of a flow in place of DDPM's. Log-probs stay sums, as in the paper: means over D dims
  would multiply beta by D.
* An update visits each sample once, and batch.updates split the prompts; the paper takes K gradient
  steps on the same samples.
* Rewards are the group's advantages (std=none: rewards minus their mean), so that std="group" makes
  beta independent of their scale.
"""

from __future__ import annotations

import torch
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from flowrl.algorithms.common import base, transitions
from flowrl.algorithms.common.transition_config import TransitionConfig, needs_whole_samples
from flowrl.types import Advantages, Columns, LossOutput, Rollout


class PRDPConfig(TransitionConfig):
    beta: PositiveFloat = Field(
        10.0, description="Strength of the KL regularisation: reward differences are divided by it."
    )
    clip: PositiveFloat = Field(
        1e-4,
        description=(
            "Proximity: a step's log-ratio (per latent dim) may leave the old policy's by this"
            " much."
        ),
    )

    @model_validator(mode="after")
    def check_plan(self) -> PRDPConfig:
        needs_whole_samples(self, "prdp")
        if self.timestep_fraction < 1:
            raise ValueError(
                f"algorithm.timestep_fraction={self.timestep_fraction} leaves out terms of the sum"
                " that prdp regresses; set it to 1, or train fewer steps with plan=window"
            )
        if self.sde == "cps":
            raise ValueError(
                "algorithm.sde=cps has no density, which prdp needs; use flow_sde, dance_sde or"
                " ddim"
            )
        return self


class PRDP(transitions.GroupMethod):
    Config = PRDPConfig
    config: PRDPConfig
    compares_reference = True

    def __init__(self, config: PRDPConfig):
        super().__init__(config)
        self.clip_size = config.clip

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        rows = super().columns(rollout, advantages, seed=seed, iteration=iteration)
        dims = torch.full_like(rows.weight, float(rollout.states[0].numel()))
        return Columns({**rows.data, "dims": dims})

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        c = self.config
        ratio = batch.dims * (
            scores["log_prob"] - scores["log_prob_ref"]
        )  # of a step, summed over latent dims
        old = batch.dims * (batch.log_prob - scores["log_prob_ref"])
        near = batch.dims * c.clip
        clipped = torch.minimum(torch.maximum(ratio, old - near), old + near)
        r_hat, _, place = base.sums(ratio, batch.sample)
        r_clip, _, _ = base.sums(clipped, batch.sample)
        first = transitions.first_rows(place)
        target = batch.adv[first] / c.beta
        term, held = pair_terms(r_hat - target, r_clip - target, batch.unit[first])
        metrics = {
            "policy/log_ratio": (ratio - old).abs() / batch.dims,
            "policy/approx_kl": ((ratio - old) / batch.dims).square() / 2,
            "policy/clip_fraction": (ratio != clipped).float(),
            "policy/held": held[place],
        }
        term = base.held(term[place], scores, metrics, c.kl_weight)
        return base.summed(term, metrics, batch)


def pair_terms(gap: Tensor, clipped: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """gap, clipped (m,): r_hat - r / beta of samples -> (m,) mean over the others of the group of
    max((d_i - d_j)^2, clipped ones);
    (m,) share of these pairs where the clipped one is larger. Averaged over a group, the first is
    the mean over its pairs.
    """
    peers = (group[:, None] == group[None]) & ~torch.eye(
        len(group), dtype=torch.bool, device=group.device
    )
    plain = (gap[:, None] - gap[None]).square()
    near = (clipped[:, None] - clipped[None]).square()
    count = peers.sum(1).clamp(min=1)
    larger = torch.where(
        near < plain, plain, near
    )  # not maximum: of equal ones the clipped one's gradient holds
    return (larger * peers).sum(1) / count, ((near > plain) & peers).sum(1) / count


ALGORITHM = PRDP
