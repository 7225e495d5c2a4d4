"""Online DPO: the loss of a pair, its gradient, who is paired and at which noise, learning."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from toy import GRID, SAMPLER, Fixed, ToyPolicy, backward, in_fp64, noised, prepared, slope

from flowrl.algorithms.dpo import ALGORITHM
from flowrl.types import Advantages, Columns


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**{"steps": 2, **options}))


def swapped(rows):
    return Columns({**rows.data, "adv": -rows.adv})


def test_at_the_reference_the_loss_is_log_two_and_nothing_is_preferred():
    algorithm, policy = make(beta=5000.0), ToyPolicy(0.0)
    _, rollout, _, rows = prepared(algorithm, policy)
    out = algorithm.loss(algorithm.score(policy, rollout, rows), rows)
    assert out.loss.item() / len(rows) == pytest.approx(math.log(2))
    assert out.metrics["policy/margin"] == 0


def test_a_pair_by_hand():
    """e (.5, 1.3), e_ref (1, 1), beta 2: -log sigmoid(-(-.5 - .3)) = log(1 + e^-.8), in both
    rows."""
    rows = Columns(
        {"weight": torch.ones(2), "adv": torch.tensor([1.0, -1.0]), "unit": torch.zeros(2).long()}
    )
    out = make(beta=2.0).loss({"error": torch.tensor([0.5, 1.3]), "error_ref": torch.ones(2)}, rows)
    assert out.loss.item() == pytest.approx(2 * math.log(1 + math.exp(-0.8)))
    assert out.metrics["policy/accuracy"] == 2
    assert out.metrics["policy/margin"].item() == pytest.approx(2 * 0.8)


def test_the_loss_is_the_formula_wherever_the_policy_is(monkeypatch):
    """-log sigmoid(-beta/2 [(e_w - e_w_ref) - (e_l - e_l_ref)]), mean over pairs = mean over
    rows."""
    algorithm = make(beta=3.0)
    _, rollout, _, rows = prepared(algorithm)
    rollout, rows = in_fp64(monkeypatch, rollout, rows)
    _, _, _, u = noised(rollout, rows)
    v, v_ref = torch.randn_like(u).requires_grad_(), torch.randn_like(u)
    e, e_ref = ((value - u).square().mean(1) for value in (v, v_ref))
    win, lose = (rows.adv > 0).nonzero().flatten(), (rows.adv < 0).nonzero().flatten()
    assert torch.equal(rows.unit[win], rows.unit[lose]) and len(win) == 6
    pairs = -F.logsigmoid(-1.5 * ((e[win] - e_ref[win]) - (e[lose] - e_ref[lose])))
    policy = Fixed(v, v_ref=v_ref)
    assert algorithm.loss(
        algorithm.score(policy, rollout, rows), rows
    ).loss.item() / 12 == pytest.approx(pairs.mean().item(), rel=1e-12)
    (expected,) = torch.autograd.grad(pairs.mean(), v)
    assert torch.allclose(slope(algorithm, policy, rollout, rows) / 12, expected, atol=1e-12)


def test_at_the_reference_the_gradient_is_a_quarter_of_beta_times_the_difference_of_errors(
    monkeypatch,
):
    """(beta / 4) (grad e_w - grad e_l) a pair; swapping winner and loser flips its sign."""
    algorithm = make(beta=8.0)
    _, rollout, _, rows = prepared(algorithm)
    rollout, rows = in_fp64(monkeypatch, rollout, rows)
    _, _, _, u = noised(rollout, rows)
    v = torch.randn_like(u).requires_grad_()
    got = slope(algorithm, Fixed(v), rollout, rows) / 2  # each row of a pair carries its term
    assert torch.allclose(got, 2.0 * rows.adv[:, None] * (v.detach() - u), atol=1e-12)
    assert torch.allclose(slope(algorithm, Fixed(v), rollout, swapped(rows)) / 2, -got, atol=1e-12)


def test_swapping_flips_the_margin_and_turns_the_gradients_weight_into_one_minus_it():
    algorithm, policy = make(beta=3.0), ToyPolicy(1.0)
    _, rollout, _, rows = prepared(algorithm, policy)
    scores = algorithm.score(policy, rollout, rows)
    weights = []
    for pair in (rows, swapped(rows)):
        e = scores["error"].detach().requires_grad_()
        out = algorithm.loss({**scores, "error": e}, pair)
        weights.append(torch.autograd.grad(out.loss, e)[0] / (3.0 * pair.adv))
    assert torch.allclose(weights[0], 1 - weights[1], atol=1e-5) and weights[0].std() > 0.01


def test_identical_images_have_no_gradient_but_that_of_kl():
    """Winner and loser equal: same noise, same level, same prompt, so that everything cancels."""
    algorithm = make(beta=50.0)
    policy, rollout, _, rows = prepared(algorithm, ToyPolicy(0.5))
    same = Columns(
        {
            **rows.data,
            "state": (
                rows.state[(rows.adv > 0).nonzero().flatten()]
                .view(3, 1, 2)
                .expand(3, 2, 2)
                .flatten()
            ),
        }
    )
    loss, gradient = backward(algorithm, policy, rollout, same)
    assert loss.item() / len(rows) == pytest.approx(math.log(2)) and gradient.abs().max() < 1e-4
    assert backward(algorithm, policy, rollout, rows)[1].abs().max() > 0.1
    assert backward(make(beta=50.0, kl_weight=1.0), policy, rollout, same)[1].abs().max() > 0.1


@pytest.mark.parametrize("levels", ["schedule", "stratified", "logit_normal", "uniform"])
def test_a_pair_has_one_noise_and_one_level_other_pairs_have_others(levels):
    _, _, _, rows = prepared(make(levels=levels))
    # pairs, winner and loser, draws
    noise, sigma = (
        rows.noise_key.view(3, 2, 2),
        rows.sigma.view(3, 2, 2),
    )
    assert torch.equal(noise[:, 0], noise[:, 1])
    assert torch.equal(sigma[:, 0], sigma[:, 1])
    assert torch.unique(noise).numel() == 6
    assert torch.equal(rows.unit.view(3, 2, 2)[:, 0], rows.unit.view(3, 2, 2)[:, 1])
    assert torch.unique(rows.unit).numel() == 6
    if levels != "schedule":
        assert torch.unique(sigma).numel() > 2


def test_the_best_is_paired_with_the_worst_of_each_group_and_ties_go_to_the_first():
    reward = torch.tensor([1.0, 3, 2, 0, 5, 5, 5, 5, 0, 7, 0, 7])
    _, rollout, _, rows = prepared(make(), reward=reward, copies=4)
    samples = [rollout.leaf.tolist().index(state) for state in rows.state.tolist()]
    assert samples == [1, 1, 3, 3, 9, 9, 8, 8] and rows.adv.tolist() == [1, 1, -1, -1] * 2


def test_a_tie_or_a_group_with_one_sample_left_gives_no_pair():
    """Equal rewards; all but one failed; all failed."""
    nan = torch.nan
    for reward in ([4.0] * 4, [nan, nan, 2.0, nan], [nan] * 4):
        assert len(prepared(make(), reward=torch.tensor(reward), copies=4, prompts=1)[3]) == 0
    assert (
        len(prepared(make(), reward=torch.tensor([nan, 1.0, 2.0, nan]), copies=4, prompts=1)[3])
        == 4
    )
    _, rollout, _, _ = prepared(make(), copies=2, prompts=1)
    for adv in ([2.0, 2.0], [nan, -1.0]):  # what is left of a larger group
        assert (
            len(make().columns(rollout, Advantages(leaf=torch.tensor(adv)), seed=0, iteration=0))
            == 0
        )


def test_the_loss_and_the_reference_are_without_guidance():
    algorithm = make()
    _, rollout, _, rows = prepared(algorithm)
    policy = Fixed(torch.zeros(len(rows), 2, requires_grad=True))
    scores = algorithm.score(policy, replace(rollout, guidance=4.5), rows)
    assert policy.guidances == [("default", "none"), ("reference", "none")]
    assert scores["error"].requires_grad and not scores["error_ref"].requires_grad


def test_the_reference_may_become_the_policy_every_forty_iterations():
    """Flow-GRPO's "online" setting: at the moment of a reset the loss is log 2 again."""
    algorithm, policy = make(reference="reset"), ToyPolicy(0.5)
    assert [i for i in range(120) if algorithm.follow(i + 1, i) == {"anchor": 0.0}] == [39, 79, 119]
    torch.nn.init.normal_(policy.net[2].bias)
    _, rollout, _, rows = prepared(algorithm, policy)

    def loss():
        return algorithm.loss(algorithm.score(policy, rollout, rows), rows).loss.item() / len(rows)

    before = loss()
    policy.update("anchor", algorithm.follow(40, 39)["anchor"])
    assert loss() == pytest.approx(math.log(2)) != pytest.approx(before, abs=0.1)


def test_no_more_rows_are_announced_than_a_pair_can_give():
    plan = make().plan(GRID, sampler=SAMPLER, iteration=0, seed=0)
    assert make(steps=3).most_rows(plan, 24) == 6 and make(steps=None).most_rows(plan, 24) == 2


def of_margin(h, label=None, **options):
    """The loss of one pair whose errors give the margin h, and its derivative in h."""
    algorithm = ALGORITHM(ALGORITHM.Config(**options))
    error = torch.tensor([0.5, 0.5 + h], dtype=torch.float64, requires_grad=True)
    batch = Columns(
        {"adv": torch.tensor([1.0, -1.0]), "weight": torch.ones(2), "unit": torch.zeros(2).long()}
    )
    if label is not None:
        batch = Columns({**batch.data, "label": torch.full((2,), label)})
    scores = {"error": error, "error_ref": torch.full((2,), 0.5, dtype=torch.float64)}
    loss = algorithm.loss(scores, batch).loss / 2  # each row carries its pair's term
    return loss.item(), torch.autograd.grad(loss, error)[0][1].item()


def test_losses_of_a_margin_by_hand():
    """h = .3: beta 5 gives -log sigmoid(.75) = .386871, whose slope is -2.5 sigmoid(-.75); ipo
    (.3 - .5)^2 = .04; hinge 1 - .75, and 0 beyond the margin."""
    loss, slope = of_margin(0.3, beta=5)
    assert (loss, slope) == (
        pytest.approx(0.386871, abs=1e-6),
        pytest.approx(-2.5 * 0.320821, abs=1e-5),
    )
    assert of_margin(0.3, kind="ipo") == pytest.approx((0.04, 2 * (0.3 - 0.5)))
    assert of_margin(0.5, kind="ipo") == pytest.approx((0, 0))  # at 1 / (2 tau)
    assert of_margin(0.3, kind="hinge", beta=5) == pytest.approx((0.25, -2.5))
    assert of_margin(0.5, kind="hinge", beta=5) == (0, 0)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_a_share_of_wrong_labels_mixes_both_signs(kind):
    options = {"kind": kind, "beta": 5}
    mixed = of_margin(0.1, wrong=0.25, **options)
    forth, back = of_margin(0.1, **options), of_margin(-0.1, **options)
    assert mixed[0] == pytest.approx(0.75 * forth[0] + 0.25 * back[0])
    assert mixed[1] == pytest.approx(0.75 * forth[1] - 0.25 * back[1])
    assert of_margin(0.0, wrong=0.5, **options)[1] == pytest.approx(0)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_a_soft_label_mixes_both_orders_of_the_pair(kind):
    """p L(h) + (1 - p) L(-h); a tie pulls the margin to 0, and p = 1 is the plain loss."""
    options = {"kind": kind, "beta": 5}
    forth, back = of_margin(0.1, **options), of_margin(-0.1, **options)
    for p in (0.0, 0.3, 0.5, 1.0):
        soft = of_margin(0.1, label=p, **options)
        assert soft[0] == pytest.approx(p * forth[0] + (1 - p) * back[0])
        assert soft[1] == pytest.approx(p * forth[1] - (1 - p) * back[1])
    assert of_margin(0.0, label=0.5, **options)[1] == pytest.approx(0)
    # a share e of wrong labels makes p of 1 - e
    assert of_margin(0.1, label=1.0, wrong=0.2, **options) == pytest.approx(
        of_margin(0.1, label=0.8, **options)
    )


def test_pairs_from_files_keep_their_labels_and_weights_and_ties_are_trained():
    """Labels of the first file 1, .3, .5: the second file of the second pair wins, with .7."""
    algorithm = make()
    total = torch.tensor([1.0, 0.0, 0.3, 0.7, 0.5, 0.5])
    _, rollout, _, _ = prepared(algorithm, reward=total, copies=2)
    weight = torch.tensor([1.0, 1.0, 0.5, 0.5, 0.25, 0.25])
    stated = replace(rollout, stated={"label": total, "weight": weight})
    advantages = Advantages(leaf=torch.tensor([1.0, -1, -1, 1, 0, 0]))
    rows = algorithm.columns(stated, advantages, seed=0, iteration=0)
    samples = [rollout.leaf.tolist().index(state) for state in rows.state.tolist()]
    assert samples[::2] == [0, 1, 3, 2, 4, 5]
    assert rows.label[::2].tolist() == pytest.approx([1, 1, 0.7, 0.7, 0.5, 0.5])
    assert rows.weight[::2].tolist() == [1, 1, 0.5, 0.5, 0.25, 0.25]
    plain = algorithm.columns(rollout, advantages, seed=0, iteration=0)
    assert len(plain) == 8 and "label" not in plain.data


def test_a_limited_loser_does_not_raise_the_winners_error_to_first_order():
    """g_w = (1, 0), g_l = (3, 1): <g_w, g_l> = 3, kappa = 1/3. The step -(g_w - kappa g_l) moves
    |g_w|^2 by -2 (1 - 1/3 * 3) = 0, and without the limit by +4. Where the two point apart, or the
    winner's is the larger, kappa is 1."""

    def step(winner, loser, limit):
        g = torch.tensor([winner, loser], dtype=torch.float64)
        error = g.square().mean(1).requires_grad_()
        batch = Columns(
            {
                "adv": torch.tensor([1.0, -1.0]),
                "weight": torch.ones(2),
                "unit": torch.zeros(2).long(),
            }
        )
        algorithm = make(limit_loser=limit, beta=2.0)
        scores = {"error": error, "error_ref": error.detach(), "residual": g}
        out = algorithm.loss(scores, batch)
        (slope,) = torch.autograd.grad(out.loss, error)
        return out.loss.item(), slope

    free, limited = (step((1.0, 0.0), (3.0, 1.0), limit) for limit in (False, True))
    assert free[0] == limited[0]  # the value stays
    assert limited[1].tolist() == pytest.approx([float(free[1][0]), float(free[1][1]) / 3])
    for loser in ((-3.0, 1.0), (0.5, 0.2)):
        free, limited = (step((1.0, 0.0), loser, limit) for limit in (False, True))
        assert limited[1].tolist() == pytest.approx(free[1].tolist())


def test_losers_are_limited_by_the_winner_of_their_own_unit_in_any_order_of_rows():
    algorithm, policy = make(limit_loser=True, beta=3.0), ToyPolicy(1.0)
    _, rollout, _, rows = prepared(algorithm, policy)
    g = torch.randn(len(rows), 5, generator=torch.Generator().manual_seed(0))

    def slope_of(order):
        part = rows[order]
        scores = algorithm.score(policy, rollout, part)
        assert scores["residual"].shape == (len(rows), 2)
        e = scores["error"].detach().requires_grad_()
        given = {**scores, "error": e, "residual": g[order]}
        return torch.autograd.grad(algorithm.loss(given, part).loss, e)[0]

    gradient = slope_of(torch.arange(len(rows)))
    win, lose = (rows.adv > 0).nonzero().flatten(), (rows.adv < 0).nonzero().flatten()
    assert torch.equal(rows.unit[win], rows.unit[lose])
    dot, own = (g[win] * g[lose]).sum(1), g[win].square().sum(1)
    kappa = torch.where(dot > 0, (own / dot).clamp(max=1), 1.0)
    assert torch.allclose(gradient[lose], -kappa * gradient[win], rtol=1e-5)
    assert kappa.min() < 1 < 2 * kappa.max()
    mixed = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    assert torch.allclose(slope_of(mixed), gradient[mixed], rtol=1e-5)
