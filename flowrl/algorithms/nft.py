"""DiffusionNFT (arXiv:2509.16117): online RL on the forward process, from clean samples and rewards alone; any solver, no log-probs.

With optimality probability r of a sample, the implicit positive policy (1-beta) v_old + beta v is fitted with weight r and the implicit
negative policy (1+beta) v_old - beta v with weight 1 - r, both to the flow-matching target of the re-noised sample. The optimum moves v
by 2/beta times the direction from average to optimal samples. The rollout uses the old policy, no guidance and DPM++2M.

Departures from the reference code (NVlabs/DiffusionNFT at 24af555):
* Samples with advantage 0 are left out: at the old policy their gradient is zero; further on they would pull back to the old policy.
* The model's time is not truncated to an integer in rollouts.
* std="group" by default (the code's configs use the spread of all rewards: std="global").
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from flowrl import advantages as credit
from flowrl.algorithms import _base
from flowrl.samplers import keys
from flowrl.samplers import plan as plans
from flowrl.types import Advantages, Columns, LossOutput, Plan, Rewards, Rollout, expand


class NFTConfig(_base.Options):
    beta: PositiveFloat = Field(1.0, description="Inverse guidance strength: half doubles the step aimed at; 0.1 is fast, less stable.")
    steps: PositiveInt | None = Field(None, description="Noise levels trained per sample; none: 99% of the schedule, rounded down.")
    solver: Literal["dpm2", "euler"] = Field("dpm2", description="ODE solver of rollouts.")
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = Field(
        "all", description="Advantages as they are, their positive or negative part, 1 where positive, or their sign."
    )
    adv_clip: PositiveFloat = Field(5.0, description="Advantages are clipped to this size c; optimality is A / 2c + 1/2.")
    combine: Literal["rewards", "advantages"] = Field("rewards", description="Several rewards: z-score of the sum, or sum of z-scores.")
    std: Literal["group", "global"] | None = Field("group", description="An advantage is divided by the spread of its group, all, or none.")
    ddof: Literal[0, 1] = Field(0, description="Degrees of freedom taken from the standard deviation.")
    eps: NonNegativeFloat = Field(1e-4, description="Added to the standard deviation.")
    kl_weight: NonNegativeFloat = Field(1e-4, description="Weight of the mean square distance of velocities to the untrained model.")
    decay: Literal[0, 1, 2] = Field(
        1, description="Old policy's decay after n optimizer steps. 0: 0, copied; 1: min(n / 1000, 0.5); 2: 0 until n = 75, then to 0.999."
    )


class NFT(_base.Algorithm):
    Config = NFTConfig
    config: NFTConfig
    rollout_view = "old"
    guidance = "none"

    def __init__(self, config: NFTConfig):
        super().__init__(config)
        self.needs = frozenset({"leaves", "old", "reference"} if config.kl_weight else {"leaves", "old"})

    def plan(self, sigmas: Tensor, *, sampler: _base.Sampler, iteration: int, seed: int) -> Plan:
        return plans.ode(sigmas, solver=self.config.solver, init=sampler.init_noise)

    def check(self, plan: Plan) -> None:
        self._draws(plan)

    def rows_per_copy(self, plan: Plan) -> int:
        return plan.leaves * self._draws(plan)

    def _draws(self, plan: Plan) -> int:
        """Noise levels trained per sample, of those where the plan calls the network."""
        levels = torch.unique(plan.sigma).numel()
        most = max(int(levels * 0.99), 1)
        draws = most if self.config.steps is None else self.config.steps
        if draws > most:
            raise ValueError(
                f"algorithm.steps={draws} noise levels per sample, but sampler.steps={levels} offers {most}; choose at most that"
            )
        return draws

    def leaf_advantages(self, rewards: Rewards, group: Tensor) -> Tensor:
        c = self.config
        adv = credit.combine(rewards, group, how=c.combine, std=c.std, ddof=c.ddof, eps=c.eps, clip=c.adv_clip)
        modes = {
            "all": lambda a: a,
            "positive_only": lambda a: a.clamp(min=0),
            "negative_only": lambda a: a.clamp(max=0),
            "one_only": lambda a: (a > 0).to(a),
            "binary": torch.sign,
        }
        return modes[c.adv_mode](adv)

    def columns(self, rollout: Rollout, advantages: Advantages, *, seed: int, iteration: int) -> Columns:
        """One row per (sample, noise level): a random subset of the schedule's levels for each sample, without replacement."""
        assert not bool(rollout.state_sigma[rollout.leaf].any()), "what is trained on is data, at sigma 0"
        sigmas = torch.unique(rollout.plan.sigma).flip(0).to(rollout.state_sigma)  # where the network was called, (T,)
        draws = self._draws(rollout.plan)
        leaf = torch.nonzero(advantages.leaf != 0).flatten()
        sample = keys.key("nft", seed, iteration, rollout.leaf_key[leaf])
        level = keys.permutation(sample, len(sigmas))[:, :draws]  # (leaves, draws)
        state = rollout.leaf[leaf].repeat_interleave(draws)
        adv = advantages.leaf[leaf].repeat_interleave(draws)
        return Columns({
            "prompt": rollout.prompt[state], "weight": torch.ones_like(adv), "adv": adv, "state": state,
            "sigma": sigmas[level.flatten()], "noise_key": keys.key("eps", sample[:, None], level).flatten(),
        })  # fmt: skip

    def score(self, policy: Any, rollout: Rollout, batch: Columns) -> dict[str, Tensor]:
        """positive, negative (n,): weighted x0 errors of the two implicit policies; kl (n,) when it has a weight."""
        x0 = rollout.states[batch.state]
        eps = keys.gaussian(batch.noise_key, x0.shape[1:], x0.device)
        sigma = expand(batch.sigma, x0).to(x0)
        x = (1 - sigma) * x0 + sigma * eps

        def velocity() -> Tensor:
            return policy.velocity(x, batch.sigma, rollout.cond, batch.prompt, guidance="none").float()

        v, beta = velocity(), self.config.beta
        if policy.same("default", "old"):  # on-policy: the first update of an iteration, when decay is 0
            v_old = v.detach()
        else:
            with torch.no_grad(), policy.view("old"):
                v_old = velocity()
        scores = {
            "positive": x0_error(x - sigma * ((1 - beta) * v_old + beta * v), x0),
            "negative": x0_error(x - sigma * ((1 + beta) * v_old - beta * v), x0),
        }
        if self.config.kl_weight:
            with torch.no_grad(), policy.view("reference"):
                v_ref = velocity()
            scores["kl"] = (v - v_ref).square().flatten(1).mean(1)
        return scores

    def loss(self, scores: dict[str, Tensor], batch: Columns) -> LossOutput:
        """c (r L+ + (1-r) L-) / beta + kl_weight KL, c = adv_clip, r = A / 2c + 1/2; at the old policy its gradient is A times L's."""
        c = self.config
        r = (batch.adv / (2 * c.adv_clip) + 0.5).clamp(0, 1)
        term = c.adv_clip * (r * scores["positive"] + (1 - r) * scores["negative"]) / c.beta
        metrics = {"policy/x0_error": scores["positive"]}
        if "kl" in scores:
            term = term + c.kl_weight * scores["kl"]
            metrics["policy/kl"] = scores["kl"]
        return LossOutput(
            loss=(batch.weight * term).sum(), metrics={name: (batch.weight * value.detach()).sum() for name, value in metrics.items()}
        )

    def old_decay(self, step: int) -> float:
        return (0.0, min(0.001 * step, 0.5), min(max(0.0075 * (step - 75), 0.0), 0.999))[self.config.decay]


def x0_error(x0_hat: Tensor, x0: Tensor) -> Tensor:
    """mean((x0_hat - x0)^2) / w with the detached w = max(mean |x0_hat - x0|, 1e-5), which evens out noise levels: (n, *L) -> (n,)."""
    with torch.no_grad():
        w = (x0_hat.double() - x0.double()).abs().flatten(1).mean(1).clamp(min=1e-5)
    return (x0_hat - x0).square().flatten(1).mean(1) / w.float()


ALGORITHM = NFT
