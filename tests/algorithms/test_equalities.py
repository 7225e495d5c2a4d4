"""Methods and steps that are the same by their formulas, on toy networks in fp64."""

import math
from dataclasses import replace

import pytest
import torch
from toy import ToyPolicy, backward, in_fp64, prepared, roll_out

from flowrl.algorithms import dpo, grpo, raft, sft
from flowrl.algorithms.common.step_weight import pulls, spreads, step_weight
from flowrl.samplers import cps, ddim, ode, precise
from flowrl.types import Advantages, Columns

OPEN = (1e9, 1e9)  # a clip that never stops a step
TIGHT = {"rtol": 1e-9, "atol": 1e-12}
GRID = [(1.0, 0.9), (0.75, 0.5), (0.5, 0.1)]  # pairs of noise levels


def make(module, **options):
    return module.ALGORITHM(module.ALGORITHM.Config(**options))


def trusting(threshold, divergence="scaled"):
    return make(grpo, trust={"threshold": threshold, "divergence": divergence}, clip=OPEN)


def moved(policy):
    """Move the policy away from the one that sampled."""
    torch.nn.init.normal_(policy.net[2].bias, std=0.3)


def rollout_of(algorithm, monkeypatch):
    """A rollout of a toy policy and its rows, all in fp64."""
    policy, rollout, _, rows = prepared(algorithm, ToyPolicy(0.1))
    return policy.double(), *in_fp64(monkeypatch, rollout, rows)


@pytest.mark.parametrize("divergence", ["scaled", "raw", "velocity"])
def test_a_threshold_without_end_is_a_clip_without_end(divergence, monkeypatch):
    wide, open_ = trusting(1e9, divergence), make(grpo, clip=OPEN)
    policy, rollout, rows = rollout_of(wide, monkeypatch)
    moved(policy)
    one, other = (backward(a, policy, rollout, rows) for a in (wide, open_))
    torch.testing.assert_close(one, other, **TIGHT)
    # and not because nothing would ever be dropped
    tight = trusting(1e-9, divergence)
    metrics = tight.loss(tight.score(policy, rollout, rows), rows).metrics
    assert 0 < float(metrics["policy/clip_fraction"]) < len(rows)


@pytest.mark.parametrize("divergence", ["scaled", "raw", "velocity"])
def test_the_first_update_of_a_trust_region_is_plain_grpo(divergence):
    tight, plain = trusting(1e-9, divergence), make(grpo, clip=(1e-4, 1e-4))
    policy, rollout, _, rows = prepared(tight, ToyPolicy(0.1))
    one, other = (backward(a, policy, rollout, rows) for a in (tight, plain))
    torch.testing.assert_close(one, other)


def test_the_jacobian_weight_of_a_guard_is_inverse_lambda_of_a_plain_ratio():
    """On policy both give -A sign(Q) noise / d: unit weight on every step."""
    guard = make(grpo, ratio="guard", step_weight="jacobian", clip=OPEN)
    plain = make(grpo, step_weight="inverse_lambda", clip=OPEN)
    policy, grads = ToyPolicy(0.1), []
    for algorithm in (guard, plain):
        _, rollout, _, rows = prepared(algorithm, policy)
        grads.append(backward(algorithm, policy, rollout, rows)[1])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    lam = 1 / step_weight("inverse_lambda", rollout, rows)
    torch.testing.assert_close(lam, pulls(rollout, rows) / spreads(rollout, rows))


def test_supervised_training_is_raft_with_every_sample_kept(monkeypatch):
    class SFT(raft.RAFT):
        """Draws of levels and noise belong to a method's name."""

    own, other = make(sft, prompt_dropout=0), SFT(raft.ALGORITHM.Config(top=8))
    rollout, policy = roll_out(ToyPolicy(0.1), own), ToyPolicy(0.3).double()
    ones = Advantages(leaf=torch.ones(len(rollout.leaf)))
    ranked = Advantages(leaf=torch.linspace(-1, 1, len(rollout.leaf)))
    rows = own.columns(rollout, ones, seed=0, iteration=0)
    same = other.columns(rollout, ranked, seed=0, iteration=0)
    same = Columns({**same.data, "text": same.prompt})[same.state.argsort()]
    double, rows = in_fp64(monkeypatch, rollout, rows)
    _, same = in_fp64(monkeypatch, rollout, same)
    one, two = backward(own, policy, double, rows), backward(other, policy, double, same)
    torch.testing.assert_close(one, two, **TIGHT)


def test_a_pair_of_files_is_the_best_and_the_worst_of_a_group(monkeypatch):
    """The pair alone, as files bring it, and the group that it is the best and worst of."""
    algorithm, policy = make(dpo), ToyPolicy(0.3).double()
    group = roll_out(ToyPolicy(0.1), algorithm, prompts=1)
    worth = torch.tensor([0.0, 0.3, -0.2, 0.4, 0.0, -0.2, 0.1, -0.9])
    # the smallest key of a group's samples is that of its noise, so the pair has to hold it
    ends = torch.stack([group.leaf_key.argmin(), group.leaf_key.argmax()])
    worth[ends] = torch.tensor([1.5, -1.2])
    pair = replace(
        group,
        **{name: getattr(group, name)[ends] for name in ("leaf", "leaf_edge", "leaf_key", "group")},
    )
    found = []
    for rollout, leaf in ((group, worth), (pair, torch.tensor([1.0, -1.0]))):
        own = Advantages(leaf=leaf)
        rows = algorithm.columns(rollout, own, seed=0, iteration=0)
        with monkeypatch.context() as patch:
            found.append(backward(algorithm, policy, *in_fp64(patch, rollout, rows)))
    torch.testing.assert_close(*found, **TIGHT)


def step(module, s, t, eta):
    """One step of fixed latents in fp64 -> (mean, std)."""
    x, v = torch.tensor([[1.0, -1.0]]).double(), torch.tensor([[0.2, 0.4]]).double()
    made = module.transition(v, x, torch.tensor(s).double(), torch.tensor(t).double(), eta=eta)
    return made.mean.double(), made.std.double().reshape(())


@pytest.mark.parametrize(("s", "t"), GRID)
def test_what_the_precise_step_equals(s, t):
    """eta sqrt(2): ancestral sampling; 0: the ODE; without end: CPS at 1; in between: CPS with an
    angle of its own."""
    near = {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(step(precise, s, t, math.sqrt(2)), step(ddim, s, t, 1.0), **near)
    torch.testing.assert_close(step(precise, s, t, 0.0), step(ode, s, t, 0.0), **near)
    torch.testing.assert_close(step(precise, s, t, 200.0), step(cps, s, t, 1.0), **near)
    for eta in (0.3, 0.7, 1.5):
        rho = (t * (1 - s) / (s * (1 - t))) ** (eta**2 / 2)
        angle = 2 / math.pi * math.acos(rho)
        torch.testing.assert_close(step(precise, s, t, eta), step(cps, s, t, angle), **near)
