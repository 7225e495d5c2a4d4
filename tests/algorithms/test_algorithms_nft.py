"""DiffusionNFT: the identities of its loss, its noise levels and decays, and learning."""

from dataclasses import replace

import pytest
import torch
from toy import (
    SAMPLER,
    Fixed,
    ToyPolicy,
    advantages_of,
    backward,
    noised,
    prepared,
    rewards_of,
    roll_out,
    slope,
    to_the_right,
)

from flowrl.algorithms.nft import ALGORITHM, x0_error
from flowrl.samplers import sigmas
from flowrl.types import Columns


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**options))


def test_x0_error_is_the_velocity_error_times_sigma_squared():
    """x0_hat - x0 = sigma (u - v)."""
    x0, eps, v, s = (
        torch.randn(4, 3),
        torch.randn(4, 3),
        torch.randn(4, 3),
        torch.tensor([[0.1], [0.4], [0.7], [1.0]]),
    )
    x = (1 - s) * x0 + s * eps
    gap = s * (eps - x0 - v)
    assert torch.allclose((x - s * v) - x0, gap, atol=1e-6)
    assert torch.allclose(
        x0_error(x - s * v, x0), gap.square().mean(1) / gap.abs().mean(1), rtol=1e-4
    )


def test_the_weight_of_the_error_has_a_floor():
    """w = max(mean|x0_hat - x0|, 1e-5): above it the error is mean square over mean size, below it
    the square over 1e-5."""
    x0 = torch.zeros(3, 4)
    size = torch.tensor([1e-2, 1e-5, 1e-7])
    assert x0_error(x0 + size[:, None], x0).tolist() == pytest.approx(
        [1e-2, 1e-5, 1e-14 / 1e-5], rel=1e-5
    )
    assert x0_error(x0, x0).tolist() == [0, 0, 0]  # not 0 / 0


def test_at_the_old_policy_the_value_does_not_depend_on_the_reward_but_the_gradient_does():
    algorithm = make(kl_weight=0.0)
    policy, rollout, _, rows = prepared(algorithm)
    policy.update("old", 0.0)
    flipped = Columns({**rows.data, "adv": -rows.adv})
    (a, up), (b, down) = (
        backward(algorithm, policy, rollout, rows),
        backward(algorithm, policy, rollout, flipped),
    )
    assert float(a) == pytest.approx(float(b), rel=1e-5)
    assert torch.allclose(up, -down, rtol=1e-3, atol=1e-3 * float(up.abs().max()))


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_optimum_moves_from_the_old_velocity_by_one_over_beta(sign, beta):
    """(b) r = 1: zero loss at v = v_old + (u - v_old) / beta, plain flow matching only for beta =
    1. (c) r = 0: the other way.

    (d) half the beta, twice the displacement."""
    algorithm = make(beta=beta, kl_weight=0.0)
    _, rollout, _, rows = prepared(algorithm)
    rows = Columns({**rows.data, "adv": torch.full_like(rows.adv, 5.0 * sign)})  # r = 1 or 0
    _, _, _, u = noised(rollout, rows)
    v_old = torch.randn_like(u)
    best = v_old + sign * (u - v_old) / beta
    policy = Fixed(best, v_old)
    assert float(algorithm.loss(algorithm.score(policy, rollout, rows), rows).loss) < 1e-3
    s = rows.sigma[:, None].float()
    for size in (
        0.1,
        1.0,
        10.0,
        # the only optimum: best + d costs 5 s mean(d^2) / mean|d| a row, whatever d, beta and the
        # old
        # policy are
    ):
        for d in (
            torch.full_like(u, size),
            -size * torch.rand_like(u) - 0.1 * size,
            size * torch.randn_like(u),
            size * (v_old - best),
        ):
            cost = float(
                algorithm.loss(algorithm.score(Fixed(best + d, v_old), rollout, rows), rows).loss
            )
            assert cost == pytest.approx(
                float(
                    (5 * s * d.square().mean(1, keepdim=True) / d.abs().mean(1, keepdim=True)).sum()
                ),
                rel=1e-3,
            )


def test_with_r_one_and_beta_one_the_gradient_is_flow_matchings_rescaled():
    """Per row 5 sigma^2 grad mean((v - u)^2) / w."""
    algorithm = make(kl_weight=0.0)
    _, rollout, _, rows = prepared(algorithm)
    rows = Columns({**rows.data, "adv": torch.full_like(rows.adv, 5.0)})
    x0, x, s, u = noised(rollout, rows)
    v, v_old = torch.randn_like(u).requires_grad_(), torch.randn_like(u)
    nft = slope(algorithm, Fixed(v, v_old), rollout, rows)
    (sft,) = torch.autograd.grad((v - u).square().mean(1).sum(), v)
    w = (s * (u - v)).abs().mean(1, keepdim=True).detach()
    assert torch.allclose(nft, 5 * s**2 * sft / w, rtol=1e-3, atol=1e-5)


def test_optimality_one_half_gives_no_gradient_at_the_old_policy_and_pulls_back_elsewhere():
    """(f) with the weights w equal on both sides: at v = v_old the two branches cancel."""
    algorithm = make(kl_weight=0.0)
    _, rollout, _, rows = prepared(algorithm)
    rows = Columns({**rows.data, "adv": torch.zeros_like(rows.adv)})
    _, _, _, u = noised(rollout, rows)
    v_old = torch.randn_like(u)

    def pull(v):
        return slope(algorithm, Fixed(v.clone().requires_grad_(), v_old), rollout, rows)

    assert float(pull(v_old).abs().max()) < 1e-4
    away = v_old + 3.0 * (u - v_old)
    assert float((pull(away) * (away - v_old)).sum()) > 0


def test_an_unsure_group_gives_no_update_at_the_old_policy():
    """(f) in weights: rows with A = 0 kept by hand give a zero gradient when theta = old."""
    algorithm = make(kl_weight=0.0)
    policy, rollout, _, rows = prepared(algorithm)
    policy.update("old", 0.0)
    _, got = backward(
        algorithm, policy, rollout, Columns({**rows.data, "adv": torch.zeros_like(rows.adv)})
    )
    assert float(got.abs().max()) < 1e-4


def test_decay_zero_copies_the_policy_bit_for_bit():
    """(e)"""
    algorithm, policy = make(decay=0), ToyPolicy(0.3)
    torch.nn.init.normal_(policy.net[0].weight)
    policy.update("old", algorithm.follow(1, 0)["old"])
    assert all(
        torch.equal(a, b)
        for a, b in zip(policy.old.parameters(), policy.net.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("decay", "table"),
    [
        (0, [0, 0, 0, 0, 0, 0]),
        (1, [0, 0.001, 0.075, 0.076, 0.5, 0.5]),
        (2, [0, 0, 0, 0.0075, 0.999, 0.999]),
    ],
)
def test_decay_tables(decay, table):
    assert [
        make(decay=decay).follow(n, 0)["old"] for n in (0, 1, 75, 76, 500, 1000)
    ] == pytest.approx(table)


def test_each_sample_trains_its_own_random_noise_levels_one_dropped():
    """T = 8: int(8 x .99) = 7 of 8 levels, a random one missing, never twice the same."""
    algorithm = make()
    _, rollout, _, rows = prepared(algorithm, copies=200)
    level = rows.sigma.view(-1, 7)
    grid = sigmas.shifted(8, 3)[:-1]
    missing = [(~torch.isin(grid, row)).nonzero().item() for row in level]
    assert len(missing) == 600 and all(len(set(row.tolist())) == 7 for row in level)
    assert all(abs(missing.count(i) - 75) < 35 for i in range(8))
    assert torch.unique(rows.noise_key).numel() == len(rows)
    few = make(steps=2)
    assert (
        len(
            few.columns(
                rollout, advantages_of(few, rollout, to_the_right(rollout)), seed=0, iteration=0
            )
        )
        == 1200
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", [-1.0, 0.0, 1.0]),
        ("positive_only", [0.0, 0.0, 1.0]),
        ("negative_only", [-1.0, 0.0, 0.0]),
        ("one_only", [0.0, 0.0, 1.0]),
        ("binary", [-1.0, 0.0, 1.0]),
    ],
)
def test_advantage_modes(mode, expected):
    rollout = roll_out(ToyPolicy(), make(), copies=3, prompts=1)
    adv = advantages_of(make(adv_mode=mode, std=None), rollout, rewards_of([1.0, 2.0, 3.0])).leaf
    assert adv.tolist() == expected
    big = advantages_of(make(adv_mode=mode, std=None), rollout, rewards_of([1.0, 2.0, 33.0])).leaf
    assert float(big[2]) == {"one_only": 1, "binary": 1, "negative_only": 0}.get(mode, 5)


def test_the_rollout_is_the_old_policys_ode_without_guidance():
    algorithm = make()
    planned = algorithm.plan(sigmas.linear(6), sampler=SAMPLER, iteration=0, seed=0)
    assert planned.solver == "dpm2" and not bool(planned.trained.any())
    assert (algorithm.rollout_view, algorithm.guidance) == ("old", "none")
    assert algorithm.needs == {
        "leaves",
        "old",
        "reference",
    }
    assert make(kl_weight=0.0).needs == {"leaves", "old"}
    policy, rollout, _, rows = prepared(algorithm)
    policy.guidances.clear()
    algorithm.score(policy, replace(rollout, guidance=4.5), rows)
    # trained and reference; old equals trained here, and one forward serves both
    assert policy.guidances == ["none"] * 2
    with torch.no_grad():
        policy.net[2].bias += 0.1
    policy.guidances.clear()
    algorithm.score(policy, replace(rollout, guidance=4.5), rows)
    assert policy.guidances == ["none"] * 3
