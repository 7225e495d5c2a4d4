"""A two-dimensional flow with an exact velocity and a small trainable correction, for tests."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn

from flowrl.samplers import keys, sigmas, tree
from flowrl.training import gradient as objective
from flowrl.types import Columns, Rewards, Transition, expand

GRID = sigmas.shifted(8, 3)
SAMPLER = SimpleNamespace(eta=0.7, init_noise="sample")
# of each prompt's data, variance .25
CENTRES = torch.tensor([[1.0, 0.0], [-1.0, 0.5], [0.0, -1.0]])


class ToyPolicy(nn.Module):
    """v = exact velocity of N(centre of the prompt, .25) + net.

    Views: default (net), old and anchor (copies), reference (no net).
    """

    def __init__(self, scale: float = 0.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 + 1 + 3, 32), nn.SiLU(), nn.Linear(32, 2))
        if scale:
            nn.init.normal_(self.net[2].weight, std=scale)
        else:
            nn.init.zeros_(self.net[2].weight)
        nn.init.zeros_(self.net[2].bias)
        self.spread = nn.Parameter(torch.zeros(2))  # of learned noise
        self.active, self.rows, self.guidances = "default", 0, []
        self.old, self.anchor = (copy.deepcopy(self.net).requires_grad_(False) for _ in range(2))

    @contextlib.contextmanager
    def view(self, name):
        before, self.active = self.active, name
        yield
        self.active = before

    def velocity(self, x, sigma, cond, rows, *, guidance="pipeline", detach_uncond=False):
        self.rows += len(x)
        self.guidances.append(guidance)
        s, centre = sigma.to(x)[:, None], CENTRES[rows]
        v = (s - (1 - s) * 0.25) / ((1 - s) ** 2 * 0.25 + s**2) * (x - (1 - s) * centre) - centre
        if self.active == "reference":
            return v
        return v + self.net_of(self.active)(torch.cat([x, s, torch.eye(3)[rows]], 1))

    def step_std(self, cond, sigma, rows, most):
        return most.float()[:, None] * self.spread.sigmoid()

    def initial(self, cond, rows):
        return Transition(mean=0 * rows[:, None] + self.spread, std=torch.ones(len(rows), 2))

    def reward(self, x, rollout, samples, sigma=0.0):
        return nearness(x, rollout.group[samples])

    def taught(self, x, sigma, cond, rows):
        """The velocity of a teacher, the exact one."""
        with torch.no_grad(), self.view("reference"):
            return self.velocity(x, sigma, cond, rows)

    def net_of(self, view):
        return {"default": self.net, "old": self.old, "anchor": self.anchor}[view]

    def same(self, a, b):
        return all(
            torch.equal(x, y)
            for x, y in zip(self.net_of(a).parameters(), self.net_of(b).parameters(), strict=True)
        )

    @torch.no_grad()
    def update(self, view, decay):
        for kept, new in zip(self.net_of(view).parameters(), self.net.parameters(), strict=True):
            kept.copy_(decay * kept + (1 - decay) * new)


class Fixed:
    """A policy whose velocity (n, *L) is given for each view, whatever x is.

    "same" compares by identity.
    """

    def __init__(self, v, v_old=None, v_ref=None):
        v_old = v.detach() if v_old is None else v_old
        self.views = {
            "default": v,
            "old": v_old,
            "anchor": v_old,
            "reference": v_old if v_ref is None else v_ref,
        }
        self.active, self.guidances = "default", []

    @contextlib.contextmanager
    def view(self, name):
        before, self.active = self.active, name
        yield
        self.active = before

    def same(self, a, b):
        return self.views[a] is self.views[b]

    def velocity(self, x, sigma, cond, rows, *, guidance="pipeline", detach_uncond=False):
        self.guidances.append((self.active, guidance))
        return 1 * self.views[self.active]  # under no_grad without gradient, as a network's


def roll_out(
    policy, algorithm, *, copies=8, prompts=3, seed=0, iteration=0, sampler=SAMPLER, grid=GRID
):
    plan = algorithm.plan(grid, sampler=sampler, iteration=iteration, seed=seed)
    rows = torch.arange(prompts).repeat_interleave(copies)
    with policy.view(algorithm.rollout_view):
        grown = tree.grow(
            lambda x, s, r: policy.velocity(x, s, None, r, guidance="none"),
            lambda k: keys.gaussian(k, (2,)),
            plan,
            shape=(2,),
            rows=rows,
            prompt_keys=keys.key(seed, iteration, rows),
            std=lambda s, r, most: policy.step_std(None, s, r, most),
        )
    return replace(grown, guidance="none")


def rewards_of(total, raw=None, weights=None):
    total = torch.as_tensor(total, dtype=torch.float32)
    return Rewards(
        raw=raw or {"r": total},
        weights=weights or {"r": 1.0},
        total=total,
        valid=~torch.isnan(total),
    )


def nearness(x, group):
    """Minus the squared distance of x (n, 2) to the prompts' centres moved by (1, 1)."""
    return -(x - CENTRES[group] - 1).square().sum(1)


def to_the_right(rollout):
    """Reward: `nearness`."""
    return rewards_of(nearness(rollout.leaves, rollout.group))


def gradient(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def advantages_of(algorithm, rollout, rewards):
    return algorithm.advantages(rollout, algorithm.leaf_advantages(rewards, rollout.group))


def prepared(algorithm, policy=None, reward=None, **options):
    """A rollout of the policy, its advantages and rows, at seed and iteration 0."""
    policy = policy or ToyPolicy(0.1)
    rollout = roll_out(policy, algorithm, **options)
    advantages = advantages_of(
        algorithm, rollout, to_the_right(rollout) if reward is None else rewards_of(reward)
    )
    return policy, rollout, advantages, algorithm.columns(rollout, advantages, seed=0, iteration=0)


def noised(rollout, rows):
    """x0, x, sigma, target u = eps - x0 of each row of a method on the forward process."""
    x0 = rollout.states[rows.state]
    eps = keys.gaussian(rows.noise_key, x0.shape[1:])
    s = expand(rows.sigma, x0).to(x0)
    return x0, (1 - s) * x0 + s * eps, s, eps - x0


def in_fp64(monkeypatch, rollout, rows):
    """The rollout and rows in fp64; from here on algorithms' casts to fp32 are casts to fp64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    double = {
        name: value.double() if value.dtype == torch.float32 else value
        for name, value in rows.data.items()
    }
    return replace(rollout, states=rollout.states.double()), Columns(double)


def backward(algorithm, policy, rollout, rows):
    """Loss of all rows at once, and its gradient in the policy's net."""
    policy.zero_grad()
    out = algorithm.loss(algorithm.score(policy, rollout, rows), rows)
    out.loss.backward()
    return out.loss.detach(), gradient(policy.net)


def slope(algorithm, policy, rollout, rows):
    """Derivative of the summed loss in the velocities of a Fixed policy -> (n, *L)."""
    v = policy.views["default"]
    loss = algorithm.loss(algorithm.score(policy, rollout, rows), rows).loss
    return torch.autograd.grad(loss, v)[0]


def accumulate(algorithm, policy, rollout, rows):
    """Gradient of all rows, as the training loop computes it."""
    objective.accumulate(
        algorithm,
        policy,
        rollout,
        rows,
        micro=1000,
        total_weight=float(rows.weight.sum()),
        backward=torch.Tensor.backward,
    )


def learn(algorithm, *, iterations=40, copies=16, lr=1e-2, **options):
    """Mean reward of each iteration of a small run, of one optimizer step each."""
    policy = ToyPolicy()
    optimizer = torch.optim.Adam(policy.net.parameters(), lr=lr)
    history = []
    for i in range(iterations):
        rollout = roll_out(policy, algorithm, copies=copies, iteration=i, **options)
        reward = to_the_right(rollout)
        history.append(float(reward.total.mean()))
        advantages = advantages_of(algorithm, rollout, reward)
        rows = algorithm.columns(rollout, advantages, seed=0, iteration=i)
        optimizer.zero_grad()
        accumulate(algorithm, policy, rollout, rows)
        optimizer.step()
        for view, decay in algorithm.follow(i + 1, i).items():
            policy.update(view, decay)
    return history
