"""Direct reward gradients: the reward of a sample is differentiated through decoder and sampler.

    begin   a step of the sampler; what comes before it has no gradient
    x0      the sample, by the steps that are left, or by one estimate x - sigma v from there
    L       mean of -R(decode(x0)), or of its distance from a target

ReFL (arXiv:2304.05977): begin is drawn in the last quarter, one estimate, no guidance, relu(2 - R).
DRaFT-K (arXiv:2309.17400): the last K steps; K = T is full backpropagation. DRaFT-LV: the finished
sample is noised n times to the last noise level, with one step from each. AlignProp
(arXiv:2310.03739): begin is drawn anew in each iteration around 84% of the schedule.

The sampler is the ODE's first-order one: each step is x + (s' - s) v(x, s). Estimates, their
gradient on a flow and `rescale` are in common/estimate.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from flowrl.algorithms.common import base, forward
from flowrl.algorithms.common.estimate import estimated, noised, recomputed
from flowrl.runtime.rule import read_when
from flowrl.samplers import keys
from flowrl.samplers import plan as plans
from flowrl.types import Advantages, Columns, LossOutput, Plan, Rewards, Rollout

Share = Annotated[float, Field(ge=0, le=1)]


class RewardGradientConfig(base.Anchor):
    begin: Literal["fixed", "uniform", "normal"] = Field(
        "fixed",
        description=(
            "Step where the gradient begins: `last` before the end, or drawn in each iteration."
        ),
    )
    last: Annotated[PositiveInt | None, read_when("algorithm.begin", "fixed")] = Field(
        1, description="Steps at the end that have a gradient; none: all."
    )
    earliest: Annotated[Share, read_when("algorithm.begin", "uniform")] = Field(
        0.75, description="Share of the schedule before which no gradient begins."
    )
    mean: Annotated[Share, read_when("algorithm.begin", "normal")] = Field(
        0.84,
        description=(
            "Mean of the normal distribution from which the beginning is drawn, as a share of the"
            " schedule."
        ),
    )
    spread: Annotated[PositiveFloat, read_when("algorithm.begin", "normal")] = Field(
        0.1, description="Standard deviation of that distribution."
    )
    estimate: bool = Field(
        False,
        description=(
            "Replace the steps after the beginning of the gradient by one estimate of the data."
        ),
    )
    noised: NonNegativeInt = Field(
        0,
        description=(
            "How many times a finished sample is noised again to the last noise level; 0: none."
        ),
    )
    objective: Literal["reward", "hinge", "distance"] = Field(
        "reward", description="The loss: -R, max(0, target - R), or |target - R|."
    )
    target: Annotated[float, read_when("algorithm.objective", "hinge", "distance")] = Field(
        2.0, description="Reward that is aimed at, in the units of the weighted sum."
    )
    scale: PositiveFloat = Field(1.0, description="Factor by which the loss is multiplied.")
    rescale: bool = Field(
        False, description="Divide the gradient of an estimate by its sigma; its value stays."
    )
    checkpoint: bool = Field(
        True, description="Compute each network call again for its gradient, to save memory."
    )

    @model_validator(mode="after")
    def check_parts(self) -> RewardGradientConfig:
        if self.noised and (self.begin != "fixed" or self.last != 1):
            raise ValueError(
                "algorithm.noised noises samples to the last noise level: it goes with begin=fixed"
                " and last=1"
            )
        one = self.estimate or self.noised
        if self.rescale and not (one or (self.begin == "fixed" and self.last == 1)):
            raise ValueError(
                "algorithm.rescale is of a single step: it goes with estimate=true, noised or"
                " last=1"
            )
        return self


class RewardGradient(base.Anchored):
    Config = RewardGradientConfig
    config: RewardGradientConfig

    def __init__(self, config: RewardGradientConfig):
        super().__init__(config)
        self.needs = frozenset({"reward"} | self.anchor_needs())

    # ------------------------------------------------------------------ which steps

    def plan(self, sigmas: Tensor, *, sampler: base.Sampler, iteration: int, seed: int) -> Plan:
        steps = len(sigmas) - 1
        begin = None if self.config.noised else self.begin(steps, seed, iteration)
        return plans.ode(sigmas, solver="euler", init=sampler.init_noise, kept=begin)

    def begin(self, steps: int, seed: int, iteration: int) -> int:
        """The step, of `steps`, where the gradient begins."""
        c = self.config
        if c.begin == "fixed":
            return max(0, steps - (c.last or steps))
        generator = torch.Generator().manual_seed(keys.key(seed, "begin", iteration) % 2**63)
        low = min(steps - 1, math.ceil(c.earliest * steps))
        if c.begin == "uniform":
            return int(torch.randint(low, steps, (), generator=generator))
        drawn = 0
        # a step outside the schedule is drawn again, as in AlignProp
        while not 1 <= drawn < steps and steps > 1:
            drawn = int((c.mean + c.spread * torch.randn((), generator=generator)) * steps)
        return drawn

    def check(self, plan: Plan) -> None:
        self.check_anchor()
        c = self.config
        if c.begin == "fixed" and c.last is not None and c.last > plan.edges:
            raise ValueError(
                f"algorithm.last={c.last} of sampler.steps={plan.edges}; lower it, or leave all"
                " steps to algorithm.last=null"
            )
        if plan.sigma_next[-1] > 0 and c.rescale and not (c.estimate or c.noised):
            raise ValueError(
                "algorithm.rescale is of an estimate of the data, and the schedule of this model"
                " ends above noise level 0, where the last step gives none; add"
                " algorithm.estimate=true"
            )

    def most_rows(self, plan: Plan, group: int) -> int:
        return group * max(1, self.config.noised)

    # ------------------------------------------------------------------ rows

    def leaf_advantages(self, rewards: Rewards, group: Tensor) -> Tensor:
        """The rewards themselves: nothing is compared with its group."""
        return torch.where(rewards.valid, rewards.total, torch.nan)

    def columns(
        self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int
    ) -> Columns:
        """One row for each sample, or for each noised copy of a sample."""
        copies = max(1, self.config.noised)
        sample = torch.nonzero(~advantages.leaf.isnan()).flatten().repeat_interleave(copies)
        number = torch.arange(copies, device=sample.device).repeat(len(sample) // copies)
        key = keys.key(seed, "noised", iteration, rollout.leaf_key[sample].cpu(), number.cpu())
        return Columns(
            {
                "prompt": rollout.group[sample],
                "sample": sample,
                "adv": advantages.leaf[sample].float(),
                "noise_key": key.to(sample.device),
                "weight": torch.full((len(sample),), 1 / copies, device=sample.device),
                **base.gate_column(advantages.kl_gate, sample),
            }
        )

    # ------------------------------------------------------------------ the loss

    def score(
        self, policy: base.VelocityField, rollout: Rollout, batch: Columns
    ) -> dict[str, Tensor]:
        """reward (n,) of the samples; kl (n,), the mean over their steps, when it has a weight."""
        c, distances = self.config, []

        def call(x: Tensor, s: float) -> Tensor:
            sigma = torch.full((len(x),), s, dtype=torch.float64)
            guidance = rollout.guidance
            return policy.velocity(x, sigma, rollout.cond, batch.prompt, guidance=guidance).float()

        def velocity(x: Tensor, s: float) -> Tensor:
            v = recomputed(call, x, s) if c.checkpoint else call(x, s)
            if c.kl_weight:
                with torch.no_grad(), policy.view(self.anchor):
                    reference = call(x.detach(), s)
                distances.append(forward.distance(v, reference))
            return v

        x, sigma = self.sample(velocity, rollout, batch)
        scores = {"reward": policy.reward(x, rollout, batch.sample, sigma)}
        return scores | ({"kl": torch.stack(distances).mean(0)} if c.kl_weight else {})

    def sample(
        self, velocity: Callable[[Tensor, float], Tensor], rollout: Rollout, batch: Columns
    ) -> tuple[Tensor, float]:
        """Samples (n, *L), whose gradient starts at the plan's trained step, and their noise
        level."""
        c, plan = self.config, rollout.plan
        sigma, sigma_next = plan.sigma.tolist(), plan.sigma_next.tolist()
        if c.noised:  # DRaFT-LV: each sample once more, from noise of its own at the last level
            x0 = rollout.at(rollout.leaf[batch.sample])
            x = noised(x0, batch.host("noise_key"), sigma[-1])
            return estimated(velocity, x, sigma[-1], rescale=c.rescale), 0.0
        begin = int(torch.nonzero(plan.trained))
        x = rollout.at(rollout.src[rollout.leaf_edge[batch.sample]])
        # a single step that ends at sigma 0 is the same as an estimate
        if c.estimate or (begin == plan.edges - 1 and not sigma_next[-1]):
            return estimated(velocity, x, sigma[begin], rescale=c.rescale), 0.0
        for s, end in zip(sigma[begin:], sigma_next[begin:], strict=True):
            x = x + (end - s) * velocity(x, s)
        return x, sigma_next[-1]

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        c, reward = self.config, scores["reward"]
        term = {
            "reward": -reward,
            "hinge": (c.target - reward).clamp(min=0),
            "distance": (c.target - reward).abs(),
        }[c.objective]
        metrics = {"policy/reward": reward}
        term = base.plus_kl(c.scale * term, scores, metrics, c.kl_weight)
        return base.summed(term, metrics, batch)

    def fit(self, policy: base.VelocityField, rollout: Rollout, batch: Columns) -> Tensor:
        """The reward itself."""
        return self.score(policy, rollout, batch)["reward"]


ALGORITHM = RewardGradient
