"""Pref-GRPO: win rates within a group in place of rewards."""

from dataclasses import replace

import pytest
import torch
from toy import ToyPolicy, advantages_of, rewards_of, roll_out

from flowrl.advantages import group_relative, win_rate
from flowrl.algorithms.grpo import ALGORITHM as GRPO
from flowrl.config.load import load_config
from flowrl.rewards import load, score
from flowrl.types import MediaContext, Rewards

GROUP = torch.tensor([0, 0, 0, 1, 1, 1, 1])


def test_a_win_rate_is_the_share_of_the_others_that_are_exceeded():
    values = torch.tensor([3.0, 1.0, 2.0, 5.0, 5.0, 0.0, 9.0])
    assert win_rate(values, GROUP).tolist() == pytest.approx([1, 0, 0.5, 1.5 / 3, 1.5 / 3, 0, 1])


@pytest.mark.parametrize("values", ["distinct", "with ties"])
def test_win_rates_of_a_group_have_mean_one_half(values):
    """A group of G makes G (G - 1) / 2 comparisons, each of which gives one point, so
    the rates add up to G / 2."""
    group = torch.arange(5).repeat_interleave(8)
    r = torch.randn(40, generator=torch.Generator().manual_seed(0))
    r = r if values == "distinct" else r.round()
    rates = win_rate(r, group).view(5, 8)
    assert torch.allclose(rates.mean(1), torch.full((5,), 0.5), atol=1e-6)
    assert torch.allclose((7 * rates).sum(1), torch.full((5,), 28.0), atol=1e-5)
    assert float(rates.std(1).min()) > 0.2


@pytest.mark.parametrize("rule", ["leaf", "depth", "backup", "td", "siblings", "granular"])
def test_every_credit_rule_starts_from_win_rates(rule):
    """Credit is that of the win rates as rewards, so an increasing change of the reward is not
    seen; without the option it is."""
    plan = {"plan": "granular", "tree": {"steps": (0, 3), "children": 4, "strides": (1, 2)}}
    tree = {"plan": "tree", "tree": {"children": 3}, "window": {"schedule": "frozen", "size": 2}}
    options = {"credit": rule, **(plan if rule == "granular" else tree)}
    rollout = roll_out(ToyPolicy(0.5), GRPO(GRPO.Config(**options)), copies=2)
    r = torch.randn(len(rollout.leaf), generator=torch.Generator().manual_seed(0))

    def credit(values, outcome):
        return advantages_of(
            GRPO(GRPO.Config(**options, outcome=outcome)), rollout, rewards_of(values)
        ).transition

    got = credit(r, "win_rate")
    assert torch.equal(got, credit(r.exp() * 100, "win_rate")) and float(got.abs().max()) > 0.5
    assert torch.equal(got, credit(win_rate(r, rollout.group), "reward"))
    assert not torch.allclose(got, credit(r, "reward"), atol=0.01)


def test_any_increasing_change_of_the_reward_leaves_win_rates_as_they_are():
    values = torch.randn(7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(win_rate(values, GROUP), win_rate(values.exp() * 100, GROUP))


def test_failed_samples_neither_compare_nor_count():
    values = torch.tensor([3.0, torch.nan, 2.0, torch.nan, torch.nan, torch.nan, 9.0])
    rates = win_rate(values, GROUP)
    assert rates[[0, 2, 6]].tolist() == [1, 0, 0.5] and rates[[1, 3, 4, 5]].isnan().all()


def test_the_option_puts_win_rates_before_the_z_score():
    rewards = rewards_of([3.0, 1.0, 2.0, 5.0, 5.0, 0.0, 9.0])
    algorithm = GRPO(GRPO.Config(outcome="win_rate"))
    expected = group_relative(win_rate(rewards.total, GROUP), GROUP)
    assert torch.equal(algorithm.leaf_advantages(rewards, GROUP), expected)
    assert not torch.equal(GRPO(GRPO.Config()).leaf_advantages(rewards, GROUP), expected)


def test_with_several_rewards_each_has_its_own_win_rate():
    a, b = torch.tensor([1.0, 2, 3]), torch.tensor([1000.0, 3, 2])
    group = torch.zeros(3, dtype=torch.int64)
    rewards = replace(
        rewards_of([0.0, 0, 0]), raw={"a": a, "b": b}, weights={"a": 1.0, "b": 2.0}, total=a + 2 * b
    )
    adv = GRPO(GRPO.Config(outcome="win_rate", combine="advantages")).leaf_advantages(
        rewards, group
    )
    expected = group_relative(torch.tensor([0, 0.5, 1]), group) + 2 * group_relative(
        torch.tensor([1, 0.5, 0]), group
    )
    assert torch.allclose(adv, expected, atol=1e-6)


def test_it_is_the_reward_win_rate_of_a_judge_that_goes_by_the_score():
    media = torch.rand(7, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    context = MediaContext(meta=[{}] * 7, group=GROUP)
    prompts = [f"prompt {g}" for g in GROUP.tolist()]
    judged = score(media, prompts, {"win_rate": load("win_rate", judge="jpeg")}, context).total
    assert torch.allclose(
        judged, win_rate(score(media, prompts, {"jpeg": 1.0}, context).total, GROUP)
    )


def test_the_config_is_grpo_with_win_rates():
    cfg = load_config(None, ["algorithm=pref_grpo", "reward=jpeg"])
    assert (
        cfg.algorithm["name"],
        cfg.algorithm["outcome"],
        cfg.sampler.steps,
        cfg.batch.group,
    ) == ("grpo", "win_rate", 25, 8)


def test_what_another_reward_could_not_judge_enters_no_win_rate():
    raw = {"a": torch.tensor([1.0, 2.0, 3.0, 2.5]), "b": torch.tensor([1.0, 1.0, 1.0, torch.nan])}
    valid = torch.tensor([True, True, True, False])
    total = (raw["a"] + raw["b"]).where(valid, torch.nan)
    rewards = Rewards(raw=raw, weights={"a": 1.0, "b": 1.0}, total=total, valid=valid)
    found = GRPO(GRPO.Config(outcome="win_rate")).win_rates(rewards, torch.zeros(4))
    assert found.raw["a"][:3].tolist() == [0.0, 0.5, 1.0] and found.raw["a"][3].isnan()
