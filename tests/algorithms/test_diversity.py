"""Likeness within groups by hand, and what it changes of rewards and advantages."""

import math
from dataclasses import replace

import pytest
import torch

from flowrl.advantages import diversity
from flowrl.algorithms.grpo import GRPO
from flowrl.config.training import DiversityConfig
from flowrl.training.diversity import Diversity
from flowrl.types import Rewards

NAN = float("nan")
# two samples that point the same way and one at a right angle to them
CORNER = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 0.0]])
ONE = torch.zeros(3, dtype=torch.int64)
ALL = torch.ones(3, dtype=torch.bool)


def rewards_of(total, features=None, **parts):
    total = torch.tensor(total)
    raw = {name: torch.tensor(value) for name, value in parts.items()} or {"r": total}
    return Rewards(
        raw=raw,
        weights=dict.fromkeys(raw, 1.0),
        total=total,
        valid=~total.isnan(),
        features=features,
    )


def credited(rewards, group, *, method=None, **settings):
    """(advantages, metrics) of plain GRPO, or another method's."""
    method = method or GRPO(GRPO.Config())
    config = DiversityConfig(features="shapes", **settings)
    return Diversity(config)(method.leaf_advantages, rewards, group)


def drawn(seed=0, groups=3, size=5, d=8):
    """Rewards with features of several groups, one sample of which failed."""
    torch.manual_seed(seed)
    total = torch.rand(groups * size)
    total[2] = NAN
    rewards = rewards_of(total.tolist(), torch.randn(groups * size, d))
    return rewards, torch.arange(groups).repeat_interleave(size)


# --- by hand


def test_likeness_of_three_samples_by_hand():
    """Cosines are 1 (first, third) and 0: means 1/2, 0, 1/2; nearest 0, 1, 0; clusters of two and
    one have entropy ln 3 - 2/3 ln 2, of at most ln 3."""
    found = diversity.spread(CORNER, ONE, ALL)
    assert found.cosine.tolist() == found.similarity.tolist() == [0.5, 0.0, 0.5]
    assert found.novelty.tolist() == [0.0, 1.0, 0.0]
    share = 1 - 2 / 3 * math.log(2) / math.log(3)
    assert found.entropy.tolist() == pytest.approx([share] * 3)


def test_opposite_samples_are_new_to_each_other_and_not_redundant():
    found = diversity.spread(torch.tensor([[1.0], [-1.0]]), ONE[:2], ALL[:2])
    assert found.cosine.tolist() == [-1, -1] and found.similarity.tolist() == [0, 0]
    assert found.novelty.tolist() == [2, 2] and found.entropy.tolist() == [1, 1]


def test_a_low_temperature_leaves_near_copies_alone_redundant():
    """exp((0 - 1) / 0.5) = e^-2 in place of the cosine 0, and 1 in place of 1."""
    found = diversity.spread(CORNER, ONE, ALL, temperature=0.5)
    mixed = (1 + math.exp(-2)) / 2
    assert found.similarity.tolist() == pytest.approx([mixed, math.exp(-2), mixed])
    assert found.cosine.tolist() == [0.5, 0.0, 0.5]


def test_a_chain_of_near_samples_is_one_cluster():
    """At 0, 20, 40 and 90 degrees neighbours of the first three have the cosine 0.94, its ends
    0.77."""
    angle = torch.tensor([0.0, 20, 40, 90]).deg2rad()
    linked = diversity.cosines(torch.stack([angle.cos(), angle.sin()], 1)) >= 0.9
    assert diversity.clusters(linked).tolist() == [0, 0, 0, 3]


def test_the_discount_of_dra_grpo_by_hand():
    """r / (1 + sum of similarities): 1 / (1 + 1), 1 / (1 + 0), 1 / (1 + 1); a reward below 0 is
    not discounted."""
    found = diversity.spread(CORNER, ONE, ALL)
    options = {"redundancy": 2.0, "above": "zero"}
    changed = diversity.adjusted(rewards_of([1.0, 1.0, 1.0]), ONE, found, **options)
    assert changed.total.tolist() == changed.raw["r"].tolist() == [0.5, 1.0, 0.5]
    changed = diversity.adjusted(rewards_of([-1.0, 1.0, 4.0]), ONE, found, **options)
    assert changed.total.tolist() == [-1.0, 1.0, 2.0]


def test_above_the_groups_lowest_a_shift_of_all_rewards_changes_nothing():
    """3, 1, 2 have 2, 0, 1 above the lowest, which becomes 2 / 2, 0, 1 / 2."""
    found = diversity.spread(CORNER, ONE, ALL)
    for shift in (0.0, -8.0):
        total = [3 + shift, 1 + shift, 2 + shift]
        changed = diversity.adjusted(rewards_of(total), ONE, found, redundancy=2.0)
        assert (changed.total - shift).tolist() == [2.0, 1.0, 1.5]


def test_a_cost_is_discounted_from_its_other_end():
    """With a weight of -1 the best of 3, 1, 3 is 1: what is above the lowest of -3, -1, -3."""
    rewards = replace(rewards_of([-3.0, -1.0, -3.0], cost=[3.0, 1.0, 3.0]), weights={"cost": -1.0})
    features = CORNER[[1, 0, 2]]  # the best one is like the third
    found = diversity.spread(features, ONE, ALL)
    changed = diversity.adjusted(rewards, ONE, found, redundancy=2.0)
    assert changed.total.tolist() == [-3.0, -2.0, -3.0]
    assert changed.raw["cost"].tolist() == [3.0, 2.0, 3.0]


def test_the_bonus_is_one_more_reward():
    found = diversity.spread(CORNER, ONE, ALL)
    changed = diversity.adjusted(rewards_of([0.25, 0.0, 1.0]), ONE, found, novelty=0.5)
    assert changed.total.tolist() == [0.25, 0.5, 1.0]
    assert changed.terms[diversity.NOVELTY].tolist() == [0.0, 1.0, 0.0]
    assert changed.weights == {"r": 1.0, diversity.NOVELTY: 0.5}


def test_z_scores_of_each_reward_count_the_bonus_as_one_of_them():
    """combine=advantages: -1.2247, 0, 1.2247 of the reward, and half of -0.7071, 1.4142,
    -0.7071."""
    method = GRPO(GRPO.Config(combine="advantages", eps=0.0))
    adv, _ = credited(rewards_of([1.0, 2.0, 3.0], CORNER), ONE, method=method, novelty=0.5)
    root = math.sqrt(0.5)
    expected = [-math.sqrt(1.5) - root / 2, root, math.sqrt(1.5) - root / 2]
    assert adv.tolist() == pytest.approx(expected)


def test_entropy_scales_the_advantages_of_a_group_by_hand():
    """1 - 0.5 x entropy: 1/2 where all three differ, 1 where all are equal; above 1 if negative."""
    features = torch.cat([torch.eye(3), torch.ones(3, 3)])
    rewards, group = rewards_of([1.0, 2.0, 3.0] * 2, features), torch.tensor([0, 0, 0, 1, 1, 1])
    plain = GRPO(GRPO.Config()).leaf_advantages(rewards, group)
    adv, _ = credited(rewards, group, entropy=0.5)
    assert torch.allclose(adv[:3], 0.5 * plain[:3]) and torch.equal(adv[3:], plain[3:])
    adv, _ = credited(rewards, group, entropy=-0.5)
    assert torch.allclose(adv[:3], 1.5 * plain[:3]) and torch.equal(adv[3:], plain[3:])


def test_the_numbers_that_are_logged_are_means_by_hand():
    """Similarity 1/3, novelty 1/3; discounts 1 / 2, 1 and 1 / 2."""
    _, logged = credited(rewards_of([1.0, 2.0, 3.0], CORNER), ONE, redundancy=2.0)
    assert logged == {
        "diversity/similarity": pytest.approx(1 / 3),
        "diversity/novelty": pytest.approx(1 / 3),
        "diversity/entropy": pytest.approx(1 - 2 / 3 * math.log(2) / math.log(3)),
        "diversity/discount": pytest.approx(2 / 3),
    }


# --- what changes nothing


def test_equal_features_leave_novelty_and_entropy_without_any_effect():
    rewards, group = drawn()
    rewards = replace(rewards, features=torch.full((15, 8), 0.3))
    plain = GRPO(GRPO.Config()).leaf_advantages(rewards, group)
    adv, logged = credited(rewards, group, novelty=3.0, entropy=0.7)
    assert torch.equal(adv.nan_to_num(9), plain.nan_to_num(9))
    assert logged["diversity/novelty"] == logged["diversity/entropy"] == 0
    assert logged["diversity/similarity"] == 1


def test_equal_features_discount_all_by_one_plus_the_weight():
    """So advantages that are divided by no spread are divided by 1 + 3, and others stay."""
    rewards, group = drawn()
    rewards = replace(rewards, features=torch.full((15, 8), 0.3))
    for std, factor in ((None, 4.0), ("group", 1.0)):
        method = GRPO(GRPO.Config(std=std, eps=0.0))
        plain = method.leaf_advantages(rewards, group).nan_to_num(9 * factor)
        adv, _ = credited(rewards, group, method=method, redundancy=3.0)
        assert torch.allclose(adv.nan_to_num(9), plain / factor, atol=1e-6)


def test_without_features_or_weights_no_bit_changes():
    rewards, group = drawn()
    plain = GRPO(GRPO.Config()).leaf_advantages(rewards, group).nan_to_num(9)
    adv, logged = credited(rewards, group)
    assert torch.equal(adv.nan_to_num(9), plain) and len(logged) == 3
    adv, logged = credited(replace(rewards, features=None), group, novelty=1.0)
    assert torch.equal(adv.nan_to_num(9), plain) and logged == {}


ON = {"redundancy": 2.0, "temperature": 0.5, "novelty": 1.0, "entropy": 0.5, "threshold": 0.3}


def test_the_order_of_samples_and_of_groups_changes_nothing():
    rewards, group = drawn()
    adv, logged = credited(rewards, group, **ON)
    order = torch.randperm(15, generator=torch.Generator().manual_seed(1))
    moved = replace(
        rewards,
        raw={"r": rewards.total[order]},
        total=rewards.total[order],
        valid=rewards.valid[order],
        features=rewards.features[order],
    )
    other, again = credited(moved, 7 - group[order], **ON)
    assert torch.allclose(other, adv[order], atol=1e-6, equal_nan=True)
    assert again == pytest.approx(logged)


def test_groups_do_not_see_each_other():
    rewards, group = drawn()
    adv, _ = credited(rewards, group, **ON)
    one = rewards_of(rewards.total[5:10].tolist(), rewards.features[5:10])
    alone, _ = credited(one, group[5:10], **ON)
    assert torch.equal(adv[5:10], alone)


@pytest.mark.parametrize("hidden", [NAN, 1e30])
def test_features_of_failed_samples_enter_nothing(hidden):
    rewards, group = drawn()
    before, logged = credited(rewards, group, **ON)
    features = rewards.features.clone()
    features[2] = hidden
    adv, again = credited(replace(rewards, features=features), group, **ON)
    assert torch.equal(adv.nan_to_num(9), before.nan_to_num(9)) and again == logged
    assert adv.isnan().tolist() == [i == 2 for i in range(15)]


def test_a_sample_alone_in_its_group_is_neither_redundant_nor_new():
    features = torch.tensor([[1.0, 0], [0, 1.0]])
    group, total = torch.tensor([0, 0]), [1.0, NAN]
    adv, logged = credited(rewards_of(total, features), group, **ON)
    assert adv.nan_to_num(9).tolist() == [0.0, 9.0] and logged == {}
    found = diversity.spread(features, torch.tensor([0, 1]), torch.tensor([True, True]))
    changed = diversity.adjusted(rewards_of([1.0, 2.0]), group, found, redundancy=5.0, novelty=5.0)
    assert changed.total.tolist() == [1.0, 2.0] and not found.compared.any()


def test_a_length_of_features_changes_nothing():
    rewards, group = drawn()
    adv, _ = credited(rewards, group, **ON)
    longer = rewards.features * torch.rand(15, 1).add(0.5)
    other, _ = credited(replace(rewards, features=longer), group, **ON)
    assert torch.allclose(other, adv, atol=1e-5, equal_nan=True)


def test_win_rates_are_those_of_adjusted_rewards():
    """A bonus of 1 lifts the second of three from the middle to the top."""
    method = GRPO(GRPO.Config(outcome="win_rate", std=None))
    adv, _ = credited(rewards_of([1.0, 2.0, 2.5], CORNER), ONE, method=method, novelty=1.0)
    assert adv.tolist() == [-0.5, 0.5, 0.0]
