"""Reg-GRPO (DeepVideo-R1, arXiv:2506.07464): regress the advantage instead of clipping a ratio.

rho of a sample is log pi_theta / pi_old averaged over its stored steps (and latent dims). With its
group's mean and std, A_hat = (rho - mean) / (std + eps) predicts the advantage, and the loss is (A
- A_hat)^2 plus the KL to the reference. scale="fixed" (GVPO's form, arXiv:2504.19599) regresses
rho / ratio_eps instead. No clip.

docs/algorithms/reg_grpo.md says how it differs from the paper, which is about language models.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from flowrl.algorithms.common import base, transitions
from flowrl.algorithms.common.transition_config import TransitionConfig, needs_whole_samples
from flowrl.types import Columns, LossOutput


class RegGRPOConfig(TransitionConfig):
    scale: Literal["std", "fixed"] = Field(
        "std",
        description="Divisor of a log-ratio: its group's std + ratio_eps, or ratio_eps alone.",
    )
    ratio_eps: PositiveFloat = Field(
        1e-4, description="Size of a log-ratio (per latent dim) that counts as small."
    )

    @model_validator(mode="after")
    def check_plan(self) -> RegGRPOConfig:
        needs_whole_samples(self, "reg_grpo")
        return self


class RegGRPO(transitions.GroupMethod):
    Config = RegGRPOConfig
    config: RegGRPOConfig

    def __init__(self, config: RegGRPOConfig):
        super().__init__(config)
        self.clip_size = config.ratio_eps

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        c = self.config
        log_ratio = scores["log_prob"] - batch.log_prob
        total, steps, place = base.sums(log_ratio, batch.sample)
        first = transitions.first_rows(place)
        predicted = standardised(total / steps, batch.unit[first], c.ratio_eps, c.scale == "std")
        term = (batch.adv[first] - predicted).square()[place]
        metrics = {
            "policy/log_ratio": log_ratio.abs(),
            "policy/approx_kl": log_ratio.square() / 2,
            "policy/regression_error": term,
        }
        term = base.plus_kl(term, scores, metrics, c.kl_weight)
        return base.summed(term, metrics, batch)


def standardised(rho: Tensor, group: Tensor, eps: float, std: bool) -> Tensor:
    """(rho - mean) / (std + eps) within groups: (m,) -> (m,). std False: divided by eps.

    Differentiable, also where all rho are equal: there eps keeps it finite.
    """
    centred = rho - base.mean_of_unit(rho, group)
    if not std:
        return centred / eps
    var = base.mean_of_unit(centred.square(), group)
    spread = torch.where(var > 0, var.clamp(min=1e-30).sqrt(), 0.0)  # sqrt has no derivative at 0
    return centred / (spread + eps)


ALGORITHM = RegGRPO
