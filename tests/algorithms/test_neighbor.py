"""Neighbor GRPO: the policy over a group by distance, by hand and by its identities."""

import dataclasses
import math

import pytest
import torch
from toy import ToyPolicy, backward, learn, prepared, roll_out

from flowrl.algorithms.neighbor import ALGORITHM, paths, scaled
from flowrl.config.load import load_config
from flowrl.samplers import keys, plan, sigmas, tree


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**options))


def grown(spread, groups=2, members=500, dims=(4,)):
    """A rollout of v = 0: its states are the noise."""
    rows = torch.arange(groups).repeat_interleave(members)
    return tree.grow(
        lambda x, s, r: torch.zeros_like(x),
        lambda k: keys.gaussian(k, dims),
        plan.neighbours(sigmas.shifted(2, 1), spread=spread),
        shape=dims,
        rows=rows,
        prompt_keys=keys.key(0, rows),
    )


def test_the_policy_and_the_advantages_by_hand():
    """pi = softmax(-(1, 0, .25, 4)); A' = A / (sum |A|^.8)^1.25."""
    rollout = grown(0.3, groups=1, members=4, dims=(1,))
    states = torch.zeros_like(rollout.states)
    states[:4] = torch.tensor([[-1.0], [0.0], [0.5], [2.0]])
    rollout = rollout_with(rollout, states=states)
    pi = make(distance="sum").log_policy(rollout, torch.arange(4)[None], torch.zeros(1, 1)).exp()
    assert pi[0].tolist() == pytest.approx([0.169922, 0.461895, 0.359724, 0.008460], abs=1e-6)
    adv = scaled(torch.tensor([1.5, 0.2, -0.4, -1.3]), 0.8)
    assert adv.tolist() == pytest.approx([0.328136, 0.043752, -0.087503, -0.284385], abs=1e-6)


def rollout_with(rollout, **changes):
    return dataclasses.replace(rollout, **changes)


def test_the_gradient_at_the_prediction_by_hand():
    """d log pi(i) / dx = 2 (x_i - sum_j pi_j x_j), and members that are missing have none."""
    rollout = grown(0.3, groups=1, members=4, dims=(3,))
    ends = torch.tensor([[0, 1, 2, -1]])
    x = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    log_pi = make(distance="sum").log_policy(rollout, ends, x)
    log_pi[0, 1].backward()
    states = rollout.states[:3].double()
    by_hand = 2 * (states[1] - (log_pi[0, :3].detach().double().exp()[:, None] * states).sum(0))
    torch.testing.assert_close(x.grad[0], by_hand, rtol=1e-5, atol=1e-6)
    assert log_pi[0, 3].item() == -math.inf
    mean = make(distance="mean", temperature=1 / 3).log_policy(rollout, ends, x)
    torch.testing.assert_close(mean, log_pi)  # a mean at a third of the temperature is the sum


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_starts_are_normal_and_share_their_groups_noise(spread):
    rollout = grown(spread)
    x = rollout.at(rollout.src[paths(rollout)[:, 0]]).view(2, 500, 4)
    assert float((x - x.mean(1, keepdim=True)).std()) == pytest.approx(spread, rel=0.05)
    if spread < 1:
        shared = keys.gaussian(keys.key("x_T", keys.key(0, torch.arange(2))), (4,))
        expected = math.sqrt(1 - spread**2) * shared
        torch.testing.assert_close(x.mean(1), expected, atol=0.06, rtol=0)
        assert not torch.equal(x[0, 0], x[0, 1])


def test_the_old_policy_is_that_of_the_rollout_and_costs_no_call():
    """At the policy that sampled every ratio is 1: the loss is -sum A', nothing is clipped."""
    algorithm, policy = make(spread=0.5, anchors=3), ToyPolicy(0.3)
    _, rollout, _, rows = prepared(algorithm, policy)
    assert len(rows) == 3 * 3 * 8  # groups, anchors, steps
    out = algorithm.loss(algorithm.score(policy, rollout, rows), rows)
    assert float(out.loss.detach()) == pytest.approx(-float(rows.prefer.sum()), abs=1e-4)
    assert float(out.metrics["policy/log_ratio"]) < 1e-3
    assert float(out.metrics["policy/clip_fraction"]) == 0
    assert 0 < float(out.metrics["policy/entropy"]) / len(rows) <= 1


def test_an_invalid_member_is_no_anchor_and_is_not_compared():
    algorithm, policy = make(anchors=8), ToyPolicy(0.3)
    rollout = roll_out(policy, algorithm, prompts=2)
    leaf = torch.linspace(-1, 1, 16)
    leaf[3] = torch.nan
    rows = algorithm.columns(rollout, algorithm.advantages(rollout, leaf), seed=0, iteration=0)
    assert len(rows) == (7 + 8) * 8 and rows.ends.shape == (len(rows), 8)
    assert not torch.isin(rollout.src[paths(rollout)[3]], rows.src).any()
    assert int((rows.ends < 0).sum()) == 7 * 8  # one is missing in each row of the first group
    gradient = backward(algorithm, policy, rollout, rows)
    assert all(bool(g.isfinite().all()) for g in gradient) and any(g.abs().sum() for g in gradient)


def test_a_group_without_a_signal_gives_no_row():
    algorithm, policy = make(), ToyPolicy(0.3)
    rollout = roll_out(policy, algorithm)
    none = algorithm.advantages(rollout, torch.zeros(24))
    assert len(algorithm.columns(rollout, none, seed=0, iteration=0)) == 0


def test_a_toy_flow_learns():
    history = learn(make(spread=0.5, clip=(0.2, 0.2)), iterations=20)
    assert history[-1] > 0.6 * history[0]  # both are negative


def test_more_steps_than_there_are_and_groups_without_own_noise_are_refused():
    algorithm = make(steps=9)
    with pytest.raises(ValueError, match="sampler.steps=8; choose at most that"):
        algorithm.check(plan.neighbours(sigmas.shifted(8, 3), spread=0.3))
    with pytest.raises(ValueError, match="algorithm.spread"):
        load_config(None, ["algorithm=neighbor_grpo", "algorithm.spread=0"])
