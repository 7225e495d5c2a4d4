"""PRDP (arXiv:2402.08714): regress differences of log-likelihood ratios on differences of rewards.

r_hat of a sample is log pi_theta / pi_ref summed over its stored steps and latent dims. For each
pair of a group, l = (r_hat_i - r_hat_j - (r_i - r_j) / beta)^2; l_clip is the same with every
step's term clipped to that of the old policy +- clip; the loss is the mean of max(l, l_clip) over
pairs. Its optimum is the KL-regularised one, so the reference is part of the method.

docs/algorithms/prdp.md says how it differs from the paper.
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
        # log-ratios of a step, summed over latent dims
        ratio = batch.dims * (scores["log_prob"] - scores["log_prob_ref"])
        old = batch.dims * (batch.log_prob - scores["log_prob_ref"])
        near = batch.dims * c.clip
        clipped = torch.minimum(torch.maximum(ratio, old - near), old + near)
        # log-ratios of a sample, summed over its steps
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
        term = base.plus_kl(term[place], scores, metrics, c.kl_weight)
        return base.summed(term, metrics, batch)


def pair_terms(gap: Tensor, clipped: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each sample's pairs, and the share of them in which the clipped term is larger.

    gap, clipped (m,): r_hat - r / beta of samples, of the policy and within the proximity -> (m,)
    mean over the others of the group of max((gap_i - gap_j)^2, clipped ones), and (m,) the share.
    Averaged over a group, the first is the mean over its pairs.
    """
    itself = torch.eye(len(group), dtype=torch.bool, device=group.device)
    peers = (group[:, None] == group[None]) & ~itself
    plain = (gap[:, None] - gap[None]).square()
    near = (clipped[:, None] - clipped[None]).square()
    count = peers.sum(1).clamp(min=1)
    # torch.where, not torch.maximum: where both are equal, the clipped term gives the gradient
    larger = torch.where(near < plain, plain, near)
    return (larger * peers).sum(1) / count, ((near > plain) & peers).sum(1) / count


ALGORITHM = PRDP
