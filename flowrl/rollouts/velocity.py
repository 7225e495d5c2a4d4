"""A velocity that is extrapolated from the reference.

Reinforcement Learning Guidance (RLG, arXiv:2508.21016): v = v_ref + w (v - v_ref), both under the
same guidance. w = 0 is the reference and 1 the policy, exactly; above 1 goes further than training
did. Where pi ~ pi_ref exp(R / beta), the weight w samples about pi_ref^(1-w) pi^w ~ pi_ref exp(w R
/ beta): the coefficient of the KL term becomes beta / w. "About": the score at sigma is an affine
function of v, so that scores are combined as the velocities are, but the noised product of two
densities is not the product of the noised ones. It is exact for Gaussians of one covariance, and
otherwise as sigma goes to 0.
"""

from __future__ import annotations

import math

from torch import Tensor

from flowrl.policy import Policy
from flowrl.samplers.tree import Velocity


def guided(policy: Policy, velocity: Velocity, w: float) -> Velocity:
    """velocity(x, sigma, rows) of a weight w other than 1, made of that of the present view."""
    check_weight(policy, w)

    def of_reference(x: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        with policy.view("reference"):
            return velocity(x, sigma, rows)

    def between(x: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        v, reference = velocity(x, sigma, rows), of_reference(x, sigma, rows)
        return reference + w * (v - reference)

    return of_reference if w == 0 else between


def check_weight(policy: Policy, w: float) -> None:
    """Raise ValueError where w is not a weight, or the policy has no reference for it."""
    if not 0 <= w < math.inf:
        raise ValueError(
            f"rlg={w} should be 0 (the reference), 1 (the policy) or another number from 0 up;"
            " 1.5 to 3 is usual"
        )
    if policy.trainable.lora is None and not policy.trainable.has("reference"):
        raise ValueError(
            f"rlg={w} compares the policy with its reference, and this one trains all weights and"
            " keeps no copy of the old ones; load it with lora={...}, or call"
            " policy.trainable.add_view('reference') before it is trained"
        )


def passes(w: float) -> int:
    """Network calls that the weight w takes in place of one."""
    return 1 if w in (0, 1) else 2
