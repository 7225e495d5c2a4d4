"""CRD: centred implicit rewards and rewards, their weights, the reference's distance, learning."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from toy import Fixed, in_fp64, noised, prepared, slope

from flowrl.algorithms.crd import ALGORITHM
from flowrl.types import Columns


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**{"kl_weight": 0.0, "steps": 3, **options}))


def scored(algorithm, rho, implicit, kl=None):
    """Loss and its derivatives by the scores, of one group whose external rewards are rho (adv = 10
    rho - 5)."""
    adv = 10 * torch.as_tensor(rho, dtype=torch.float64) - 5
    rows = Columns(
        {"weight": torch.ones_like(adv), "adv": adv, "unit": torch.zeros_like(adv).long()}
    )
    scores = {"implicit": torch.as_tensor(implicit, dtype=torch.float64)} | (
        {} if kl is None else {"kl": torch.tensor(kl).double()}
    )
    scores = {name: value.clone().requires_grad_() for name, value in scores.items()}
    loss = algorithm.loss(scores, rows).loss
    return loss.item(), {
        name: grad.tolist()
        for name, grad in zip(scores, torch.autograd.grad(loss, scores.values()), strict=True)
    }


def test_a_group_by_hand():
    """rho (.8, .2), r_hat (.4, .2), beta 2: (2 (.1) - .3)^2 each, x 5 / 2; the mean of r_hat is
    detached: d = 2 (-.1) 2 5 / 2 = -1, 1."""
    loss, grad = scored(make(beta=2.0), [0.8, 0.2], [0.4, 0.2])
    assert loss == pytest.approx(2 * 0.01 * 2.5) and grad["implicit"] == pytest.approx([-1, 1])


def test_the_implicit_reward_is_how_much_the_error_fell(monkeypatch):
    """r_hat = m(v_old) / w_old - m(v) / w with w = mean|v - u| of each, no gradient through w;
    without weights when adaptive=false."""
    _, rollout, _, rows = prepared(make())
    rollout, rows = in_fp64(monkeypatch, rollout, rows)
    _, _, _, u = noised(rollout, rows)
    v, v_old = torch.randn_like(u).requires_grad_(), torch.randn_like(u)
    gap, gap_old = v.detach() - u, v_old - u
    for adaptive in (True, False):
        w, w_old = (g.abs().mean(1) if adaptive else torch.ones(len(u)) for g in (gap, gap_old))
        implicit = make(adaptive=adaptive).score(Fixed(v, v_old), rollout, rows)["implicit"]
        assert torch.allclose(implicit, gap_old.square().mean(1) / w_old - gap.square().mean(1) / w)
        (grad,) = torch.autograd.grad(implicit.sum(), v)
        assert torch.allclose(grad, -gap / w[:, None])
    assert make().score(Fixed(u.clone().requires_grad_()), rollout, rows)["implicit"].tolist() == [
        0
    ] * len(u)  # w has a floor


@pytest.mark.parametrize("beta", [0.1, 1.0, 7.0])
def test_at_the_old_policy_the_loss_is_the_spread_of_rewards_and_the_gradient_has_no_beta(
    beta, monkeypatch
):
    """r_hat = 0, L = (5 / beta) sum R_c^2, gradient -10 R_c grad r_hat with R_c = (A - mean of A) /
    10."""
    algorithm = make(beta=beta)
    _, rollout, _, rows = prepared(algorithm)
    rollout, rows = in_fp64(monkeypatch, rollout, rows)
    centred = rows.adv / 10  # advantages of a group add up to 0
    _, _, _, u = noised(rollout, rows)
    v = torch.randn_like(u).requires_grad_()
    scores = algorithm.score(Fixed(v), rollout, rows)
    assert scores["implicit"].abs().max() == 0
    assert algorithm.loss(scores, rows).loss.item() == pytest.approx(
        5 / beta * centred.square().sum().item(), rel=1e-6
    )
    (by_reward,) = torch.autograd.grad(scores["implicit"].sum(), v)
    assert torch.allclose(
        slope(algorithm, Fixed(v), rollout, rows), -10 * centred[:, None] * by_reward, atol=1e-6
    )


def test_optimality_is_the_advantage_between_minus_and_plus_adv_clip():
    """rho = A / 2c + 1/2: A = 1, -3 with c = 4: R_c = +-4 / 16, L = 2 (1 / 16) 4; beyond c it
    stays."""

    def loss(adv):
        adv = torch.tensor(adv)
        rows = Columns({"weight": torch.ones(2), "adv": adv, "unit": torch.zeros(2).long()})
        return make(adv_clip=4.0).loss({"implicit": torch.zeros(2)}, rows).loss.item()

    assert loss([1.0, -3.0]) == pytest.approx(0.5) and loss([9.0, -9.0]) == loss([4.0, -4.0])


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.3}, {"form": "bce"}, {"form": "bce", "temperature": 0.3}]
)
def test_adding_a_constant_to_rewards_or_implicit_rewards_changes_nothing(options):
    algorithm, rho, implicit = (
        make(**options),
        torch.tensor([0.1, 0.3, 0.55]),
        torch.tensor([0.7, -0.2, 0.1]),
    )
    loss, grad = scored(algorithm, rho, implicit)
    for other in (scored(algorithm, rho + 0.4, implicit), scored(algorithm, rho, implicit + 3.0)):
        assert other[0] == pytest.approx(loss, rel=1e-5)
        assert other[1]["implicit"] == pytest.approx(grad["implicit"], rel=1e-4)
    assert scored(algorithm, rho * 0.9, implicit)[0] != pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.2}])
def test_the_loss_is_zero_only_where_scaled_implicit_rewards_are_rewards_plus_a_constant(
    options,
):
    rho = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    best = scored(make(beta=4.0, **options), rho, rho / 4 + 0.3)
    assert best[0] < 1e-12 and best[1]["implicit"] == pytest.approx([0, 0, 0], abs=1e-6)
    for moved in ([0.01, 0, 0], [0, 0.01, 0], [0, 0, -0.01]):
        assert scored(make(beta=4.0, **options), rho, rho / 4 + torch.tensor(moved))[0] > 1e-5


def test_cross_entropy_is_least_at_the_same_place():
    """Sum of H(sigmoid(R_c)) there, and its slope (sigmoid(beta r_hat_c) - sigmoid(R_c)) 5
    elsewhere."""
    rho = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    target = torch.sigmoid(rho - 0.5)
    loss, grad = scored(make(beta=2.0, form="bce"), rho, rho / 2)
    assert loss == pytest.approx(
        2.5 * float(-(target * target.log() + (1 - target) * (1 - target).log()).sum())
    )
    assert grad["implicit"] == pytest.approx([0, 0, 0], abs=1e-6)
    grad = scored(make(beta=2.0, form="bce"), rho, torch.zeros(3))[1]["implicit"]
    assert grad == pytest.approx((5 * (0.5 - target)).tolist(), abs=1e-6)


def test_with_a_temperature_means_lean_to_the_best_and_to_the_worst():
    """rho (1, 0) at T = .5: weights e^2 : 1 and 1 : e^2, so R_c = (1 - p, -p) and (p, p - 1), p =
    e^2 / (1 + e^2), averaged."""
    p = math.exp(2) / (1 + math.exp(2))
    loss, grad = scored(make(temperature=0.5), [1.0, 0.0], [0.0, 0.0])
    assert loss == pytest.approx(5 * ((1 - p) ** 2 + p**2))
    assert grad["implicit"] == pytest.approx([-5, 5])  # -10 times the mean of both R_c, +-1/2
    assert scored(make(temperature=1e6), [1.0, 0.0], [0.3, 0.0])[0] == pytest.approx(
        scored(make(), [1.0, 0.0], [0.3, 0.0])[0], rel=1e-5
    )
    assert math.isfinite(scored(make(temperature=1e-3), [0.1, 0.0], [0.0, 0.0])[0])


def test_implicit_rewards_are_weighted_as_rewards_are():
    """r_hat (.5, 0), rho (1, 0), T = .5, beta 2: guesses equal targets for both weightings."""
    assert scored(make(beta=2.0, temperature=0.5), [1.0, 0.0], [0.5, 0.0])[0] == pytest.approx(
        0, abs=1e-12
    )


def test_better_samples_are_held_more():
    """Weight of the distance: kl_floor + rho (kl_weight - kl_floor); a floor above kl_weight is
    kl_weight."""
    rho, zero = [0.0, 0.5, 1.0], [0.0] * 3
    assert scored(make(kl_weight=0.1), rho, zero, [1.0] * 3)[1]["kl"] == pytest.approx(
        [1e-4, 0.05005, 0.1]
    )
    assert scored(make(kl_weight=0.1, kl_floor=0.1), rho, zero, [1.0] * 3)[1][
        "kl"
    ] == pytest.approx([0.1] * 3)
    assert scored(make(kl_weight=1e-5), rho, zero, [1.0] * 3)[1]["kl"] == pytest.approx([1e-5] * 3)


def test_every_member_of_a_group_is_compared_at_its_groups_levels_with_noise_of_its_own():
    """Rewards 0, 1, 2 (and others): the sample at the mean, whose advantage is 0, is a row too."""
    algorithm = make()
    _, _, advantages, rows = prepared(
        algorithm, reward=torch.tensor([0.0, 1, 2, 5, 5, 5]), copies=3, prompts=2
    )
    assert float(advantages.leaf[1]) == 0 and rows.prompt.tolist() == [0] * 9
    assert torch.unique(rows.unit).numel() == 3 and torch.unique(rows.noise_key).numel() == 9
    assert all(
        torch.unique(rows.sigma[rows.unit == unit]).numel() == 1 for unit in torch.unique(rows.unit)
    )


def test_the_reference_may_be_guided():
    """Guidance is distilled: the distance is to the guided reference; policy and old policy are
    without."""
    algorithm = make(kl_weight=0.1, reference_guidance=4.5)
    _, rollout, _, rows = prepared(algorithm)
    v = torch.zeros(len(rows), 2, requires_grad=True)
    policy = Fixed(v, v.detach() + 1, v.detach() + 2)
    scores = algorithm.score(policy, replace(rollout, guidance=2.0), rows)
    assert policy.guidances == [("default", "none"), ("old", "none"), ("reference", 4.5)]
    assert scores["kl"].tolist() == [4.0] * len(rows)


def test_the_old_policy_follows_slower_and_slower():
    """The port's "0-0.25-0.005-0.999": min(.25 + .005 n, .999)."""
    assert [make().follow(n, 0)["old"] for n in (0, 1, 75, 149, 150, 1000)] == pytest.approx(
        [0.25, 0.255, 0.625, 0.995, 0.999, 0.999]
    )


def test_binary_cross_entropy_agrees_with_torchs_of_probabilities():
    rho, implicit = torch.tensor([0.1, 0.9]).double(), torch.tensor([0.4, -0.1]).double()
    expected = (
        F.binary_cross_entropy(
            torch.sigmoid(implicit - 0.15), torch.sigmoid(rho - 0.5), reduction="sum"
        )
        * 5
    )
    assert scored(make(form="bce"), rho, implicit)[0] == pytest.approx(float(expected))
