"""RAFT and reward-weighted regression: who is trained with which weight, the loss, learning."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from toy import GRID, SAMPLER, ToyPolicy, backward, noised, prepared

from flowrl.algorithms.raft import ALGORITHM, LEAST
from flowrl.config.build import make_algorithm
from flowrl.config.load import load_config


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**{"steps": 2, **options}))


def samples(rollout, rows):
    return [rollout.leaf.tolist().index(state) for state in rows.state.tolist()]


@pytest.mark.parametrize("draws", [1, 3])
def test_the_best_of_each_group_is_trained_with_weight_one(draws):
    """Weights add up to groups x draws."""
    _, rollout, advantages, rows = prepared(make(steps=draws))
    best = [int(advantages.leaf[rollout.group == g].argmax()) + 8 * g for g in range(3)]
    assert samples(rollout, rows) == [i for i in best for _ in range(draws)]
    assert bool((rows.weight == 1).all())
    assert float(rows.weight.sum()) == 3 * draws
    assert bool((rows.adv > 0).all())


def test_the_first_of_equal_samples_is_taken_and_groups_without_a_difference_are_dropped():
    """Flow-GRPO's code trains all samples of a binary group in which all failed."""
    reward = torch.tensor([0.0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0])
    _, rollout, _, rows = prepared(make(steps=1), reward=reward, copies=4)
    assert samples(rollout, rows) == [1, 8]
    _, rollout, _, rows = prepared(make(steps=1, top=2), reward=reward, copies=4)
    assert samples(rollout, rows) == [1, 2, 8, 9]


def test_a_tie_is_taken_in_the_order_of_the_batch_however_large_the_group():
    """argsort is stable: 40 samples, the last 30 of them equally good."""
    reward = torch.cat([torch.zeros(10), torch.ones(30)])
    _, rollout, _, rows = prepared(make(steps=1, top=5), reward=reward, copies=40, prompts=1)
    assert samples(rollout, rows) == [10, 11, 12, 13, 14]


def test_with_all_of_a_group_kept_it_is_self_distillation():
    """top = K: every sample with weight 1, whatever its reward: plain flow matching on the policy's
    own samples."""
    algorithm = make(top=8)
    policy, rollout, _, rows = prepared(algorithm, ToyPolicy(0.3))
    assert sorted(samples(rollout, rows)) == sorted(list(range(24)) * 2)
    got = backward(algorithm, policy, rollout, rows)
    policy.zero_grad()
    _, x, _, u = noised(rollout, rows)
    loss = (policy.velocity(x, rows.sigma, None, rows.prompt) - u).square().mean(1).sum()
    loss.backward()
    assert got[0].item() == pytest.approx(loss.item())
    assert torch.equal(got[1], torch.cat([p.grad.flatten() for p in policy.net.parameters()]))


def test_a_single_sample_has_nothing_to_be_better_than():
    assert len(prepared(make(), reward=torch.tensor([3.0]), copies=1, prompts=1)[3]) == 0


def test_reward_weighted_regression_weighs_by_softmax_within_a_group_at_each_draw():
    """Advantages -1.2247, 0, 1.2247 (the root of 1.5), temperature 2; weights add up to groups x
    draws."""
    algorithm = make(select="softmax", temperature=2.0, eps=0.0)
    _, rollout, _, rows = prepared(
        algorithm, reward=torch.tensor([0.0, 1, 2, 5, 5, 5, 10, 30, 20]), copies=3
    )
    e = [math.exp(a * 1.5**0.5 / 2) for a in (-1, 0, 1)]
    low, mid, high = (value / sum(e) for value in e)
    assert samples(rollout, rows) == [0, 0, 1, 1, 2, 2, 6, 6, 7, 7, 8, 8]
    assert rows.weight.tolist() == pytest.approx(
        [low, low, mid, mid, high, high, low, low, high, high, mid, mid], rel=1e-5
    )
    assert float(rows.weight.sum()) == pytest.approx(2 * 2)


def test_a_cold_softmax_is_the_best_sample_and_a_hot_one_is_even():
    reward = torch.tensor([0.0, 1, 2, 9])
    cold = prepared(
        make(select="softmax", temperature=1e-3, steps=1), reward=reward, copies=4, prompts=1
    )[3]
    assert cold.weight.tolist() == [1.0] and cold.adv.item() > 1  # the others are not trained
    hot = prepared(
        make(select="softmax", temperature=1e6, steps=1), reward=reward, copies=4, prompts=1
    )[3]
    assert hot.weight.tolist() == pytest.approx([0.25] * 4, rel=1e-4)


def test_samples_without_weight_are_not_trained():
    """Two of eight good: at a low temperature they share the weight, and the other six would cost
    as much as they do."""
    reward = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0] * 3)
    _, rollout, _, rows = prepared(make(select="softmax", temperature=0.2), reward=reward)
    assert set(samples(rollout, rows)) == {0, 1, 8, 9, 16, 17}
    assert torch.allclose(rows.weight, torch.tensor(0.5), atol=1e-4)
    _, rollout, _, rows = prepared(make(select="softmax"), reward=reward)
    assert set(samples(rollout, rows)) == {*range(24)} and float(rows.weight.min()) > LEAST


def test_weights_of_groups_do_not_depend_on_the_rewards_scale():
    reward = torch.rand(24)
    small, large = (
        prepared(make(select="softmax", eps=0.0), reward=scale * reward)[3]
        for scale in (1.0, 1000.0)
    )
    assert torch.allclose(small.weight, large.weight, rtol=1e-3)


def test_the_gradient_is_the_weighted_errors():
    algorithm = make(select="softmax")
    policy, rollout, _, rows = prepared(algorithm, ToyPolicy(0.3))
    loss, got = backward(algorithm, policy, rollout, rows)
    policy.zero_grad()
    _, x, _, u = noised(rollout, rows)
    (
        rows.weight * (policy.velocity(x, rows.sigma, None, rows.prompt) - u).square().mean(1)
    ).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in policy.net.parameters()])
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6) and expected.abs().max() > 0.1


def test_no_more_rows_are_announced_than_are_trained():
    _, rollout, _, rows = prepared(make(top=3), reward=torch.arange(24.0))
    assert len(rows) == 3 * make(top=3).most_rows(rollout.plan, 8) == 3 * 3 * 2
    assert (
        make(top=9).most_rows(rollout.plan, 8)
        == 8 * 2
        == make(select="softmax").most_rows(rollout.plan, 8)
    )


@pytest.mark.parametrize("name", ["dpo", "raft", "rwr"])
def test_the_shipped_configs_draw_the_noise_levels_of_flow_grpos_code(name):
    """Its draw: entry floor(1000 u), u logit-normal, of SD3's schedule of 1,000 levels and shift 3.
    The mean is 0.714; without the shift it would be 0.5."""
    algorithm = make_algorithm(load_config(None, [f"algorithm={name}"]))
    plan = algorithm.plan(GRID, sampler=SAMPLER, iteration=0, seed=0)
    ours, _ = algorithm.drawn_levels(plan, torch.arange(40000 // algorithm.draws(plan)))
    schedule = FlowMatchEulerDiscreteScheduler(shift=3.0).timesteps.double() / 1000
    u = torch.randn(40000, generator=torch.Generator().manual_seed(0)).double().sigmoid()
    theirs = schedule[(1000 * u).long()]
    assert float(ours.mean()) == pytest.approx(0.714, abs=0.004)
    for q in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert float(ours.quantile(q)) == pytest.approx(float(theirs.quantile(q)), abs=0.01)
