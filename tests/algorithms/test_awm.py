"""AWM: the ratio, its clip and weightings, noise levels, the averaged policy, learning."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from toy import SAMPLER, Fixed, ToyPolicy, in_fp64, noised, prepared, slope

from flowrl.algorithms.awm import ALGORITHM
from flowrl.samplers import sigmas
from flowrl.types import Columns

PRESET = yaml.safe_load((Path(__file__).parents[2] / "configs/algorithm/awm.yaml").read_text())


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**{"ema_weight": 0.0, "steps": 3, **options}))


def scored(algorithm, fit, fit_old, adv, unit=None):
    """Loss, metrics and d loss / d fit of given scores."""
    fit = torch.tensor(fit, dtype=torch.float64, requires_grad=True)
    adv = torch.tensor(adv, dtype=torch.float64)
    unit = torch.arange(len(adv)) if unit is None else torch.tensor(unit)
    rows = Columns({"weight": torch.ones_like(adv), "adv": adv, "unit": unit})
    out = algorithm.loss({"fit": fit, "fit_old": torch.tensor(fit_old, dtype=torch.float64)}, rows)
    return out.loss.item(), out.metrics, torch.autograd.grad(out.loss, fit)[0].tolist()


@pytest.mark.parametrize(
    "options",
    [{}, {"off_policy": True}, {"ratio": "sample"}, {"off_policy": True, "ratio": "sample"}],
)
def test_on_the_first_pass_every_ratio_is_one_and_nothing_is_clipped(options):
    """Off-policy too, once the old policy equals the current one, here compared by a forward of its
    own."""
    algorithm, policy = make(**options, clip=(1e-6, 1e-6)), ToyPolicy(0.3)
    policy.update("old", 0.0)
    policy.same = lambda a, b: False
    _, rollout, _, rows = prepared(algorithm, policy)
    out = algorithm.loss(algorithm.score(policy, rollout, rows), rows)
    assert out.metrics["policy/clip_fraction"] == 0 and out.metrics["policy/log_ratio"] == 0
    assert out.loss.item() == pytest.approx(float(-(rows.adv / 5).sum()), abs=1e-5)


def test_on_policy_the_ratio_stays_one_off_policy_it_is_that_of_the_fits():
    """The old policy differs: exp(l - l_old) with l = -s (m^p - tiny^p) / p counts only where it
    sampled."""
    policy = ToyPolicy(0.3)
    torch.nn.init.normal_(policy.old[2].bias)
    on, off = make(), make(off_policy=True, clip=(0.9, 9.0))
    _, rollout, _, rows = prepared(off, policy)
    _, x, s, u = noised(rollout, rows)

    def fit(view):
        with policy.view(view):
            m = (policy.velocity(x, rows.sigma, None, rows.prompt) - u).square().mean(1).double()
        return -s.flatten() * ((m + 1e-10) ** 0.25 - 1e-10**0.25) / 0.25

    log_ratio = (fit("default") - fit("old")).abs().sum().item()
    assert on.loss(on.score(policy, rollout, rows), rows).metrics["policy/log_ratio"] == 0
    assert off.loss(off.score(policy, rollout, rows), rows).metrics[
        "policy/log_ratio"
    ].item() == pytest.approx(log_ratio, rel=1e-4)
    assert log_ratio > 1


def test_the_ratio_is_clipped_on_the_right_side_only():
    """A = 5 and -5 (A / c = 1, -1) at ratios 1.5 and 0.5 with clip 0.2: -1.2 and 0.8 without
    gradient, -0.5 and 1.5 with A's own."""
    up, down = math.log(1.5), math.log(0.5)
    loss, metrics, grad = scored(
        make(clip=(0.2, 0.2)), [up, down, up, down], [0.0] * 4, [5.0, -5.0, -5.0, 5.0]
    )
    assert loss == pytest.approx(-1.2 + 0.8 + 1.5 - 0.5)
    assert grad == pytest.approx([0, 0, 1.5, -0.5])
    clipped = [
        scored(make(clip=(0.2, 0.2)), [r], [0.0], [a])[1]["policy/clip_fraction"].item()
        for r, a in ((up, 5.0), (down, -5.0))
    ]
    assert metrics["policy/clip_fraction"] == 2 == sum(clipped)
    # low and high are two settings
    assert scored(make(clip=(0.2, 0.6)), [up], [0.0], [5.0])[2] == pytest.approx([-1.5])
    # the default: 0 .. 2
    assert scored(make(), [math.log(1.9), math.log(2.1)], [0.0] * 2, [5.0] * 2)[2] == pytest.approx(
        [-1.9, 0]
    )


def test_one_ratio_per_sample_is_of_the_mean_over_its_levels():
    """Sample 0 at levels with log-ratios .3 and .1: ratio e^.2, twice, and each row has half of the
    gradient of both terms."""
    loss, _, grad = scored(
        make(ratio="sample"), [0.3, -1.0, 0.1], [0.0] * 3, [5.0, 5.0, 5.0], unit=[0, 1, 0]
    )
    assert loss == pytest.approx(-2 * math.exp(0.2) - math.exp(-1))
    assert grad == pytest.approx([-math.exp(0.2), -math.exp(-1), -math.exp(0.2)])
    assert make(ratio="sample").couples == "sample" and make().couples == "row"
    _, rollout, _, rows = prepared(make(ratio="sample"))
    assert torch.equal(rows.unit, rows.state) and torch.unique(rows.unit).numel() == 24


def test_weightings_are_the_formulas():
    """m = .04, s = .5: m, .02, .01, .5 (sqrt(m + tiny) - 1e-5), .5 / .25 ((m + tiny)^.25 -
    tiny^.25)."""
    m, s = torch.tensor([0.04]), torch.tensor([0.5])
    expected = {
        "uniform": 0.04,
        "t": 0.02,
        "t2": 0.01,
        "huber": 0.5 * (0.2 - 1e-5),
        "ghuber": 2 * (0.04**0.25 - 1e-10**0.25),
    }
    for weighting, value in expected.items():
        assert float(make(weighting=weighting).weighted(m, s)) == pytest.approx(value, rel=1e-6)
        assert float(make(weighting=weighting).weighted(0 * m, s)) == 0  # no error, no loss


def test_general_huber_holds_the_others():
    """p = 1: "t" exactly; p = 1/2: twice "huber"; p towards 0: s log m but for a constant."""
    m, s = torch.rand(50), torch.rand(50)
    assert torch.allclose(
        make(power=1.0).weighted(m, s), make(weighting="t").weighted(m, s), atol=1e-8
    )
    assert torch.allclose(
        make(power=0.5).weighted(m, s), 2 * make(weighting="huber").weighted(m, s), atol=1e-7
    )
    small = make(power=1e-4).weighted(torch.stack([m, 2 * m]), s)
    assert torch.allclose(small[1] - small[0], s * math.log(2), atol=2e-3)


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0])
def test_the_gradient_is_the_advantage_times_sigma_times_a_power_of_the_error(power, monkeypatch):
    """A' s (m + 1e-10)^(p - 1) grad m, A' = A / c, and 0 where A is 0."""
    algorithm = make(power=power)
    _, rollout, _, rows = prepared(algorithm)
    rollout, rows = in_fp64(monkeypatch, rollout, rows)
    rows = Columns(
        {**rows.data, "adv": torch.where(torch.arange(len(rows)) % 3 == 0, 0.0, rows.adv)}
    )
    _, _, s, u = noised(rollout, rows)
    v = torch.randn_like(u).requires_grad_()
    gap = v.detach() - u
    expected = (
        (rows.adv / 5)[:, None]
        * s
        * (gap.square().mean(1, keepdim=True) + 1e-10) ** (power - 1)
        * gap
    )
    got = slope(algorithm, Fixed(v), rollout, rows)
    assert float((got - expected).abs().max()) < 1e-9 < 0.1 < float(expected.abs().max())
    assert float(got[rows.adv == 0].abs().max()) == 0


def test_an_advantage_that_a_group_shares_is_none():
    """Rewards that differ between prompts only: after centring A = 0, and no row is trained."""
    assert len(prepared(make(std="global"), reward=torch.arange(3.0).repeat_interleave(8))[3]) == 0


def test_the_published_levels_are_one_of_each_pair_between_pure_noise_and_the_last_two():
    """discrete_wo_init: 14 steps, 6 draws from {1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, the
    same for everyone."""
    options = {name: value for name, value in PRESET["algorithm"].items() if name != "name"}
    algorithm, grid = ALGORITHM(ALGORITHM.Config(**options)), sigmas.sd3(PRESET["sampler"]["steps"])
    plan = algorithm.plan(grid, sampler=SAMPLER, iteration=0, seed=0)
    sigma, _ = algorithm.drawn_levels(plan, torch.arange(400))
    steps = (sigma[..., None] == grid).nonzero()[:, 2].view(400, 6)
    bins = [[1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert [sorted(set(column.tolist())) for column in steps.T] == bins
    assert all(
        abs((column == column.min()).double().mean() - 1 / len(b)) < 0.1
        for column, b in zip(steps.T, bins, strict=True)
    )
    assert algorithm.config.share == "all" and algorithm.most_rows(plan, 24) == 24 * 6


@pytest.mark.parametrize("off_policy", [False, True])
def test_the_averaged_policy_holds_and_follows(off_policy):
    """ema_weight times mean((v - v_old)^2); its decay is .001 a step, at most .3."""
    policy = ToyPolicy(0.3)
    torch.nn.init.normal_(policy.old[2].bias)
    algorithm = make(ema_weight=0.5, off_policy=off_policy)
    _, rollout, _, rows = prepared(algorithm, policy)
    scores = algorithm.score(policy, rollout, rows)
    _, x, _, _ = noised(rollout, rows)
    with policy.view("old"):
        old = policy.velocity(x, rows.sigma, None, rows.prompt)
    distance = (policy.velocity(x, rows.sigma, None, rows.prompt) - old).square().mean(1)
    assert torch.allclose(scores["old"], distance, atol=1e-6)
    assert float(distance.mean().detach()) > 0.1
    without = algorithm.loss({**scores, "old": 0 * scores["old"]}, rows).loss
    assert (algorithm.loss(scores, rows).loss - without).item() == pytest.approx(
        0.5 * distance.sum().item(), rel=1e-3
    )
    assert [algorithm.follow(n, 0)["old"] for n in (0, 1, 75, 300, 1000)] == pytest.approx(
        [0, 0.001, 0.075, 0.3, 0.3]
    )
    assert make().follow(5, 0) == {}
