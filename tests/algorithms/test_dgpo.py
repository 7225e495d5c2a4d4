"""DGPO: a group's weight, its gradient, shared noise, the clip, the guided reference, learning."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn import functional as F
from toy import GRID, SAMPLER, Fixed, ToyPolicy, in_fp64, noised, prepared, slope

from flowrl.algorithms.dgpo import ALGORITHM
from flowrl.samplers import sigmas
from flowrl.types import Columns

PRESET = yaml.safe_load((Path(__file__).parents[2] / "configs/algorithm/dgpo.yaml").read_text())


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**{"clip": None, **options}))


def scored(algorithm, adv, error, error_ref, members=None, unit=None, error_old=None):
    """Loss, metrics and d loss / d error of given scores, in fp64; by default one group."""
    adv, error, error_ref = (
        torch.tensor(value, dtype=torch.float64) for value in (adv, error, error_ref)
    )
    unit = torch.zeros(len(adv), dtype=torch.int64) if unit is None else torch.tensor(unit)
    rows = Columns(
        {
            "weight": torch.ones_like(adv),
            "adv": adv,
            "unit": unit,
            "members": torch.full_like(unit, members or len(adv)),
        }
    )
    old = {} if error_old is None else {"error_old": torch.tensor(error_old, dtype=torch.float64)}
    error.requires_grad_()
    out = algorithm.loss({"error": error, "error_ref": error_ref, **old}, rows)
    return out.loss.item(), out.metrics, torch.autograd.grad(out.loss, error)[0].tolist()


def test_a_group_by_hand():
    """beta 2, A = (1, -1), d - d_ref = (-.5, .3): W = sigmoid(2 (-.5 - .3) / 2) = sigmoid(-.8), L =
    W (.5 - 1.3), dL/dd = (W, -W)."""
    w = 1 / (1 + math.exp(0.8))
    loss, metrics, grad = scored(make(beta=2.0), [1, -1], [0.5, 1.3], [1.0, 1.0])
    assert loss == pytest.approx(w * (0.5 - 1.3)) and grad == pytest.approx([w, -w])
    assert metrics["policy/doubt"].item() == pytest.approx(2 * w)


def test_at_the_reference_every_weight_is_one_half():
    algorithm, policy = make(beta=5000.0), ToyPolicy(0.0)
    _, rollout, _, rows = prepared(algorithm, policy)
    scores = algorithm.score(policy, rollout, rows)
    out = algorithm.loss(scores, rows)
    assert torch.equal(scores["error"].detach(), scores["error_ref"])
    assert out.metrics["policy/doubt"].item() == len(rows) / 2
    assert out.loss.item() == pytest.approx(
        (0.5 * rows.adv * scores["error"]).sum().item(), rel=1e-5
    )


def test_without_sharpness_the_loss_is_half_the_advantage_times_the_error():
    """beta -> 0: L = 1/2 sum A d wherever the policy is."""
    algorithm, policy = make(beta=1e-9), ToyPolicy(1.0)
    _, rollout, _, rows = prepared(algorithm, policy)
    scores = algorithm.score(policy, rollout, rows)
    assert (scores["error"] - scores["error_ref"]).abs().max().item() > 0.1
    assert algorithm.loss(scores, rows).loss.item() == pytest.approx(
        (0.5 * rows.adv * scores["error"]).sum().item(), rel=1e-6
    )


def test_flipping_all_advantages_turns_the_weight_into_one_minus_it():
    algorithm, policy = make(beta=3.0), ToyPolicy(1.0)
    _, rollout, _, rows = prepared(algorithm, policy)
    scores = algorithm.score(policy, rollout, rows)
    doubts = []
    for sign in (1, -1):
        v = scores["error"].detach().requires_grad_()
        loss = algorithm.loss(
            {**scores, "error": v}, Columns({**rows.data, "adv": sign * rows.adv})
        ).loss
        doubts.append(torch.autograd.grad(loss, v)[0] / (sign * rows.adv))
    assert torch.allclose(doubts[0], 1 - doubts[1], atol=1e-5)
    assert float((doubts[0] - 0.5).abs().max()) > 0.1


def test_a_solved_group_weighs_nothing_and_a_wrong_one_all():
    for gap, weight in ((-1.0, 0.0), (1.0, 1.0)):  # winners' d - d_ref; losers' is minus that
        assert scored(make(), [1, -1], [1 + gap, 1 - gap], [1.0, 1.0])[2] == pytest.approx(
            [weight, -weight], abs=1e-20
        )


def test_the_gradient_is_that_of_minus_log_sigmoid_over_beta(monkeypatch):
    """-log sigmoid(-S) / beta per unit, S = beta sum A (d - d_ref) / K; the sum over units, times K
    since the loss sums over rows."""
    algorithm = make(beta=4.0, share="group")
    _, rollout, _, rows = prepared(algorithm)
    rollout, rows = in_fp64(monkeypatch, rollout, rows)
    _, _, _, u = noised(rollout, rows)
    v, v_ref = torch.randn_like(u).requires_grad_(), torch.randn_like(u)
    got = slope(algorithm, Fixed(v, v_ref=v_ref), rollout, rows)
    d, d_ref = ((value - u).square().mean(1) for value in (v, v_ref))
    total = torch.stack(
        [
            4.0 / 8 * (rows.adv * (d - d_ref))[rows.unit == unit].sum()
            for unit in torch.unique(rows.unit)
        ]
    )
    (expected,) = torch.autograd.grad(8 * -F.logsigmoid(-total).sum() / 4.0, v)
    assert len(total) == 12 and float(torch.sigmoid(total.detach()).std()) > 0.05
    assert float((got - expected).abs().max()) < 1e-9 < 0.1 < float(expected.abs().max())


def test_members_without_a_signal_count_in_the_mean_over_the_group():
    """K = 4, two of them with A = 0 and hence no rows: the sum is over 4."""
    w = 1 / (1 + math.exp(-2.0 * 0.8 / 4))
    assert scored(make(beta=2.0), [1, -1], [1.5, 0.7], [1.0, 1.0], members=4)[2] == pytest.approx(
        [w, -w]
    )


def test_each_unit_has_a_weight_of_its_own():
    """Two groups far apart: the first solved, the second wrong."""
    _, _, grad = scored(
        make(), [1, -1, 1, -1], [0.0, 2.0, 2.0, 0.0], [1.0] * 4, members=2, unit=[4, 4, 9, 9]
    )
    assert grad == pytest.approx([0, 0, 1, -1], abs=1e-20)


def test_a_group_has_one_noise_fresh_at_each_level_and_distinct_levels_for_all():
    algorithm = make()
    _, _, _, rows = prepared(algorithm)
    noise, sigma = rows.noise_key.view(3, 8, 4), rows.sigma.view(3, 8, 4)
    assert bool((noise == noise[:, :1]).all()) and torch.unique(noise).numel() == 12
    assert bool((sigma == sigma[:1, :1]).all()) and torch.unique(sigma).numel() == 4


def test_the_published_levels_are_four_distinct_ones_of_the_seven_noisiest_of_ten():
    options = {name: value for name, value in PRESET["algorithm"].items() if name != "name"}
    algorithm, grid = make(**options), sigmas.sd3(PRESET["sampler"]["steps"])
    plan = algorithm.plan(grid, sampler=SAMPLER, iteration=0, seed=0)
    sigma, number = algorithm.drawn_levels(plan, torch.arange(300))
    assert set(number.flatten().tolist()) == set(range(7)) and torch.equal(sigma, grid[number])
    assert all(len(set(row)) == 4 for row in number.tolist())


def test_the_old_policys_clip_stops_gradients_on_the_right_side_only():
    """clip .1, d_old - d = +.2 (ratio 1.22) and -.2 (ratio .82): better winners and worse losers
    are done, the other two go on."""
    algorithm = make(clip=0.1)
    up = [1.0, 1.0, -1.0, -1.0]
    _, metrics, grad = scored(algorithm, up, [1.0] * 4, [1.0] * 4, error_old=[1.2, 0.8, 1.2, 0.8])
    assert grad == pytest.approx([0, 0.5, -0.5, 0]) and metrics["policy/clip_fraction"] == 2
    assert scored(algorithm, up, [1.0] * 4, [1.0] * 4, error_old=[1.05] * 2 + [0.95] * 2)[
        2
    ] == pytest.approx([0.5, 0.5, -0.5, -0.5])
    value, _, _ = scored(
        algorithm, up, [2.0, 1, 1, 1], [2.0, 1, 1, 1], error_old=[2.2, 0.8, 1.2, 0.8]
    )
    assert value == pytest.approx(0.5)  # it stays: sum A d / 2


def test_the_clip_reads_the_old_policys_error_at_the_same_noise():
    policy = ToyPolicy(0.3)
    torch.nn.init.normal_(policy.old[2].bias)
    algorithm = make(clip=0.1)
    _, rollout, _, rows = prepared(algorithm, policy)
    _, x, _, u = noised(rollout, rows)
    scores = algorithm.score(policy, rollout, rows)
    for name, view in (("error", "default"), ("error_ref", "reference"), ("error_old", "old")):
        with policy.view(view):
            expected = (policy.velocity(x, rows.sigma, None, rows.prompt) - u).square().mean(1)
        assert torch.allclose(scores[name], expected, atol=1e-6)
        assert scores[name].requires_grad == (name == "error")


def test_the_references_guidance_is_its_own():
    """The loss and the old policy are without guidance, whatever the rollout used."""
    algorithm = make(reference_guidance=4.5, clip=0.1)
    _, rollout, _, rows = prepared(algorithm)
    v = torch.zeros(len(rows), 2, requires_grad=True)
    policy = Fixed(v, v.detach() + 1)
    algorithm.score(policy, replace(rollout, guidance=2.0), rows)
    assert policy.guidances == [("default", "none"), ("reference", 4.5), ("old", "none")]
    ema = make(reference_guidance=4.5, reference="ema")
    guided = Fixed(v, v)  # equal weights, but guidance makes another velocity
    ema.score(guided, rollout, rows)
    assert guided.guidances == [("default", "none"), ("anchor", 4.5)]


def test_the_old_policy_follows_slowly():
    assert [make(clip=1e-3).follow(n, 0)["old"] for n in (0, 1, 300, 1000)] == pytest.approx(
        [0, 0.001, 0.3, 0.3]
    )
    assert make().follow(9, 0) == {}
    assert make(old_slope=0.01, old_decay=0.5, clip=1.0).follow(20, 0) == {"old": 0.2}
    assert make().most_rows(make().plan(GRID, sampler=SAMPLER, iteration=0, seed=0), 8) == 8 * 4
