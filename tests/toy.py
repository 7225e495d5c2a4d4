"""A two-dimensional flow with an exact velocity and a small trainable correction: a policy for tests of algorithms."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace

import torch
from torch import nn

from flowrl.samplers import keys, sigmas, tree
from flowrl.types import Rewards, replace

GRID = sigmas.shifted(8, 3)
SAMPLER = SimpleNamespace(eta=0.7, init_noise="sample")
CENTRES = torch.tensor([[1.0, 0.0], [-1.0, 0.5], [0.0, -1.0]])  # of each prompt's data, variance .25


class ToyPolicy(nn.Module):
    """v = exact velocity of N(centre of the prompt, .25) + net; views: default (net), old (a copy), reference (no net)."""

    def __init__(self, scale: float = 0.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 + 1 + 3, 32), nn.SiLU(), nn.Linear(32, 2))
        nn.init.normal_(self.net[2].weight, std=scale) if scale else nn.init.zeros_(self.net[2].weight)
        nn.init.zeros_(self.net[2].bias)
        self.active, self.rows, self.guidances = "default", 0, []
        self.old = copy.deepcopy(self.net).requires_grad_(False)

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
        net = self.old if self.active == "old" else self.net
        return v + net(torch.cat([x, s, torch.eye(3)[rows]], 1))

    def same(self, a, b):
        nets = {"default": self.net, "old": self.old}
        return all(torch.equal(x, y) for x, y in zip(nets[a].parameters(), nets[b].parameters(), strict=True))

    @torch.no_grad()
    def update_old(self, decay):
        for old, new in zip(self.old.parameters(), self.net.parameters(), strict=True):
            old.copy_(decay * old + (1 - decay) * new)


def roll_out(policy, algorithm, *, copies=8, prompts=3, seed=0, iteration=0, sampler=SAMPLER):
    plan = algorithm.plan(GRID, sampler=sampler, iteration=iteration, seed=seed)
    rows = torch.arange(prompts).repeat_interleave(copies)
    with policy.view(algorithm.rollout_view):
        grown = tree.grow(
            lambda x, s, r: policy.velocity(x, s, None, r, guidance="none"),
            lambda k: keys.gaussian(k, (2,)),
            plan,
            shape=(2,),
            rows=rows,
            prompt_keys=keys.key(seed, iteration, rows),
        )
    return replace(grown, guidance="none")


def rewards_of(total, raw=None, weights=None):
    total = torch.as_tensor(total, dtype=torch.float32)
    return Rewards(raw=raw or {"r": total}, weights=weights or {"r": 1.0}, total=total, valid=~torch.isnan(total))


def to_the_right(rollout):
    """Reward: minus the squared distance to the prompt's centre moved by (1, 1)."""
    return rewards_of(-(rollout.leaves - CENTRES[rollout.group] - 1).square().sum(1))


def gradient(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def advantages_of(algorithm, rollout, rewards):
    return algorithm.advantages(rollout, algorithm.leaf_advantages(rewards, rollout.group))
