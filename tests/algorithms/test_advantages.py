"""Credit by hand, by invariance, and through trees."""

from dataclasses import replace

import pytest
import torch

from flowrl import advantages as credit
from flowrl.advantages import trees
from flowrl.samplers import keys, plan, sigmas, tree
from flowrl.types import Rewards

GRID = sigmas.shifted(6, 3)
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


def grow(p, rows):
    return tree.grow(
        lambda x, s, r: torch.tanh(x),
        lambda k: keys.gaussian(k, (4,)),
        p,
        shape=(4,),
        rows=torch.tensor(rows),
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
    assert torch.allclose(adv[[0, 1, 3]], z(torch.tensor([1.0, 2.0, 3.0]))) and adv[
        [2, 4]
    ].tolist() == [0, 0]
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
    assert (
        torch.equal(with_failed[:6], credit.combine(make(R), G, **options))
        and float(with_failed[6]) == 0
    )


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
    assert (
        torch.allclose(2**0.5 * combined(torch.arange(6)), whole[:6], atol=1e-3)
        and float(whole[:6].abs().min()) > 0.01
    )


def test_on_paths_every_transition_has_the_advantage_of_its_leaf():
    grown = grow(plan.full(GRID, eta=0.7), [0, 0, 1])
    leaf = torch.tensor([0.5, -0.5, 2.0])
    assert credit.spread(grown, leaf).view(3, 5).tolist() == [[0.5] * 5, [-0.5] * 5, [2.0] * 5]


def test_tree_credit_is_the_mean_of_descendant_leaves():
    grown = grow(plan.tree(GRID, start=1, depth=2, children=2, eta=0.7), [0])
    out = credit.spread(grown, torch.tensor([1.0, 2.0, 5.0, 8.0]))
    assert out.tolist() == pytest.approx([1.5, 6.5, 1.0, 2.0, 5.0, 8.0])  # edges in order of depth


BRANCHY = plan.branch(GRID, splits=[0, 2], children=2, eta=0.3)


@pytest.mark.parametrize("weighting", ["mean", "path", "recursive"])
def test_branch_of_single_children_over_roots_is_plain_grpo(weighting):
    """K = 1, group over the trees of the prompt."""
    grown = grow(plan.branch(GRID, splits=[0, 2], children=1, eta=0.3), [0, 0, 0, 1, 1, 1])
    out = credit.branch(grown, make(R), weighting=weighting, ddof=0, eps=1e-4)
    plain = credit.group_relative(R, G)
    assert torch.equal(out.leaf, plain) and torch.allclose(
        out.transition, plain.repeat_interleave(5), atol=1e-6
    )
    alone = credit.branch(grown, make(R), weighting=weighting, scope="tree")
    assert bool((alone.transition == 0).all()) and bool((alone.leaf == 0).all())


def test_branch_advantages_are_z_scores_of_node_means_at_each_depth():
    """One tree, leaves 1 2 3 6: depth 0 has nodes 1.5 and 4.5, depths 2-4 the leaves themselves."""
    grown = grow(BRANCHY, [0])
    leaf = torch.tensor([1.0, 2.0, 3.0, 6.0])
    out = credit.branch(grown, make(leaf))
    depth = BRANCHY.depth[grown.edge]
    expected = {0: z(torch.tensor([1.5, 4.5]), 1, 1e-8), 1: z(torch.tensor([1.5, 4.5]), 1, 1e-8)}
    for d in range(5):
        assert torch.allclose(
            out.transition[depth == d], expected.get(d, z(leaf, 1, 1e-8)), atol=1e-6
        ), d
    last = torch.cat([out.transition[grown.leaf_edge]])
    # after the last split an edge has its leaf's advantage
    assert torch.allclose(last, out.leaf, atol=1e-6)


def test_path_weights_are_the_softmax_over_leaves_and_beta_zero_is_the_mean():
    grown = grow(BRANCHY, [0, 0])
    leaf = torch.randn(8)
    assert torch.allclose(
        credit.branch(grown, make(leaf), weighting="path", beta=0.0).transition,
        credit.branch(grown, make(leaf)).transition,
        atol=1e-6,
    )
    top = int(torch.nonzero(grown.parent < 0).flatten()[0])
    paths = {}
    for b in range(8):
        at, total = int(grown.leaf_edge[b]), 0.0
        while at >= 0 and at != top:
            at, total = int(grown.parent[at]), total + float(grown.log_prob[at])
        if at == top:
            paths[b] = total
    weights = torch.softmax(torch.tensor(list(paths.values())), 0)
    value = float((weights * leaf[list(paths)]).sum())
    leaves, transitions, logits = trees.leaves_below(grown)
    ok = torch.ones_like(leaves, dtype=torch.bool)
    fused, _ = trees.softmax_mean(leaf.double()[leaves], logits, transitions, ok, len(grown.src))
    assert len(paths) == 2 and float(fused[top]) == pytest.approx(value, abs=1e-5)


def test_an_invalid_leaf_leaves_the_fusion():
    grown = grow(BRANCHY, [0])
    out = credit.branch(grown, make(torch.tensor([1.0, torch.nan, 3.0, 6.0])))
    top = torch.nonzero(BRANCHY.depth[grown.edge] == 0).flatten()
    assert torch.allclose(out.transition[top], z(torch.tensor([1.0, 4.5]), 1, 1e-8), atol=1e-6)
    assert float(out.leaf[1]) == 0 and float(out.transition[grown.leaf_edge[1]]) == 0


def test_tree_backup_of_one_child_is_the_leaf():
    grown = grow(plan.tree(GRID, start=1, depth=3, children=1, eta=0.7), [0, 0])
    assert credit.tree_backup(grown, torch.tensor([0.5, -2.0])).view(2, 3).tolist() == [
        [0.5] * 3,
        [-2.0] * 3,
    ]


def test_tree_backup_weighs_children_by_their_log_probs():
    grown = grow(plan.tree(GRID, start=0, depth=2, children=3, eta=0.7), [0])
    leaf = torch.randn(9)
    out = credit.tree_backup(grown, leaf, temperature=0.5)
    for e in range(3):
        kids = torch.nonzero(grown.parent == e).flatten()
        w = torch.softmax(grown.log_prob[kids] / 0.5, 0)
        assert float(out[e]) == pytest.approx(float((w * out[kids]).sum()), abs=1e-6)
    assert torch.allclose(out[3:], leaf)


def test_tree_backup_is_the_mean_when_log_probs_are_equal():
    """Leaves with mean 0 give the root mean 0."""
    grown = grow(plan.tree(GRID, start=0, depth=2, children=3, eta=0.7), [0])
    grown = replace(grown, log_prob=torch.zeros_like(grown.log_prob))
    leaf = torch.randn(9)
    leaf = leaf - leaf.mean()
    out = credit.tree_backup(grown, leaf)
    assert torch.allclose(out[:3], leaf.view(3, 3).mean(1), atol=1e-6) and float(
        out[:3].mean()
    ) == pytest.approx(0, abs=1e-6)
    assert torch.allclose(out, credit.spread(grown, leaf), atol=1e-6)
