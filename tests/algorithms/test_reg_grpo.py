"""Reg-GRPO: the group's standardised log-ratios regress its advantages; by hand, by identity."""

import pytest
import torch
from toy import ToyPolicy, backward, gradient, prepared, rewards_of

from flowrl.algorithms.prdp import pair_terms
from flowrl.algorithms.reg_grpo import ALGORITHM, standardised
from flowrl.types import Columns

NAN = float("nan")


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**options))


def batch_of(adv, steps, group=None):
    """Rows of samples with the given numbers of steps; old log-probs 0: adv (B,), group (B,)."""
    adv, steps = torch.as_tensor(adv), torch.as_tensor(steps)
    group = torch.zeros(len(adv), dtype=torch.int64) if group is None else torch.as_tensor(group)
    columns = {"adv": adv, "sample": torch.arange(len(adv)) * 10, "unit": group, "prompt": group}
    flat = {name: value.repeat_interleave(steps) for name, value in columns.items()}
    zeros = torch.zeros(int(steps.sum()))
    return Columns({**flat, "log_prob": zeros, "weight": zeros + 1})


def evaluate(algorithm, batch, log_ratio):
    """(mean loss, its derivative by each log-ratio)."""
    leaf = torch.as_tensor(log_ratio).flatten().clone().requires_grad_()
    out = algorithm.loss({"log_prob": leaf}, batch)
    return float(out.loss.detach()) / len(batch), torch.autograd.grad(out.loss, leaf)[0]


def test_loss_by_hand():
    """rho: (.3 + .1) / 2 = .2, and 0: mean .1, std .1; A_hat = +-.1 / (.1 + .05) = +-2/3, A = +-1:
    (1/3)^2."""
    batch = batch_of([1.0, -1.0], [2, 2])
    assert evaluate(make(ratio_eps=0.05), batch, [0.3, 0.1, 0.2, -0.2])[0] == pytest.approx(
        1 / 9, rel=1e-5
    )
    assert evaluate(make(ratio_eps=0.05), batch, [0.2, -0.2, 0.3, 0.1])[0] == pytest.approx(
        (5 / 3) ** 2, rel=1e-5
    )


def test_rho_is_the_mean_over_a_samples_steps():
    """Three steps against one: both samples have rho .2, so nothing is predicted, and a third one
    stands out."""
    batch = batch_of([0.0, 0.0, 0.0], [3, 1, 2])
    assert evaluate(make(), batch, [0.5, 0.2, -0.1, 0.2, 0.1, 0.3])[0] < 1e-6
    one_off = evaluate(make(), batch, [0.5, 0.2, -0.1, 0.2, 0.1, 0.9])[0]
    # z-scores of (0, 0, 1): squares 1/2 1/2 2, counted by rows
    assert one_off == pytest.approx((3 * 0.5 + 0.5 + 2 * 2) / 6, rel=1e-2)


def test_prediction_is_invariant_to_scale_and_shift_of_each_group():
    """A_hat of a rho + b is that of rho for a > 0, up to eps; for a < 0 it changes sign."""
    rho, group = torch.randn(12), torch.arange(12) % 3
    a, b = torch.tensor([0.5, 3.0, 20.0])[group], torch.tensor([-4.0, 0.0, 7.0])[group]
    base = standardised(rho, group, 1e-7, True)
    assert torch.allclose(standardised(a * rho + b, group, 1e-7, True), base, atol=1e-4)
    assert torch.allclose(standardised(-a * rho + b, group, 1e-7, True), -base, atol=1e-4)
    for g in range(3):
        assert float(base[group == g].mean()) == pytest.approx(0, abs=1e-6)
        assert float(base[group == g].std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert not torch.allclose(
        standardised(a * rho + b, group, 1.0, True), standardised(rho, group, 1.0, True), atol=0.1
    )


def test_loss_is_zero_just_where_rho_rises_linearly_with_the_reward():
    """R in two groups, A their z-scores; rho = a R + b with a > 0 in each."""
    algorithm = make(ratio_eps=1e-7, eps=1e-7)
    reward, group = torch.tensor([1.0, 2, 6, 7, 0, 4, 5, -3]), torch.arange(8) // 4
    adv = algorithm.leaf_advantages(rewards_of(reward), group)
    batch = batch_of(adv, [1] * 8, group)
    rho = reward * torch.tensor([0.02, 0.3])[group] + torch.tensor([1.0, -2.0])[group]
    assert evaluate(algorithm, batch, rho)[0] < 1e-8
    assert evaluate(algorithm, batch, -rho)[0] == pytest.approx(4, rel=1e-4)
    for i in range(8):
        bent = rho.clone()
        bent[i] += 0.2
        assert evaluate(algorithm, batch, bent)[0] > 1e-4


def test_one_sided_groups_have_finite_gradients():
    """All rho of group 0 equal (their std has no derivative), those of group 1 not."""
    batch = batch_of([1.0, -1.0, 1.0, -1.0], [1] * 4, [0, 0, 1, 1])
    loss, grad = evaluate(make(ratio_eps=0.01), batch, [0.3, 0.3, 0.1, 0.2])
    assert bool(grad.isfinite().all())
    # d/d rho_i of sum (A - (rho - mean) / eps)^2 = -2 A_i / eps
    assert grad[:2].tolist() == pytest.approx([-200, 200], rel=1e-4)
    assert loss == pytest.approx((2 * 1 + 2 * (1 + 0.05 / 0.06) ** 2) / 4, rel=1e-3)


def test_fixed_scale_is_gvpo_and_prdps_pairs():
    """Its optimum is rho - mean = eps A; with d = rho / eps - A, the variance of d is (B - 1) / 2B
    of PRDP's mean over pairs, here 5/12."""
    algorithm, eps = make(scale="fixed", ratio_eps=0.05), 0.05
    adv = torch.randn(6)
    adv = adv - adv.mean()
    batch = batch_of(adv, [1] * 6)
    assert evaluate(algorithm, batch, eps * adv + 3)[0] < 1e-8
    assert evaluate(algorithm, batch, 2 * eps * adv)[0] == pytest.approx(
        float(adv.square().mean()), rel=1e-4
    )
    rho = torch.randn(6) * eps
    term, _ = pair_terms(rho / eps - adv, rho / eps - adv, torch.zeros(6))
    assert evaluate(algorithm, batch, rho)[0] == pytest.approx(
        float(term.mean()) * 5 / 12, rel=1e-4
    )


def test_the_first_gradient_is_along_advantage_times_score():
    """At the old policy rho = 0 for all: the loss is mean A^2 and its gradient -2 / (B eps) sum A
    grad rho, per group."""
    algorithm, policy = make(ratio_eps=0.01), ToyPolicy(0.1)
    _, rollout, _, rows = prepared(algorithm, policy)
    rows = Columns(
        {**rows.data, "log_prob": algorithm.score(policy, rollout, rows)["log_prob"].detach()}
    )
    loss, got = backward(algorithm, policy, rollout, rows)
    assert float(loss) == pytest.approx(float(rows.adv.square().sum()), rel=1e-5)
    policy.zero_grad()
    (-2 / 0.01 * (rows.adv * algorithm.score(policy, rollout, rows)["log_prob"]).sum()).backward()
    expected = gradient(policy.net)
    assert float((got - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    assert float(expected.abs().max()) > 100


def off_policy(algorithm, **options):
    policy, rollout, advantages, rows = prepared(algorithm, ToyPolicy(0.1), **options)
    torch.nn.init.normal_(policy.net[2].bias, std=0.3)
    return policy, rollout, advantages, rows


def test_groups_without_spread_contribute_nothing():
    """Group 0 as ever, group 1 all equal, group 2 with an invalid sample: 4 + 0 + 3 samples, 7
    steps each."""
    reward = torch.tensor([1.0, 2, 3, 2, 5, 5, 5, 5, NAN, 1, 2, 6])
    policy, rollout, _, rows = off_policy(make(), copies=4, reward=reward)
    assert len(rows) == 7 * (4 + 3) and set(rows.unit.tolist()) == {0, 2}
    assert {int(torch.nonzero(rollout.dst == d)) // 7 for d in rows.dst} == {0, 1, 2, 3, 9, 10, 11}
    assert float(rows.adv[7:14].abs().max()) == 0  # at the mean, and yet a regressor
    _, _, _, none = off_policy(make(), copies=4, reward=torch.ones(12))
    assert len(none) == 0


def test_kl_holds_the_scale_that_the_regression_leaves_free():
    """Along a ray where rho doubles, the regression does not change and the KL
    does."""
    algorithm = make(kl_weight=0.5, ratio_eps=1e-6)
    batch = batch_of([1.0, -1.0, 0.5, -0.5], [1] * 4)
    rho = torch.tensor([0.2, -0.3, 0.1, 0.1])
    one, two = (
        algorithm.loss({"log_prob": k * rho, "kl": k**2 * torch.ones(4)}, batch) for k in (1.0, 2.0)
    )
    errors = [float(out.metrics["policy/regression_error"]) for out in (one, two)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-4) and errors[0] > 0.1
    assert float(two.loss - one.loss) == pytest.approx(0.5 * 4 * 3, rel=1e-4)
    assert algorithm.needs == {"log_prob", "reference"} and make().needs == {"log_prob"}


def test_low_precision_errors_are_judged_by_the_ratio_that_counts_as_small():
    assert make(ratio_eps=3e-6).clip_size == 3e-6
