"""Intervals against closed forms, and their coverage against the promised level."""

import itertools
from statistics import NormalDist

import numpy as np
import pytest
import torch

from flowrl.runtime.statistics import mean_interval, paired_bootstrap

Z = NormalDist().inv_cdf(0.975)


def test_interval_of_a_mean_approaches_the_normal_one():
    values = np.random.default_rng(0).normal(3.0, 2.0, 2000)
    out = mean_interval(values)
    half = Z * values.std() / len(values) ** 0.5
    assert out.mean == pytest.approx(values.mean()) and out.n == 2000
    assert out.ci == pytest.approx((values.mean() - half, values.mean() + half), abs=0.05 * half)


def test_three_values_by_enumeration():
    """Of the 27 equally likely resamples of (0, 0, 3) the means are 0, 1, 2, 3 with probabilities
    8, 12, 6, 1 of 27."""
    means = sorted(sum(draw) / 3 for draw in itertools.product([0.0, 0.0, 3.0], repeat=3))
    assert [means.count(float(k)) for k in range(4)] == [8, 12, 6, 1]
    # quartiles of that law: 25% -> 0, 75% -> between 20/27 and 26/27
    assert mean_interval([0.0, 0.0, 3.0], level=0.5).ci == (0.0, 2.0)
    assert mean_interval([0.0, 0.0, 3.0], level=0.4).ci == (1.0, 1.0)  # 30% and 70% both fall on 1


def test_pairing_removes_what_the_pairs_share():
    rng = np.random.default_rng(1)
    shared = rng.normal(0, 10, 400)
    before, after = shared + rng.normal(0, 0.1, 400), shared + 0.5 + rng.normal(0, 0.1, 400)
    out = paired_bootstrap(before, after)
    half = Z * (after - before).std() / 20
    assert out.difference == pytest.approx((after - before).mean())
    assert out.ci == pytest.approx((out.difference - half, out.difference + half), abs=0.1 * half)
    assert out.ci[0] > 0.4 and out.n == out.clusters == 400


def test_a_constant_shift_has_a_point_for_an_interval():
    before = np.arange(10.0)
    out = paired_bootstrap(before, before + 2)
    assert out.difference == 2 and out.ci == (2.0, 2.0) and out.p == pytest.approx(2 / 10001)


def test_no_difference_has_p_one_and_swapping_sides_flips_the_sign():
    values = np.random.default_rng(2).normal(size=50)
    assert paired_bootstrap(values, values).p == 1.0
    other = np.random.default_rng(3).normal(0.3, 1, 50)
    there, back = paired_bootstrap(values, other), paired_bootstrap(other, values)
    assert there.difference == -back.difference and there.p == back.p
    assert there.ci == pytest.approx((-back.ci[1], -back.ci[0]))


def test_p_value_approaches_the_normal_one():
    rng = np.random.default_rng(4)
    difference = rng.normal(0.0, 1.0, 900)
    difference += 2.0 / 30 - difference.mean()  # two standard errors from zero
    difference = (difference - difference.mean()) / difference.std() + 2.0 / 30
    assert paired_bootstrap(np.zeros(900), difference).p == pytest.approx(
        2 * NormalDist().cdf(-2.0), abs=0.01
    )


def test_clusters_of_identical_images_count_once():
    """n copies of each of K values carry the information of K values: the clustered interval is
    that of the K values."""
    per_prompt = np.random.default_rng(5).normal(size=40)
    images, prompts = np.repeat(per_prompt, 16), np.repeat(np.arange(40), 16)
    clustered = paired_bootstrap(np.zeros(640), images, groups=prompts)
    assert clustered.clusters == 40 and clustered.n == 640
    assert clustered.ci == pytest.approx(paired_bootstrap(np.zeros(40), per_prompt).ci)
    naive = paired_bootstrap(np.zeros(640), images)
    width = (clustered.ci[1] - clustered.ci[0]) / (naive.ci[1] - naive.ci[0])
    assert width == pytest.approx(4.0, rel=0.1)  # sqrt(16)


def test_clusters_of_one_are_no_clusters_and_unequal_ones_weigh_by_size():
    rng = np.random.default_rng(6)
    values = rng.normal(size=30)
    assert mean_interval(values, groups=list(range(30))) == mean_interval(values)
    # aa: 1, ab and ba: 2, bb: 5; the middle half is 2
    for level, ci in ((0.4, (2.0, 2.0)), (0.9, (1.0, 5.0))):
        out = mean_interval([1.0, 1.0, 1.0, 5.0], groups=list("aaab"), level=level)
        assert out.mean == 2.0 and out.ci == ci


@pytest.mark.parametrize("clustered", [False, True])
def test_the_interval_covers_the_truth_as_often_as_it_promises(clustered):
    rng, hits, trials = np.random.default_rng(7), 0, 1000
    for trial in range(trials):
        if clustered:
            groups = np.repeat(np.arange(120), 4)
            difference = rng.normal(0.2, 1, 120)[groups] + rng.normal(0, 0.5, 480)
        else:
            difference = (rng.random(200) < 0.6).astype(float) - (rng.random(200) < 0.4)
            groups = None
        how = {"groups": groups, "resamples": 1000, "seed": trial}
        out = paired_bootstrap(np.zeros(len(difference)), difference, **how)
        hits += out.ci[0] <= 0.2 <= out.ci[1]
    # 0.95 +- 3 standard errors of 1000 trials, less 0.005: percentile intervals are a bit narrow
    assert 0.925 <= hits / trials <= 0.97


def test_the_seed_decides_and_memory_blocks_do_not():
    values = np.random.default_rng(8).normal(size=300)
    first, again, other = (mean_interval(values, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_tensors_lists_and_bools_are_numbers():
    a, b = [0, 0, 1, 0], [1, 0, 1, 1]
    expected = paired_bootstrap(np.array(a, float), np.array(b, float))
    assert paired_bootstrap(torch.tensor(a).bool(), torch.tensor(b).float()) == expected
    assert paired_bootstrap(a, b) == expected


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: paired_bootstrap([1.0, 2.0], [1.0]), "2 values before but 1 after"),
        (lambda: paired_bootstrap([1.0, np.nan], [1.0, 2.0]), "1 of 2 values of before are NaN"),
        (lambda: mean_interval([]), "at least one"),
        (lambda: mean_interval([1.0, 2.0], groups=[0]), "groups has shape"),
        (lambda: mean_interval([1.0], level=95), "level=95"),
    ],
)
def test_bad_input_is_one_sentence(call, said):
    with pytest.raises(ValueError, match=said):
        call()
