"""Plans and credit rules as options: reductions to plain GRPO, by hand, shared forwards."""

from dataclasses import replace
from types import SimpleNamespace

import pydantic
import pytest
import torch
from toy import (
    GRID,
    SAMPLER,
    ToyPolicy,
    advantages_of,
    backward,
    gradient,
    prepared,
    rewards_of,
    roll_out,
)

from flowrl import advantages as credit
from flowrl.algorithms.grpo import ALGORITHM
from flowrl.samplers import plan as plans
from flowrl.training import gradient as objective
from flowrl.types import Advantages

NAN = float("nan")
DEPTH_TWO = {
    "plan": "tree",
    "tree": {"children": 2},
    "window": {"schedule": "frozen", "size": 2, "low": 1},
}
BRANCH = {"plan": "branch", "tree": {"splits": (0, 2), "children": 2}}
GRANULAR = {"plan": "granular", "tree": {"steps": (0, 3), "children": 2, "strides": (1, 2)}}


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**options))


def shared(init):
    return SimpleNamespace(eta=0.7, init_noise=init)


def by_hand(leaf, **options):
    """(algorithm, rollout, advantages) of one prompt with rewards `leaf`."""
    algorithm = make(eps=0.0, **options)
    leaves = algorithm.plan(GRID, sampler=SAMPLER, iteration=0, seed=0).leaves
    rollout = roll_out(ToyPolicy(0.5), algorithm, copies=len(leaf) // leaves, prompts=1)
    return algorithm, rollout, advantages_of(algorithm, rollout, rewards_of(leaf))


# --- one child everywhere is plain GRPO

ONE = {
    "branch": ({"plan": "branch", "tree": {"splits": (0, 3), "children": 1}}, {}),
    "branch mix": (
        {
            "plan": "branch",
            "tree": {"splits": (2,), "children": 1, "noisy": "window"},
            "window": {"size": 3, "low": 2},
        },
        {"plan": "window", "window": {"size": 3, "low": 2}},
    ),
    "tree": (
        {"plan": "tree", "tree": {"children": 1}, "window": {"size": 3, "low": 2}},
        {"plan": "window", "window": {"size": 3, "low": 2}},
    ),
    "fan": (
        {"plan": "fan", "tree": {"steps": (3,), "children": 1}},
        {"plan": "window", "window": {"size": 1, "low": 3}},
    ),
    "granular": (
        {"plan": "granular", "tree": {"steps": (3,), "children": 1, "strides": (1,)}},
        {"plan": "window", "window": {"size": 1, "low": 3}},
    ),
}
RULES = {
    "leaf": {},
    "depth": {"credit": "depth"},
    "depth, path": {"credit": "depth", "fusion": "path"},
    "depth, recursive": {"credit": "depth", "fusion": "recursive"},
    "backup": {"credit": "backup", "temperature": 0.5},
    "td": {"credit": "td"},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ONE)
def test_one_child_everywhere_trains_the_rows_of_plain_grpo(name, rule):
    """Not only equal advantages: the same states, steps and noise, so the same loss."""
    forked, plain = ONE[name]
    policy = ToyPolicy(0.2)
    _, rollout, _, rows = prepared(make(**forked, **RULES[rule]), policy)
    _, paths, _, expected = prepared(make(**plain), policy)
    assert len(rows) == len(expected) == 24 * {"branch": 7, "fan": 1, "granular": 1}.get(name, 3)
    assert torch.equal(rollout.states[rows.src], paths.states[expected.src])
    assert torch.equal(rollout.states[rows.dst], paths.states[expected.dst])
    for column in ("prompt", "sigma", "sigma_next", "eta", "log_prob", "noise_key"):
        assert torch.equal(rows.data[column], expected.data[column]), column
    assert torch.allclose(rows.adv, expected.adv, atol=1e-5) and float(rows.adv.abs().max()) > 1


# --- credit by hand: leaves 1 2 | 5 8, mean 4, variance 7.5


def scored(x):
    x = torch.tensor(x).double()
    return ((x - x.mean()) / x.std(correction=0)).tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [-2.5 / 7.5**0.5, 2.5 / 7.5**0.5, *scored([1.0, 2, 5, 8])]),
        (
            {"credit": "td"},
            [x / 7.5**0.5 for x in (-5, 5, -3.5, -1.5, -0.5, 5.5)],
        ),  # leaf + (value reached - value left)
        ({"credit": "siblings"}, [-1, 1, -1, 1, -1, 1]),
        ({"credit": "depth"}, [-1, 1, *scored([1.0, 2, 5, 8])]),
        (
            {"credit": "depth", "scope": "tree", "ddof": 1},
            [-(0.5**0.5), 0.5**0.5, *(0.75**0.5 * x for x in scored([1.0, 2, 5, 8]))],
        ),
    ],
)
def test_credit_of_a_small_tree_by_hand(options, expected):
    _, rollout, advantages = by_hand([1.0, 2, 5, 8], **DEPTH_TWO, **options)
    assert advantages.transition.tolist() == pytest.approx(expected, abs=1e-5)
    assert rollout.plan.depth[rollout.edge].tolist() == [1, 1, 2, 2, 2, 2]
    assert advantages.leaf.tolist() == pytest.approx(
        expected[2:] if options.get("ddof") else scored([1.0, 2, 5, 8]), abs=1e-5
    )


TREE_OPTIONS = {  # options, and the rule: rollout, rewards, their z-scores -> credit
    "leaf": ({}, lambda grown, r, z: credit.spread(grown, z)),
    "backup": (
        {"credit": "backup", "temperature": 0.1},
        lambda grown, r, z: credit.tree_backup(grown, z, temperature=0.1),
    ),
    "td, clipped after the sum": (
        {"credit": "td", "adv_clip": 1.6},
        lambda grown, r, z: (credit.spread(grown, z) + credit.td(grown, z)).clamp(-1.6, 1.6),
    ),
    **{
        f"depth, {fusion}, {scope}": (
            {"credit": "depth", "fusion": fusion, "scope": scope, "ddof": 1},
            lambda grown, r, z, options={"weighting": fusion, "scope": scope}: (
                credit.branch(grown, r, **options, ddof=1, eps=0.0).transition
            ),
        )
        for fusion in ("mean", "path", "recursive")
        for scope in ("prompt", "tree")
    },
    # rewards in their own unit, where eps is half of a std
    "siblings": (
        {"credit": "siblings", "eps": 0.5},
        lambda grown, r, z: credit.siblings(grown, r.total, valid=r.valid, eps=0.5),
    ),
}


@pytest.mark.parametrize("holes", [False, True], ids=["all valid", "some invalid"])
@pytest.mark.parametrize("name", TREE_OPTIONS)
def test_options_of_credit_are_those_of_its_rules(name, holes):
    """test_credit.py holds the rules to their definitions. No row trains an edge that is above an
    invalid leaf alone."""
    options, rule = TREE_OPTIONS[name]
    deep = {**DEPTH_TWO, "window": {"schedule": "frozen", "size": 3, "low": 1}}
    algorithm = make(**{**deep, "eps": 0.0, **options})
    rollout = roll_out(ToyPolicy(0.5), algorithm, copies=2, prompts=1)
    rollout = replace(rollout, log_prob=3 * rollout.log_prob)
    reward = rewards_of(torch.cat([torch.full((1,), NAN if holes else 1.0), torch.randn(15)]))
    advantages = advantages_of(algorithm, rollout, reward)
    own = {"ddof": algorithm.config.ddof, "eps": algorithm.config.eps}
    z = credit.group_relative(
        reward.total, rollout.group, valid=reward.valid, clip=algorithm.config.adv_clip, **own
    )
    z = torch.where(reward.valid, z, NAN)
    assert torch.allclose(advantages.transition, rule(rollout, reward, z), atol=1e-6)
    rows = algorithm.columns(rollout, advantages, seed=0, iteration=0)
    trained = {int((rollout.dst == d).nonzero()) for d in rows.dst}
    assert (int(rollout.leaf_edge[0]) in trained) != holes


def test_a_fan_compares_the_branches_of_one_step():
    """TempFlow-GRPO: steps 0 and 4, two branches each, two copies; what a whole step earned more
    than another says nothing."""
    fan = {"plan": "fan", "tree": {"steps": (0, 4), "children": 2}, "credit": "siblings"}
    _, rollout, advantages = by_hand([1.0, 2, 50, 90, -3, -9, 4, 4], **fan)
    assert advantages.transition.tolist() == pytest.approx([-1, 1, -1, 1, 1, -1, 0, 0], abs=1e-5)
    assert rollout.plan.depth[rollout.edge].tolist() == [0, 0, 4, 4] * 2
    assert advantages.leaf.tolist() == pytest.approx(
        scored([1.0, 2, 50, 90, -3, -9, 4, 4]), abs=1e-5
    )


def test_granular_adds_the_scores_of_every_stride():
    """Steps 0 and 3, branches a and b, strides 1 and 2: leaves a1 a2 b1 b2 of each step. Strides
    that agree add up, others cancel."""
    leaf = [1.0, 10, 2, 30, 5, 9, 7, 3]
    algorithm, rollout, advantages = by_hand(leaf, **GRANULAR, credit="granular")
    assert advantages.transition.tolist() == pytest.approx([-2, 2, 0, 0], abs=1e-5)
    rows = algorithm.columns(rollout, advantages, seed=0, iteration=0)
    assert rows.adv.tolist() == pytest.approx([-2, 2], abs=1e-5)
    assert set(rows.sigma.tolist()) == {1.0}
    _, _, plain = by_hand(leaf, **GRANULAR)
    mean = float(advantages.leaf[:2].mean())
    assert plain.transition[0].item() == pytest.approx(mean, abs=1e-5)


def test_several_rewards_are_scored_before_any_rule_of_their_own():
    """combine=advantages: two rewards of scales 1 and 1000 count alike, under depth as under
    leaf."""
    a, b = torch.tensor([1.0, 2, 3, 6]), torch.tensor([3000.0, 1000, 2000, 2000])
    reward = rewards_of(a + b, raw={"a": a, "b": b}, weights={"a": 1.0, "b": 1.0})
    z = torch.tensor(scored(a.tolist())) + torch.tensor(scored(b.tolist()))
    for options in ({}, {"credit": "depth"}, {"credit": "siblings"}):
        algorithm = make(**DEPTH_TWO, combine="advantages", eps=0.0, **options)
        rollout = roll_out(ToyPolicy(0.5), algorithm, copies=1, prompts=1)
        leaf = algorithm.leaf_advantages(reward, rollout.group)
        assert torch.allclose(leaf, z.float(), atol=1e-5)
        last = algorithm.advantages(rollout, leaf).transition[2:].tolist()
        pairs = (z.view(2, 2) - z.view(2, 2).flip(1)).sign().flatten().tolist()
        expected = {"leaf": z.tolist(), "depth": scored(z.tolist()), "siblings": pairs}[
            algorithm.config.credit
        ]
        assert last == pytest.approx(expected, abs=1e-5)


def test_kept_samples_are_the_best_and_worst_of_each_group():
    """Eight samples, keep 4: the two highest and lowest; all their steps and no other's are
    trained."""
    algorithm = make(keep=4)
    reward = torch.randn(3, 8)
    _, rollout, advantages, rows = prepared(algorithm, reward=reward.flatten())
    order = reward.argsort(1)
    expected = {8 * p + int(i) for p in range(3) for i in [*order[p, :2], *order[p, -2:]]}
    of = torch.arange(24).repeat_interleave(7)
    assert {int(of[i]) for d in rows.dst for i in torch.nonzero(rollout.dst == d)} == expected
    assert len(rows) == 12 * 7
    every = credit.group_relative(reward.flatten(), rollout.group)
    assert torch.equal(advantages.leaf[sorted(expected)], every[sorted(expected)])


# --- rows that leave one state share its forward


@pytest.mark.parametrize(
    ("options", "init", "copies", "states", "rows"),
    [
        (BRANCH, "sample", 2, 1 + 2 + 2 + 4 * 4, 2 + 2 + 4 * 5),  # per tree
        (
            {"plan": "tree", "tree": {"children": 3}, "window": {"schedule": "frozen", "size": 3}},
            "sample",
            1,
            1 + 3 + 9,
            3 + 9 + 27,
        ),
        ({"plan": "fan", "tree": {"children": 4}, "credit": "siblings"}, "sample", 2, 7, 28),
        ({"plan": "granular", "tree": {"children": 3, "steps": (0, 2, 5)}}, "sample", 2, 3, 9),
        ({}, "sample", 5, 7, 7),
        ({}, "group", 5, 6 + 1 / 5, 7),  # the first state belongs to all five samples
    ],
)
def test_rows_of_one_state_share_a_network_row(options, init, copies, states, rows):
    """Edges are trained, states are evaluated; in micro-batches no state is
    evaluated twice either."""
    algorithm, policy = make(**options), ToyPolicy(0.5)
    rollout = roll_out(policy, algorithm, copies=copies, prompts=1, sampler=shared(init))
    edges = Advantages(leaf=torch.ones(len(rollout.leaf)), transition=torch.randn(len(rollout.src)))
    batch = algorithm.columns(rollout, edges, seed=0, iteration=0)
    assert (
        len(batch)
        == copies * rows
        == algorithm.most_rows(rollout.plan, copies * rollout.plan.leaves)
    )
    policy.rows = 0
    _, whole = backward(algorithm, policy, rollout, batch)
    assert (
        policy.rows == round(copies * states) == torch.unique(algorithm.network_rows(batch)).numel()
    )
    policy.zero_grad()
    policy.rows = 0
    objective.accumulate(
        algorithm, policy, rollout, batch, micro=2, total_weight=1.0, backward=torch.Tensor.backward
    )
    assert policy.rows == round(copies * states)
    assert float((gradient(policy.net) - whole).abs().max()) < 2e-6 * float(whole.abs().max())


@pytest.mark.parametrize(
    "options", [{**BRANCH, "tree": {"splits": (0, 2), "correlation": 1.0}}, DEPTH_TWO, GRANULAR]
)
def test_ratios_of_forking_plans_are_one_at_the_behaviour_policy(options):
    """Three prompts, two copies each: siblings find the state, the prompt and the step that they
    came from."""
    algorithm = make(**options)
    policy, rollout, _, rows = prepared(algorithm, ToyPolicy(0.5), copies=2)
    scores = algorithm.score(policy, rollout, rows)
    assert (scores["log_prob"] - rows.log_prob).abs().max() < 2e-6
    assert set(rows.prompt.tolist()) == {0, 1, 2}
    assert torch.unique(rows.src).numel() < len(rows)


# --- what forks measure, and a window that follows it


def test_observed_variances_are_those_of_the_tree():
    """Leaves 1 2 | 5 8: the first step decides 2.5^2, the second (2 x .5^2 + 2 x 1.5^2) / 4; a path
    observes nothing."""
    algorithm = make(**DEPTH_TWO)
    rollout = roll_out(ToyPolicy(0.5), algorithm, copies=1, prompts=1)
    observed = algorithm.observe(rollout, rewards_of([1.0, 2, 5, 8]))
    assert observed == {"tree/variance/1": 6.25, "tree/variance/2": 1.25}
    assert algorithm.observe(rollout, rewards_of([1.0, NAN, 5, 9])) == pytest.approx(
        {"tree/variance/1": 8.0, "tree/variance/2": 8 / 3}
    )
    algorithm.remember(observed)
    assert algorithm.memory == {}  # no schedule asks for it
    path = make()
    assert path.observe(roll_out(ToyPolicy(), path), rewards_of(torch.randn(24))) == {}


def adaptive(**window):
    return make(
        plan="tree", tree={"children": 2}, window={"schedule": "adaptive", "size": 2, **window}
    )


def start(algorithm, iteration=0):
    plan = algorithm.plan(GRID, sampler=SAMPLER, iteration=iteration, seed=0)
    return int(plan.depth[plan.trained].min())


def test_memory_is_a_moving_average_with_weight_a_fifth():
    algorithm = adaptive()
    algorithm.remember({"tree/variance/0": 2.0})
    algorithm.remember({"tree/variance/0": 7.0, "tree/variance/1": 1.0})
    assert algorithm.memory == pytest.approx(
        {"tree/variance/0": 0.8 * 2 + 0.2 * 7, "tree/variance/1": 1.0}
    )


def test_an_adaptive_window_looks_everywhere_first_and_then_goes_where_variance_is():
    """Two of steps 0..6: places 0..5. Step i decides variance[i]; the best sum of two neighbours is
    at 3."""
    algorithm, variance = adaptive(), [1.0, 4, 0, 5, 4, 1, 1]
    seen = []
    for i in range(9):
        seen.append(start(algorithm, i))
        algorithm.remember(
            {f"tree/variance/{d}": variance[d] for d in range(seen[-1], seen[-1] + 2)}
        )
    assert seen[:6] == [0, 1, 2, 3, 4, 5] and seen[6:] == [3, 3, 3]
    algorithm.memory |= {"tree/variance/0": 6.0}  # 6 + 4 against 5 + 4
    assert start(algorithm) == 0
    other = adaptive()
    other.memory = dict(algorithm.memory)  # as a checkpoint brings it back
    assert start(other) == 0


def test_ties_go_to_the_earliest_place_and_the_range_is_kept():
    algorithm = adaptive(low=1, high=6, stride=2)
    algorithm.memory = {f"tree/variance/{d}": 1.0 for d in range(7)}
    assert start(algorithm) == 1
    # places 1 and 3; the window 5, 6 would leave the range
    algorithm.memory |= {
        "tree/variance/5": 9.0,
        "tree/variance/6": 9.0,
    }
    assert start(algorithm) == 1
    algorithm.memory |= {"tree/variance/4": 2.0}
    assert start(algorithm) == 3
    with pytest.raises(ValueError, match="a window of 2 steps does not fit"):
        start(adaptive(low=6))


# --- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"credit": "siblings"},
            "algorithm.credit=siblings compares children of one node, and plan=full never forks",
        ),
        (
            {"plan": "fan", "tree": {"children": 1}, "credit": "siblings"},
            "algorithm.tree.children=1 leaves credit=siblings nothing",
        ),
        (
            {**GRANULAR, "tree": {"children": 1}, "credit": "granular"},
            "algorithm.tree.children=1 leaves credit=granular nothing",
        ),
        ({"plan": "fan", "credit": "granular"}, "set algorithm.plan=granular"),
        (
            {"plan": "window", "window": {"schedule": "adaptive"}},
            "algorithm.window.schedule=adaptive measures how children differ",
        ),
        ({"prune": {"width": "parent"}}, "set algorithm.plan=branch"),
        (
            {"plan": "tree", "window": {"size": 2}, "prune": {"depth": 1}},
            "set algorithm.plan=branch",
        ),
        (
            {"plan": "branch", "tree": {"splits": (0,)}, "prune": {"depth": 7}},
            "algorithm.prune.depth=7 leaves out every noisy step",
        ),
        ({"plan": "branch", "tree": {"splits": (0, 7)}}, "step 7 is the last of the schedule"),
        ({"plan": "fan", "tree": {"steps": ()}}, "must be one or more steps"),
        (
            {"plan": "tree", "window": {"schedule": "geometric", "size": 2, "rate": 1.0}},
            "must lie between 0 and 1",
        ),
    ],
)
def test_plans_that_a_setting_does_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options).plan(GRID, sampler=SAMPLER, iteration=0, seed=0)


def test_siblings_of_a_shared_root_are_accepted():
    algorithm = make(credit="siblings")
    plan = algorithm.plan(GRID, sampler=shared("group"), iteration=0, seed=0)
    assert plan.init == "group" and plans.nfe(plan, 4) == 1 + 4 * 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"credit": "depth", "std": "global"},
            "algorithm.std=global has no meaning for credit=depth",
        ),
        (
            {"credit": "siblings", "std": None},
            "algorithm.std=None has no meaning for credit=siblings",
        ),
        (
            {"credit": "granular", "std": None},
            "algorithm.std=None has no meaning for credit=granular",
        ),
        (
            {"plan": "branch", "keep": 4},
            "algorithm.keep=4 leaves out whole samples, which plan=branch",
        ),
        ({"credit": "depth", "keep": 4}, "with credit=depth would not"),
        ({"plan": "fan", "timestep_fraction": 0.5}, "samples of plan=fan share them"),
        (
            {"plan": "tree", "ratio": "sequence"},
            "algorithm.ratio=sequence is one ratio a sample, and samples of plan=tree share steps",
        ),
        (
            {"plan": "branch", "ratio": "guard", "tree": {"correlation": 1.0}},
            "algorithm.ratio=guard reads each step's own noise",
        ),
        (
            {"plan": "tree", "tree": {"correlation": 1.0}},
            "algorithm.tree.correlation=1.0 is of plan=branch, and the plan is tree",
        ),
        (
            {"plan": "fan", "tail": 0.4},
            (
                "algorithm.tail=0.4 shortens what follows the last noisy step, and plan=fan has"
                " several"
            ),
        ),
        ({"ratio": "guard", "sde": "cps"}, "not with sde=cps"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        ALGORITHM.Config(**options)
