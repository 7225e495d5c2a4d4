"""What methods on the forward process share: noise levels, random draws, rows, references."""

import pytest
import torch
from toy import (
    GRID,
    SAMPLER,
    Fixed,
    ToyPolicy,
    advantages_of,
    noised,
    prepared,
    replace,
    rewards_of,
    roll_out,
)

from flowrl.algorithms import awm, crd, dgpo, dpo, nft, raft
from flowrl.algorithms.common import forward
from flowrl.samplers import sigmas
from flowrl.types import Advantages

METHODS = {
    "nft": nft.ALGORITHM,
    "awm": awm.ALGORITHM,
    "dgpo": dgpo.ALGORITHM,
    "crd": crd.ALGORITHM,
    "dpo": dpo.ALGORITHM,
    "raft": raft.ALGORITHM,
}
LEVELS = ["schedule", "stratified", "logit_normal", "uniform"]
MOVING = {"clip": None, "reference": "ema"}
NORMAL = torch.distributions.Normal(0.0, 1.0)


class Shared(forward.ForwardMethod):
    shared_noise = True


def make(cls=forward.ForwardMethod, **options):
    return cls(cls.Config(**options))


def drawn(algorithm, names, grid=GRID):
    return algorithm.drawn_levels(algorithm.plan(grid, sampler=SAMPLER, iteration=0, seed=0), names)


def everyone(rollout):
    """Advantages with which every sample is trained."""
    return Advantages(leaf=torch.linspace(-1, 2, len(rollout.leaf)))


# ---------------------------------------------------------------------------
# noise levels


def test_levels_of_the_schedule_are_drawn_without_replacement_from_its_first_and_last_allowed():
    """8 steps, first=2, range=.75: levels 2..5, each missing equally often when 3 are drawn."""
    sigma, number = drawn(make(first=2, range=0.75, steps=3), torch.arange(400))
    assert torch.equal(sigma, GRID[2:6][number])
    assert all(len(set(row)) == 3 for row in number.tolist())
    missing = [({0, 1, 2, 3} - set(row)).pop() for row in number.tolist()]
    assert all(abs(missing.count(i) - 100) < 35 for i in range(4))


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 7), ({"first": 1}, 7), ({"range": 0.5}, 4), ({"levels": "stratified"}, 8)],
)
def test_without_steps_all_allowed_levels_are_trained_but_a_random_one_of_the_whole_schedule(
    options, most
):
    """int(8 x .99) = 7 of all 8 (NFT); none is dropped where first, range or strata say which they
    are."""
    algorithm = make(**options)
    plan = algorithm.plan(GRID, sampler=SAMPLER, iteration=0, seed=0)
    assert algorithm.draws(plan) == most and drawn(algorithm, torch.arange(5))[0].shape == (5, most)


@pytest.mark.parametrize(("steps", "levels"), [(3, 8), (5, 16), (14, 16), (26, 28), (28, 32)])
def test_strata_are_equal_parts_of_the_schedule(steps, levels):
    """Draw i lies in floor(i n / k) .. floor((i + 1) n / k) - 1, exactly (fp32 bounds would be off
    by one at 16 / 14), and reaches both."""
    _, number = drawn(
        make(levels="stratified", steps=steps), torch.arange(500), sigmas.linear(levels)
    )
    for i, column in enumerate(number.T):
        low, high = i * levels // steps, (i + 1) * levels // steps - 1
        assert (int(column.min()), int(column.max())) == (low, high)
        assert abs(float(column.double().mean()) - (low + high) / 2) < 0.1 * (high - low) + 1e-9


def test_logit_normal_levels_are_stratified_by_quantiles():
    """Draw i of 6: cdf(logit(s) - log(shift)) lies in [i/6, (i+1)/6), where a shift adds its
    logarithm to the logit."""
    for kappa in (1.0, 3.0):
        sigma, number = drawn(make(levels="logit_normal", steps=6, shift=kappa), torch.arange(300))
        quantile = NORMAL.cdf(torch.logit(sigma) - torch.tensor(kappa).log())
        inside = sigma > 0.0101
        assert torch.equal((quantile * 6).floor().long()[inside], number[inside])
        assert float(inside.double().mean()) > 0.99
        assert abs(float(quantile.mean()) - 0.5) < 0.01


def test_a_shift_of_three_moves_levels_towards_noise():
    """The official AWM: mean sigma .71 (Flow-Factory's sampler, shifted towards data, has .36).
    Exactly E sigmoid(z + log 3) = .716."""
    z = NORMAL.icdf((torch.arange(100000, dtype=torch.float64) + 0.5) / 100000)
    exact = float(torch.sigmoid(z + torch.tensor(3.0).log()).mean())
    sigma, _ = drawn(make(levels="logit_normal", steps=6, shift=3.0), torch.arange(2000))
    assert float(sigma.mean()) == pytest.approx(exact, abs=3e-3)
    assert exact == pytest.approx(0.71, abs=0.01)


def test_uniform_levels_are_stratified_and_stay_off_the_data():
    sigma, _ = drawn(make(levels="uniform", steps=4), torch.arange(1000))
    assert torch.equal((sigma * 4).floor().clamp(max=3).long(), torch.arange(4).expand(1000, 4))
    assert float(sigma.min()) == forward.LOWEST and float(sigma.max()) <= 1
    assert torch.allclose(sigma.mean(0), (torch.arange(4).double() + 0.5) / 4, atol=0.01)


@pytest.mark.parametrize("levels", ["logit_normal", "uniform"])
def test_continuous_levels_are_one_per_sample_unless_told(levels):
    plan = make().plan(GRID, sampler=SAMPLER, iteration=0, seed=0)
    assert make(levels=levels).draws(plan) == 1 and make(levels=levels, steps=20).draws(plan) == 20
    assert (
        make(levels=levels, steps=20).most_rows(plan, 8)
        == 8 * 20
        == 2 * make(levels=levels, steps=20, keep=4).most_rows(plan, 8)
    )


def test_continuous_levels_stay_where_the_model_knows_noise():
    """A grid that begins at 0.93, as Stable Diffusion's: beyond, its time stands still while v =
    (eps - x) / (1 - s) grows."""
    sigma, _ = drawn(make(levels="uniform", steps=4), torch.arange(500), grid=0.93 * GRID)
    assert float(sigma.max()) == 0.93 and float((sigma == 0.93).double().mean()) < 0.1


def test_settings_that_leave_no_level_are_refused():
    plan = make().plan(GRID, sampler=SAMPLER, iteration=0, seed=0)
    with pytest.raises(
        ValueError,
        match=(
            "algorithm.first=4, range=0.5 leave none of sampler.steps=8 .*; lower first or raise"
            " range"
        ),
    ):
        make(first=4, range=0.5).check(plan)
    with pytest.raises(
        ValueError,
        match=(
            "algorithm.steps=5 noise levels per sample, but sampler.steps=8 offers 4; choose at"
            " most that"
        ),
    ):
        make(range=0.5, steps=5).check(plan)
    with pytest.raises(ValueError, match="algorithm.steps=9 .* offers 8"):
        make(levels="stratified", steps=9).check(plan)
    with pytest.raises(ValueError, match="algorithm.steps=8 .* offers 7"):  # of a whole schedule
        make(steps=8).check(plan)
    make(first=3, range=0.5, steps=1).check(plan)
    more = make().plan(sigmas.linear(9), sampler=SAMPLER, iteration=0, seed=0)
    assert make(steps=8).most_rows(more, 5) == 5 * 8


# ---------------------------------------------------------------------------
# rows and their names


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("share", ["sample", "group", "all"])
def test_levels_are_shared_as_told_and_noise_is_each_samples_own(levels, share):
    algorithm = make(levels=levels, share=share, steps=3)
    rollout = roll_out(ToyPolicy(), algorithm)
    rows = algorithm.columns(rollout, everyone(rollout), seed=0, iteration=0)
    level = rows.sigma.view(3, 8, 3)  # prompts, copies, draws
    assert bool((level == level[:, :1]).all()) == (share != "sample")
    assert bool((level == level[:1, :1]).all()) == (share == "all")
    assert torch.unique(rows.noise_key).numel() == len(rows) == 72


@pytest.mark.parametrize("levels", LEVELS)
def test_shared_noise_is_one_per_group_and_fresh_at_each_level(levels):
    algorithm = make(Shared, levels=levels, share="group", steps=3)
    rollout = roll_out(ToyPolicy(), algorithm)
    noise = algorithm.columns(rollout, everyone(rollout), seed=0, iteration=0).noise_key.view(
        3, 8, 3
    )
    assert bool((noise == noise[:, :1]).all()) and torch.unique(noise).numel() == 9


def test_a_unit_is_a_group_at_one_draw_and_knows_how_many_members_the_group_has():
    """Samples without a signal are no rows, but count as members."""
    algorithm = make(share="group", steps=2)
    rollout = roll_out(ToyPolicy(), algorithm, copies=4)
    leaf = torch.tensor([1.0, -1, 0, 0, 2, -1, -1, 0, 0, 0, 0, 0])
    rows = algorithm.columns(rollout, Advantages(leaf=leaf), seed=0, iteration=0)
    assert rows.prompt.tolist() == [0] * 4 + [1] * 6
    assert rows.adv.tolist() == [
        1,
        1,
        -1,
        -1,
        2,
        2,
        -1,
        -1,
        -1,
        -1,
    ]
    assert rows.unit.tolist() == [0, 1] * 2 + [2, 3] * 3 and rows.members.tolist() == [4] * 10
    assert all(torch.unique(rows.sigma[rows.unit == u]).numel() == 1 for u in range(4))
    assert bool((rows.weight == 1).all())
    assert torch.equal(
        rollout.states[rows.state], rollout.leaves[leaf != 0].repeat_interleave(2, 0)
    )


def named(rollout, rows):
    """(name of the sample, level, noise) of each row, sorted: what is trained, wherever it lies.
    Levels to 1e-12 (SIMD's last bit)."""
    key_of_state = dict(zip(rollout.leaf.tolist(), rollout.leaf_key.tolist(), strict=True))
    levels = [round(s, 12) for s in rows.sigma.tolist()]
    return sorted(
        zip(
            (key_of_state[s] for s in rows.state.tolist()),
            levels,
            rows.noise_key.tolist(),
            strict=True,
        )
    )


def taken(rollout, order):
    """A rollout that holds these leaves, in this order, with groups renumbered as another process
    would have them."""
    fields = {
        name: getattr(rollout, name)[order]
        for name in ("leaf", "leaf_edge", "leaf_key", "group", "tree")
    }
    return replace(
        rollout, **{**fields, "group": torch.unique(fields["group"], return_inverse=True)[1]}
    )


@pytest.mark.parametrize("cls", [forward.ForwardMethod, Shared])
@pytest.mark.parametrize("share", ["sample", "group", "all"])
@pytest.mark.parametrize("levels", LEVELS)
def test_draws_depend_on_seed_iteration_and_sample_not_on_order_or_process(levels, share, cls):
    algorithm = make(cls, levels=levels, share=share, steps=3)
    rollout = roll_out(ToyPolicy(), algorithm, copies=4)

    def drawn(order, seed=0, iteration=0):
        part = taken(rollout, order)
        return named(
            part,
            algorithm.columns(
                part, Advantages(leaf=torch.ones(len(order))), seed=seed, iteration=iteration
            ),
        )

    whole = drawn(torch.arange(12))
    assert drawn(torch.arange(12).flip(0)) == whole == drawn(torch.randperm(12))
    # two processes, groups whole
    assert sorted(drawn(torch.arange(4)) + drawn(torch.arange(4, 12))) == whole
    for other in (drawn(torch.arange(12), seed=1), drawn(torch.arange(12), iteration=1)):
        assert all(a[0] == b[0] and a[2] != b[2] for a, b in zip(other, whole, strict=True))
        assert [row[1] for row in other] != [row[1] for row in whole]


def test_two_methods_draw_differently():
    rollout = roll_out(ToyPolicy(), make(), copies=2)
    a, b = (
        make(cls).columns(rollout, everyone(rollout), seed=0, iteration=0)
        for cls in (forward.ForwardMethod, nft.ALGORITHM)
    )
    assert not torch.isin(a.noise_key, b.noise_key).any()


def test_a_groups_name_is_the_smallest_of_its_members():
    rollout = roll_out(ToyPolicy(), make(), copies=4)
    names = forward.group_keys(rollout)
    assert names.tolist() == [
        min(rollout.leaf_key[rollout.group == g].tolist()) for g in rollout.group.tolist()
    ]
    assert torch.unique(names).numel() == 3
    order = torch.randperm(12)
    assert torch.equal(forward.group_keys(taken(rollout, order)), names[order])


# ---------------------------------------------------------------------------
# who is trained


def test_members_are_neither_failed_nor_dropped_by_keep_but_may_lie_at_the_mean():
    """Rewards 0, 1, 2 and one failure: advantages -z, 0, z; the third group has no signal."""
    rollout = roll_out(ToyPolicy(), make(), copies=4)
    total = torch.tensor([0.0, 1, 2, torch.nan, 5, 1, 2, 4, 7, 7, 7, 7])
    leaf = advantages_of(make(), rollout, rewards_of(total))
    assert leaf.leaf.isnan().tolist() == total.isnan().tolist() and float(leaf.leaf[1]) == 0
    assert forward.members_with_signal(rollout, leaf)[0].tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert make().chosen(rollout, leaf)[0].tolist() == [0, 2, 4, 5, 6, 7]
    two = advantages_of(make(keep=2), rollout, rewards_of(total))
    assert (
        forward.members_with_signal(rollout, two)[0].tolist()
        == [0, 2, 4, 5]
        == make().chosen(rollout, two)[0].tolist()
    )
    four = advantages_of(make(keep=4), rollout, rewards_of(total))
    # a group of at most `keep` is kept whole
    assert torch.equal(four.leaf.nan_to_num(9), leaf.leaf.nan_to_num(9))


@pytest.mark.parametrize("name", METHODS)
def test_nothing_of_a_failed_sample_is_trained(name):
    algorithm = make(METHODS[name])
    total = torch.arange(24.0)
    total[[3, 20]] = torch.nan
    _, rollout, _, rows = prepared(algorithm, reward=total)
    assert len(rows)
    assert not torch.isin(rollout.leaf[[3, 20]], rows.state).any()
    assert not rows.adv.isnan().any()


@pytest.mark.parametrize("name", [*METHODS, "rwr"])
def test_a_group_of_equal_rewards_is_not_trained(name):
    """RAFT's and DPO's ties included: the first group's rewards are all .7; then those
    of all groups."""
    algorithm = make(
        METHODS.get(name, raft.ALGORITHM), **({"select": "softmax"} if name == "rwr" else {})
    )
    reward = torch.cat([torch.full((8,), 0.7), torch.rand(16)])
    _, _, _, rows = prepared(algorithm, reward=reward)
    assert set(rows.prompt.tolist()) == {1, 2}
    assert len(prepared(algorithm, reward=torch.full((24,), 0.7))[3]) == 0


# ---------------------------------------------------------------------------
# errors, views and references


def test_errors_are_those_of_velocity_noise_or_data():
    """eps_hat = x + (1-s) v and x0_hat = x - s v miss eps and x0 by (1-s) and s times what v misses
    u by."""
    _, rollout, _, rows = prepared(make())
    x0, x, s, u = noised(rollout, rows)
    v, eps = torch.randn_like(u), u + x0
    misses = {"velocity": v - u, "eps": x + (1 - s) * v - eps, "x0": x - s * v - x0}
    for error, miss in misses.items():
        assert torch.allclose(
            make(error=error).noised(rollout, rows).error(v),
            miss.square().mean(1),
            rtol=1e-4,
            atol=1e-6,
        )


def test_fit_is_minus_the_velocity_error():
    algorithm = make(error="x0")
    policy, rollout, _, rows = prepared(algorithm)
    _, x, _, u = noised(rollout, rows)
    v = policy.velocity(x, rows.sigma, None, rows.prompt)
    assert torch.allclose(algorithm.fit(policy, rollout, rows), -(v - u).square().mean(1))


@pytest.mark.parametrize("reference", ["frozen", "ema"])
@pytest.mark.parametrize("name", METHODS)
def test_kl_is_the_mean_square_distance_of_velocities_to_what_the_policy_is_held_to(
    name, reference
):
    algorithm = make(METHODS[name], kl_weight=0.5, reference=reference, steps=2)
    policy = ToyPolicy(0.3)
    torch.nn.init.normal_(policy.anchor[2].bias)
    torch.nn.init.normal_(policy.old[2].bias)
    _, rollout, _, rows = prepared(algorithm, policy)
    scores = algorithm.score(policy, rollout, rows)
    _, x, _, _ = noised(rollout, rows)
    v = policy.velocity(x, rows.sigma, None, rows.prompt)
    # DGPO's loss compares with the moving reference, its KL stays on the untrained model
    moving = reference == "ema" and name != "dgpo"
    with policy.view("anchor" if moving else "reference"):
        held = policy.velocity(x, rows.sigma, None, rows.prompt)
    assert torch.allclose(scores["kl"], (v - held).square().mean(1), atol=1e-6)
    assert scores["kl"].requires_grad
    without = algorithm.loss({**scores, "kl": 0 * scores["kl"]}, rows).loss
    rho = (rows.adv / 10 + 0.5) if name == "crd" else 1.0  # CRD holds better samples more
    floor = 1e-4 if name == "crd" else 0.0
    held_by = (rows.weight * (floor + rho * (0.5 - floor)) * scores["kl"]).sum()
    assert (algorithm.loss(scores, rows).loss - without).item() == pytest.approx(
        held_by.item(), rel=1e-3
    )


def test_other_views_have_no_gradient_and_equal_weights_share_a_forward():
    """Only without guidance, and never for the reference, which is no copy of the weights."""
    _, rollout, _, rows = prepared(make())
    v = torch.randn(len(rows), 2).requires_grad_()
    x = torch.zeros(len(rows), 2)

    def other(view, guidance="none", same=True):
        policy = Fixed(v, 2 * v, 3 * v)
        policy.same = lambda a, b: same
        out = make().other(policy, view, rollout, rows, x, v, guidance)
        assert not out.requires_grad
        return torch.unique((out / v.detach()).round()).tolist(), policy.guidances

    assert other("old") == ([1], []) and other("old", same=False) == ([2], [("old", "none")])
    assert other("anchor", 4.5) == ([2], [("anchor", 4.5)])
    assert other("reference") == (
        [3],
        [("reference", "none")],
    )


def test_the_reference_is_frozen_averaged_or_reset():
    """ema: d = reference_decay after each iteration; reset: the policy itself after every
    reference_every-th."""
    frozen, ema = (
        make(dgpo.ALGORITHM, clip=None),
        make(dgpo.ALGORITHM, clip=None, reference="ema", reference_decay=0.9),
    )
    reset = make(dgpo.ALGORITHM, clip=None, reference="reset", reference_every=3)
    assert (frozen.needs, ema.needs, reset.needs) == (
        {"leaves", "reference"},
        {"leaves", "anchor"},
        {"leaves", "anchor"},
    )
    assert [frozen.follow(i + 1, i) for i in range(3)] == [{}] * 3
    assert [ema.follow(i + 1, i) for i in range(3)] == [{"anchor": 0.9}] * 3
    assert [reset.follow(i + 1, i) for i in range(6)] == [{}, {}, {"anchor": 0.0}] * 2


@pytest.mark.parametrize(
    ("name", "options", "needs", "rollout"),
    [
        ("nft", {"kl_weight": 0.0}, {"old"}, ("old", "none")),
        ("awm", {}, {"old"}, ("default", "none")),
        ("awm", {"ema_weight": 0.0}, set(), ("default", "none")),
        ("awm", {"off_policy": True, "kl_weight": 1e-3}, {"old", "reference"}, ("old", "none")),
        ("dgpo", {}, {"old", "reference"}, ("default", None)),
        ("dgpo", {"clip": None}, {"reference"}, ("default", None)),
        ("dgpo", MOVING, {"anchor"}, ("default", None)),
        ("dgpo", {**MOVING, "kl_weight": 1.0}, {"anchor", "reference"}, ("default", None)),
        ("crd", {}, {"old", "reference"}, ("default", "none")),
        ("crd", {"kl_weight": 0.0}, {"old"}, ("default", "none")),
        ("dpo", {}, {"reference"}, ("default", None)),
        ("dpo", {"reference": "reset"}, {"anchor"}, ("default", None)),
        ("raft", {}, set(), ("default", None)),
        ("raft", {"kl_weight": 1e-3, "reference": "ema"}, {"anchor"}, ("default", None)),
    ],
)
def test_needs_name_the_weights_that_the_loss_reads_and_who_samples(name, options, needs, rollout):
    algorithm = make(METHODS[name], **options)
    assert algorithm.needs == {"leaves"} | needs
    assert (algorithm.rollout_view, algorithm.guidance) == rollout
    assert algorithm.plan(GRID, sampler=SAMPLER, iteration=0, seed=0).solver == "dpm2"
    assert not set(algorithm.follow(1, 0)) - needs
