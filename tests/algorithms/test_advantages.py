"""Advantages within groups and of several rewards, by hand and by invariance."""

import pytest
import torch

from flowrl import advantages as credit
from flowrl.types import Rewards

R = torch.tensor([1.0, 2.0, 3.0, 10.0, 10.0, 40.0])
G = torch.tensor([0, 0, 0, 1, 1, 1])


def z(values, ddof=0, eps=1e-4):
    values = values.double()
    return ((values - values.mean()) / (values.std(correction=ddof) + eps)).float()


def make(total, raw=None, weights=None):
    return Rewards(
        raw=raw or {"r": total},
        weights=weights or {"r": 1.0},
        total=total,
        valid=~torch.isnan(total),
    )


@pytest.mark.parametrize("ddof", [0, 1])
def test_group_advantage_by_hand(ddof):
    """(1, 2, 3): mean 2, std sqrt(2/3) or 1."""
    adv = credit.group_relative(R, G, ddof=ddof)
    assert torch.allclose(
        adv[:3], torch.tensor([-1.0, 0.0, 1.0]) / (((2 / 3) ** 0.5 if ddof == 0 else 1.0) + 1e-4)
    )
    assert torch.allclose(adv, torch.cat([z(R[:3], ddof), z(R[3:], ddof)]), atol=1e-6)


def test_global_std_and_no_std():
    assert torch.allclose(
        credit.group_relative(R, G, std=None, clip=None), torch.tensor([-1.0, 0, 1, -10, -10, 20])
    )
    spread = float(R.double().std(correction=0))
    assert torch.allclose(
        credit.group_relative(R, G, std="global"),
        torch.tensor([-1.0, 0, 1, -10, -10, 20]) / (spread + 1e-4),
    )
    assert float(credit.group_relative(R, G, std=None).max()) == 5  # clip


def test_samples_and_groups_may_come_in_any_order():
    order = torch.tensor([5, 0, 3, 2, 4, 1])
    assert torch.equal(
        credit.group_relative(R, G)[order], credit.group_relative(R[order], G[order] * 7 + 3)
    )


@pytest.mark.parametrize("std", ["group", "global"])
def test_a_positive_affine_change_of_rewards_changes_nothing(std):
    a, b = (credit.group_relative(r, G, std=std, eps=0.0) for r in (R, 3 * R - 7))
    assert torch.allclose(a, b, atol=1e-6)
    assert float(a[:3].mean()) == pytest.approx(0, abs=1e-6)


def test_equal_rewards_and_single_samples_give_zero():
    r, g = torch.tensor([0.3, 0.3, 0.3, 9.0, 1.0, 2.0]), torch.tensor([0, 0, 0, 1, 2, 2])
    for std in ("group", "global", None):
        for ddof in (0, 1):
            adv = credit.group_relative(r, g, std=std, ddof=ddof)
            assert adv[:4].tolist() == [0, 0, 0, 0] and float(adv[5]) > 0


def test_invalid_samples_get_zero_and_enter_no_statistic():
    r = torch.tensor([1.0, 2.0, torch.nan, 3.0, torch.nan])
    g = torch.tensor([0, 0, 0, 0, 1])
    adv = credit.group_relative(r, g)
    assert torch.allclose(adv[[0, 1, 3]], z(torch.tensor([1.0, 2.0, 3.0])))
    assert adv[[2, 4]].tolist() == [0, 0]
    marked = credit.group_relative(
        torch.tensor([1.0, 2.0, 77.0, 3.0, 5.0]), g, valid=~torch.isnan(r)
    )
    assert torch.equal(adv, marked)


def test_unknown_std_is_answered():
    with pytest.raises(ValueError, match='choose "group", "global" or None'):
        credit.group_relative(R, G, std="batch")


def test_sum_of_advantages_ignores_the_scale_of_each_reward_and_sum_of_rewards_does_not():
    a, b = R, torch.tensor([3.0, 1.0, 2.0, 0.0, 5.0, 1.0])

    def both(scale, how):
        raw = {"a": a, "b": scale * b}
        return credit.combine(make(a + scale * b, raw, {"a": 1.0, "b": 1.0}), G, how=how, eps=0.0)

    assert torch.allclose(both(1, "advantages"), both(100, "advantages"), atol=1e-6)
    assert not torch.allclose(both(1, "rewards"), both(100, "rewards"), atol=1e-2)
    assert torch.allclose(both(1, "rewards"), credit.group_relative(a + b, G, eps=0.0))


def test_weights_one_and_zero_are_a_single_reward():
    rewards = make(R, {"a": R, "b": R.flip(0)}, {"a": 1.0, "b": 0.0})
    assert torch.equal(
        credit.combine(rewards, G, how="advantages"), credit.combine(rewards, G, how="rewards")
    )


def test_gdpo_of_one_reward_is_its_z_score_standardised_once_more_over_all_samples():
    """The second group is flat: the z-scores of the first have spread 1 / sqrt(2) over all six
    samples, and flat groups keep exactly 0."""
    r = torch.tensor([1.0, 2.0, 3.0, 7.0, 7.0, 7.0])
    for ddof in (0, 1):
        options = {"ddof": ddof, "eps": 0.0}
        adv = credit.combine(make(r), G, how="gdpo", **options)
        once = credit.group_relative(r, G, **options)
        assert torch.allclose(
            adv, credit.group_relative(once, torch.zeros_like(G), **options), atol=1e-6
        )
        assert float(adv.std(correction=ddof)) == pytest.approx(1) and adv[3:].tolist() == [0, 0, 0]
    assert float(once.std(correction=0)) < 0.7


def test_gdpo_is_a_weighted_sum_of_z_scores_over_its_spread():
    """Whatever the rewards' scales; weights (1, 0) are a single reward; clipped at the end; an
    invalid sample gets 0 and counts nowhere."""
    b, options = torch.tensor([3.0, 1.0, 2.0, 0.0, 5.0, 1.0]), {"how": "gdpo", "eps": 0.0}
    adv = credit.combine(make(R, {"a": R, "b": b}, {"a": 1.0, "b": 3.0}), G, **options)
    total = sum(w * torch.cat([z(r[:3], eps=0.0), z(r[3:], eps=0.0)]) for w, r in ((1, R), (3, b)))
    assert torch.allclose(adv, total / total.std(correction=0), atol=1e-6)
    scaled = credit.combine(make(R, {"a": R, "b": 100 * b}, {"a": 1.0, "b": 3.0}), G, **options)
    assert torch.allclose(adv, scaled, atol=1e-6)
    assert torch.equal(
        credit.combine(make(R, {"a": R, "b": b}, {"a": 1.0, "b": 0.0}), G, **options),
        credit.combine(make(R), G, **options),
    )
    assert float(credit.combine(make(R), G, **options, clip=1.1).abs().max()) == pytest.approx(1.1)
    more = torch.cat([R, torch.tensor([torch.nan])])
    with_failed = credit.combine(make(more), torch.cat([G, torch.tensor([1])]), **options)
    assert torch.equal(with_failed[:6], credit.combine(make(R), G, **options))
    assert float(with_failed[6]) == 0


def test_gdpos_spread_is_that_of_the_samples_of_all_processes():
    """Two processes with two groups each, one with flat groups: gathered in either order a sample
    gets the same; alone, less by sqrt(2)."""
    r, b = torch.rand(12, generator=torch.Generator().manual_seed(0)), torch.arange(12.0) % 5
    r[6:] = b[6:] = 1.0
    group, order = torch.arange(4).repeat_interleave(3), torch.tensor([*range(6, 12), *range(6)])

    def combined(rows):
        return credit.combine(
            make(r[rows] + b[rows], {"r": r[rows], "b": b[rows]}, {"r": 1.0, "b": 1.0}),
            group[rows],
            how="gdpo",
        )

    whole = combined(torch.arange(12))
    assert torch.allclose(combined(order), whole[order], atol=1e-6)
    assert torch.allclose(2**0.5 * combined(torch.arange(6)), whole[:6], atol=1e-3)
    assert float(whole[:6].abs().min()) > 0.01


# --- the best and worst of each group (DanceGRPO's best-of-N)


def test_best_and_worst_of_each_group_are_kept():
    """Groups interleaved: keep 3 is the two highest and the lowest of five; a group of three stays
    whole."""
    adv = torch.tensor([0.5, 9.0, -2.0, 1.5, 8.0, 0.1, -1.0, 7.0])
    group = torch.tensor([4, 1, 4, 4, 1, 4, 4, 1])
    assert credit.best_worst(adv, group, 3).tolist() == [1, 1, 1, 1, 1, 0, 0, 1]
    assert credit.best_worst(adv, group, 2).tolist() == [0, 1, 1, 1, 0, 0, 0, 1]
    assert credit.best_worst(adv, group, 1).tolist() == [0, 1, 0, 1, 0, 0, 0, 0]
    for keep in (5, 6, 100):
        assert bool(credit.best_worst(adv, group, keep).all())
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        credit.best_worst(adv, group, 0)


def test_ties_are_broken_by_order_and_exactly_keep_are_kept():
    """Of equals the earlier counts as the lower: keep 4 of six are the first two and the last
    two."""
    assert credit.best_worst(torch.ones(6), torch.zeros(6), 4).tolist() == [1, 1, 0, 0, 1, 1]
    assert credit.best_worst(
        torch.tensor([2.0, 1.0, 2.0, 1.0, 2.0]), torch.zeros(5), 2
    ).tolist() == [0, 1, 0, 0, 1]
    adv, group = torch.randint(1, 4, (60,)).float(), torch.arange(60) % 5
    for keep in range(1, 13):
        kept = credit.best_worst(adv, group, keep)
        assert all(int(kept[group == g].sum()) == keep for g in range(5))
    alone = torch.cat([credit.best_worst(adv[group == g], group[group == g], 5) for g in range(5)])
    assert torch.equal(
        alone, torch.cat([credit.best_worst(adv, group, 5)[group == g] for g in range(5)])
    )


def test_dancegrpos_best_of_24_keeps_the_four_highest_and_the_four_lowest():
    adv = credit.group_relative(torch.randn(24), torch.zeros(24))
    kept, order = credit.best_worst(adv, torch.zeros(24), 8), adv.argsort()
    assert bool(kept[order[:4]].all()) and bool(kept[order[-4:]].all()) and int(kept.sum()) == 8
