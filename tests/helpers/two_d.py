"""A module policy of a two-dimensional flow, with heads, for methods that train these."""

from __future__ import annotations

import torch
from torch import nn

import flowrl
from flowrl.policy.weights import heads
from flowrl.rollouts.roll_out import roll_out as policy_roll_out
from flowrl.runtime.ledger import Ledger
from flowrl.samplers import sigmas
from flowrl.training import gradient as objective
from flowrl.types import PromptBatch

CENTRES = {"left": [-1.0, 0.0], "right": [1.0, 0.5]}
TEXTS = list(CENTRES)


class Net(nn.Module):
    """The exact velocity of N(centre, .25) plus a correction that starts at 0."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Linear(32, 2))
        nn.init.zeros_(self.layers[2].weight)
        nn.init.zeros_(self.layers[2].bias)

    def forward(self, x, t, cond):
        s = t[:, None]
        slope = (s - (1 - s) * 0.25) / ((1 - s) ** 2 * 0.25 + s**2)
        exact = slope * (x - (1 - s) * cond) - cond
        return exact + self.layers(torch.cat([x, s, cond], 1))


def cond(texts):
    return torch.tensor([CENTRES[text] for text in texts])


def policy(algorithm, lora=None):
    """With the algorithm's heads; the network itself is frozen where the algorithm leaves it."""
    torch.manual_seed(0)
    made = flowrl.load_policy(Net(), shape=(2,), cond=cond, lora=lora)
    made.trainable.freeze(not algorithm.trains_network)
    made.trainable.set_heads(heads.make(algorithm.heads, (2,), seed=0))
    for view in algorithm.views:
        made.trainable.add_view(view)
    return made


def nearness(x, group):
    """Minus the squared distance of x (n, 2) to the prompts' centres moved by (0.6, 0.6)."""
    return -(x - cond(TEXTS)[group] - 0.6).square().sum(1)


def roll_out(own, algorithm, *, steps=2, group=16, iteration=0):
    sampler = type("Sampler", (), {"eta": 0.0, "init_noise": "sample"})
    plan = algorithm.plan(sigmas.linear(steps), sampler=sampler, iteration=iteration, seed=0)
    algorithm.check(plan)
    batch = PromptBatch(text=TEXTS, ids=torch.arange(2), meta=[{}, {}])
    return policy_roll_out(
        own,
        batch,
        plan,
        group=group,
        guidance="none",
        seed=0,
        iteration=iteration,
        micro=512,
        ledger=Ledger(torch.device("cpu")),
    )


def rows_of(algorithm, rollout, rewards, iteration=0):
    advantages = algorithm.advantages(rollout, algorithm.leaf_advantages(rewards, rollout.group))
    return algorithm.columns(rollout, advantages, seed=0, iteration=iteration)


def learn(algorithm, rewards_of, *, iterations, lr, **how):
    """The policy after a small run, and the mean reward of its rollouts in each iteration."""
    own, history = policy(algorithm), []
    weights = [p for part in own.parts.values() for p in part.values()]
    optimizer = torch.optim.Adam(weights, lr=lr)
    for i in range(iterations):
        rollout = roll_out(own, algorithm, iteration=i, **how)
        rewards = rewards_of(nearness(rollout.leaves, rollout.group))
        history.append(float(rewards.total.mean()))
        rows = rows_of(algorithm, rollout, rewards, i)
        optimizer.zero_grad()
        objective.accumulate(
            algorithm,
            own,
            rollout,
            rows,
            micro=512,
            total_weight=float(rows.weight.sum()),
            backward=torch.Tensor.backward,
        )
        optimizer.step()
        for view, decay in algorithm.follow(i + 1, i).items():
            own.trainable.copy("default", view, decay=decay)
    return own, history
