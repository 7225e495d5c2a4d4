"""Samples drawn in rounds: fresh prompts for flat groups, more samples until a group is balanced,
and several rollouts joined into one."""

from dataclasses import replace

import pytest
import small
import torch
from toy import GRID, SAMPLER, ToyPolicy, rewards_of

from flowrl.algorithms.grpo import ALGORITHM as GRPO
from flowrl.rewards import load_set
from flowrl.rollouts import draw, join, redraw
from flowrl.rollouts.records import Drawn
from flowrl.samplers import keys, tree
from flowrl.training import build
from flowrl.types import PromptBatch


def grow(policy, rows, copies=None):
    algorithm = GRPO(GRPO.Config())
    return tree.grow(
        lambda x, s, r: policy.velocity(x, s, None, r, guidance="none"),
        lambda k: keys.gaussian(k, (2,)),
        algorithm.plan(GRID, sampler=SAMPLER, iteration=0, seed=0),
        shape=(2,),
        rows=torch.tensor(rows),
        prompt_keys=keys.key("prompt", torch.tensor(rows)),
        copies=None if copies is None else torch.tensor(copies),
    )


def by_name(rollout):
    """leaf key -> (final state, log-probs of its path, row of its prompt)."""
    out = {}
    for b, name in enumerate(rollout.leaf_key.tolist()):
        path, at = [], int(rollout.leaf_edge[b])
        while at >= 0:
            path.append(float(rollout.log_prob[at]))
            assert int(rollout.prompt[rollout.src[at]]) == int(rollout.group[b])
            at = int(rollout.parent[at])
        out[name] = (rollout.leaves[b].tolist(), path[::-1], int(rollout.group[b]))
    return out


def test_joined_rollouts_are_the_rollout_of_all_at_once():
    """Prompts 0 1 2 with two copies each, then prompts 0 and 2 again with copies 2 and 3."""
    policy = ToyPolicy(0.1)
    first, more = grow(policy, [0, 0, 1, 1, 2, 2]), grow(policy, [0, 0, 2, 2], [2, 3, 2, 3])
    local = replace(
        more,
        prompt=torch.where(more.prompt == 2, 1, more.prompt),
        group=torch.where(more.group == 2, 1, more.group),
    )
    joined = join.join([first, local], [torch.tensor([0, 1, 2]), torch.tensor([0, 2])])
    whole = by_name(grow(policy, [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]))
    got = by_name(joined)
    assert got.keys() == whole.keys() and len(got) == 10
    for name, (leaf, path, row) in got.items():
        assert (
            row == whole[name][2]
            and leaf == pytest.approx(whole[name][0], abs=1e-5)
            and path == pytest.approx(whole[name][1], abs=1e-5)
        )
    assert joined.nfe == first.nfe + more.nfe and torch.unique(joined.tree).numel() == 10


def collected(groups, totals, threshold):
    rows = torch.tensor(groups)
    rollout = grow(ToyPolicy(), groups)
    batch = PromptBatch(text=["a", "b", "c"], ids=torch.arange(3), meta=[{}, {}, {}])
    out = Drawn(
        batch=batch,
        rollout=rollout,
        rewards=rewards_of(totals),
        shown=torch.empty(0),
        threshold=None if threshold is None else torch.full((3,), threshold),
    )
    assert torch.equal(rollout.group, rows)
    return out


def test_balance_keeps_half_of_each_side_in_the_order_of_draws_and_fills_up_from_the_other():
    """Group size 4. a: 3 good, 4 bad -> first 2 of each. b: one good -> it and 3 bad. c: all good
    -> first 4; NaN is neither."""
    nan = float("nan")
    a, b, c = [1, 0, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [1, nan, 1, 1, 1, 1]
    drawn = collected([0] * 7 + [1] * 5 + [2] * 6, [*a, *b, *c], 0.5)
    assert redraw.chosen(drawn, 4).tolist() == [0, 1, 2, 4, 7, 8, 9, 10, 12, 14, 15, 16]
    good, bad = redraw.counts(drawn, drawn.threshold)
    assert good.tolist() == [3, 1, 5] and bad.tolist() == [4, 4, 0]


def test_a_group_is_flat_when_its_valid_rewards_hardly_differ():
    nan = float("nan")
    drawn = collected([0, 0, 0, 1, 1, 1, 2, 2, 2], [1, 1, nan, 1, 1.1, 1, nan, nan, 3], None)
    assert redraw.spread_out(drawn, 1e-6).tolist() == [False, True, False]
    assert redraw.spread_out(drawn, 0.05).tolist() == [False, False, False]  # std of b: 0.047


def trainer(folder, monkeypatch, score, **options):
    monkeypatch.setattr(build, "load_set", lambda _: load_set({"own": score}))
    return small.trainer(folder, "nft", iterations="1", batch__prompts="4", **options)


def flat_where(word):
    """Equal rewards for prompts with the word, a picture's spread of pixels for the others."""
    return lambda media, prompts, *_: torch.where(
        torch.tensor([word in p for p in prompts]),
        torch.tensor(0.25),
        media.flatten(1).std(1).float(),
    )


def test_refill_adds_a_fresh_prompt_for_each_flat_group_until_rounds_are_over(
    tmp_path, monkeypatch
):
    run = trainer(
        tmp_path / "a", monkeypatch, flat_where("circle"), draw__mode="refill", draw__rounds="3"
    )
    drawn = draw.draw(run.source, 0, run.parts.setup.plan)
    text, flat = drawn.batch.text, ["circle" in t for t in drawn.batch.text]
    assert len(set(drawn.batch.ids.tolist())) == len(text) > 4  # no prompt is twice in an iteration
    rounds, at, size = 0, 0, 4
    while size and rounds <= 3:  # each round has as many prompts as the one before had flat groups
        missing = sum(flat[at : at + size])
        at, size, rounds = at + size, missing, rounds + 1
    assert at == len(text)
    assert len(drawn.rollout.leaf) == 2 * len(text) and torch.equal(
        drawn.rollout.group, torch.arange(len(text)).repeat_interleave(2)
    )
    once = trainer(tmp_path / "b", monkeypatch, flat_where("circle"))
    first = draw.draw(once.source, 0, once.parts.setup.plan)
    assert (
        torch.equal(first.rollout.leaves, drawn.rollout.leaves[:8]) and first.batch.text == text[:4]
    )
    result = next(iter(run))
    assert result.metrics["policy/rows"] == 2 * 2 * (
        len(text) - sum(flat)
    )  # two samples, two noise levels


def test_refill_of_groups_that_all_differ_is_sampling_once(tmp_path, monkeypatch):
    run = trainer(tmp_path, monkeypatch, flat_where("no such word"), draw__mode="refill")
    assert len(draw.draw(run.source, 0, run.parts.setup.plan).batch) == 4


def test_balance_samples_on_with_other_noise_and_takes_the_baseline_from_all_draws(
    tmp_path, monkeypatch
):
    """Good: pixels that vary more than the first round's median. Prompts that are not balanced get
    more rounds, the others do not."""
    options = {
        "draw__mode": "balance",
        "draw__rounds": "4",
        "batch__group": "4",
        "algorithm__std": "null",
    }
    run = trainer(tmp_path, monkeypatch, flat_where("no such word"), **options)
    drawn = draw.draw(run.source, 0, run.parts.setup.plan)
    group, total = drawn.rollout.group, drawn.rewards.total
    assert torch.unique(drawn.rollout.leaf_key).numel() == len(group) and len(drawn.batch) == 4
    sizes = torch.bincount(group)
    assert bool((sizes % 4 == 0).all()) and len(set(sizes.tolist())) > 1
    for g, size in enumerate(sizes.tolist()):
        good = total[group == g] > drawn.threshold[g]  # in the order of draws
        for seen in range(4, size, 4):
            assert (
                min(int(good[:seen].sum()), seen - int(good[:seen].sum())) < 2
            )  # else it would not have gone on
        assert size == 20 or min(int(good.sum()), size - int(good.sum())) >= 2
    kept = redraw.chosen(drawn, 4)
    assert bool((torch.bincount(group[kept]) == 4).all())
    leaf = run.algorithm.leaf_advantages(drawn.rewards, group)
    means = torch.stack([total[group == g].mean() for g in range(4)])
    assert torch.allclose(leaf, total - means[group], atol=1e-6)
    next(iter(run))


def test_the_median_of_the_first_round_is_the_default_threshold(tmp_path, monkeypatch):
    run = trainer(
        tmp_path,
        monkeypatch,
        flat_where("no such word"),
        draw__mode="balance",
        batch__group="4",
        draw__rounds="1",
    )
    drawn = draw.draw(run.source, 0, run.parts.setup.plan)
    first = drawn.rewards.total[:16]
    assert drawn.threshold.tolist() == pytest.approx([float(first.nanmedian())] * 4)


@pytest.mark.parametrize(
    ("rewards", "threshold"),
    [
        ([0, 0, 0, 1], 0),
        ([0, 1, 1, 1], 0),
        ([1, 1, 1, 1], 1),
        ([0.1, 0.2, 0.9], 0.2),
        ([0.5, 0.9, 0.9, float("nan")], 0.5),
    ],
)
def test_the_threshold_leaves_samples_on_both_sides_where_rewards_differ(rewards, threshold):
    """Mostly right 0/1 rewards have the median 1, which nothing exceeds: then the highest reward
    below it divides."""
    assert redraw.middle(torch.tensor(rewards, dtype=torch.float32)) == pytest.approx(threshold)


def test_rounds_train_on_the_embeddings_that_sampled(tmp_path, monkeypatch):
    run = trainer(
        tmp_path,
        monkeypatch,
        flat_where("no such word"),
        draw__mode="balance",
        batch__group="4",
        draw__rounds="2",
    )
    encoded, encode = [], run.policy.encode
    run.policy.encode = lambda *given: encoded.append(encode(*given)) or encoded[-1]
    drawn = draw.draw(run.source, 0, run.parts.setup.plan)
    assert drawn.rollout.cond is encoded[0] and len(encoded) > 1
