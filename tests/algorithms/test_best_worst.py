"""The best and worst samples of each group are kept (DanceGRPO's best-of-N)."""

import pytest
import torch
from toy import prepared

from flowrl import advantages as credit
from flowrl.algorithms.grpo import ALGORITHM


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


def test_kept_samples_are_the_best_and_worst_of_each_group():
    """Eight samples, keep 4: the two highest and lowest; all their steps and no other's are
    trained."""
    algorithm = ALGORITHM(ALGORITHM.Config(keep=4))
    reward = torch.randn(3, 8)
    _, rollout, advantages, rows = prepared(algorithm, reward=reward.flatten())
    order = reward.argsort(1)
    expected = {8 * p + int(i) for p in range(3) for i in [*order[p, :2], *order[p, -2:]]}
    of = torch.arange(24).repeat_interleave(7)
    assert {
        int(of[i]) for d in rows.dst for i in torch.nonzero(rollout.dst == d)
    } == expected and len(rows) == 12 * 7
    every = credit.group_relative(reward.flatten(), rollout.group)
    assert torch.equal(advantages.leaf[sorted(expected)], every[sorted(expected)])
