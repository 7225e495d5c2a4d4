"""The rule that says whether a held-out reward is past its peak, by hand and on planted curves."""

import math

import pytest
import torch

from flowrl.config.training import WatchConfig
from flowrl.samplers import keys
from flowrl.training.watch.peak import find_peak, noise
from flowrl.training.watch.watch import Watch, nearest

RULE = WatchConfig(held_out="true")
SIGMA = 0.05  # of one iteration


def curve(*values):
    return [(i + 1, value) for i, value in enumerate(values)]


def noisy(course, seed):
    """A course (n,) with noise of SIGMA, as numbers."""
    jitter = keys.gaussian(keys.key(torch.tensor([seed]), "curve"), (len(course),))[0]
    return (course + SIGMA * jitter).tolist()


def alarm(values, **settings):
    """(iteration of the alarm, iteration of the peak found there), or None."""
    watch = Watch(RULE.model_copy(update=settings), world=None)
    for number, value in enumerate(values, 1):
        out = watch.follow(number, {"reward/true/mean": value})
        if out.get("watch/past_peak"):
            return number, out["watch/peak"]
    return None


def test_noise_is_half_the_mean_square_of_differences():
    """Differences 2, -2, 2: squares 4, so s^2 = 2. A slope of 0.01 adds half of 0.01^2."""
    assert noise([0, 2, 0, 2]) == pytest.approx(math.sqrt(2))
    assert noise([0.01 * i for i in range(50)]) == pytest.approx(0.01 / math.sqrt(2))
    assert noise([3.0]) == noise([]) == 0


def test_the_peak_by_hand():
    """Values 1 3 2 6 0 1, means of two: 2, 2.5, 4, 3, 0.5. The best is of iterations 3 and 4, 3.5
    in the middle; checkpoints 2 and 3 sampled them. Now: 0.5, two windows on, which share no
    iteration. Squares of differences: 4, 1, 16, 36, 1, so s^2 = 5.8, and the error of a difference
    of two means of two is s."""
    peak = find_peak(curve(1, 3, 2, 6, 0, 1), smooth=2)
    assert (peak.now, peak.best, peak.iteration, peak.weights) == (0.5, 4, 3.5, 2.5)
    assert peak.error == pytest.approx(math.sqrt(5.8))
    assert peak.below(1.4) and not peak.below(1.5)  # 3.5 / 2.408 = 1.453


def test_windows_that_overlap_differ_by_what_they_do_not_share():
    """One window on, of three: one iteration is swapped, so the error is s * sqrt(2) / 3."""
    peak = find_peak(curve(1, 2, 6, 0), smooth=3)
    assert peak.best == 3 and peak.now == pytest.approx(8 / 3)
    assert peak.error == pytest.approx(math.sqrt((1 + 16 + 36) / 6) * math.sqrt(2) / 3)


def test_a_peak_is_none_before_the_first_window_and_at_the_end_of_a_rise():
    assert find_peak(curve(1, 2), smooth=3) is None
    peak = find_peak(curve(1, 2, 3, 4), smooth=2)
    assert peak.best == peak.now == 3.5 and peak.error == 0 and not peak.below(4)
    assert find_peak(curve(5, 5, 1, 2), smooth=2, since=2).best == 1.5
    assert find_peak(curve(5, 5, 1, 2), smooth=2, since=3) is None


def test_a_curve_that_rises_and_falls_stops_soon_after_its_peak():
    """From 0.2 to 0.7 in 60 iterations and down again; four errors are 0.09, or 11 iterations."""
    course = 0.7 - 0.5 * (torch.arange(1, 121) - 60).abs() / 60
    for seed in range(10):
        stopped, peak = alarm(noisy(course, seed))
        assert 65 <= stopped <= 100 and abs(peak - 60) <= 12
    stopped, peak = alarm(course.tolist())
    assert 60 < stopped <= 72 and abs(peak - 60) <= 1


def false_alarms(seeds, iterations=300, **settings):
    """Share of flat noisy curves that raise an alarm."""
    flat = torch.full((iterations,), 0.5)
    return sum(alarm(noisy(flat, seed), **settings) is not None for seed in range(seeds)) / seeds


def test_a_noisy_flat_curve_rarely_stops():
    """The peak is chosen for being high, so that a curve which only jitters lies below it, too:
    3.1% of 1,000 seeds. The bound could fail: with two errors every curve stops."""
    assert false_alarms(40) <= 0.1
    assert false_alarms(5, errors=2.0) == 1


@pytest.mark.parametrize("shape", ["straight", "saturating"])
def test_a_rise_never_stops(shape):
    along = torch.arange(200) / 200
    course = along if shape == "straight" else 0.8 * (1 - torch.exp(-8 * along))
    assert alarm(course.tolist()) is None
    assert all(alarm(noisy(course, seed)) is None for seed in range(5))


def test_patience_is_for_iterations_in_a_row():
    values = [0.5, 0.51] * 10 + [0.3] * 30
    first = alarm(values, patience=1)[0]
    assert alarm(values, patience=4)[0] == first + 3
    assert alarm([*values[: first + 2], *[0.9] * 30], patience=4) is None


def test_iterations_without_a_score_are_left_out():
    watch = Watch(RULE.model_copy(update={"smooth": 2}), world=None)
    assert watch.follow(1, {"reward/true/mean": 1.0}) == {}
    assert watch.follow(2, {"reward/total": 1.0}) == {}
    assert watch.follow(3, {"reward/true/mean": 3.0})["watch/peak"] == 2
    assert Watch(WatchConfig(), world=None).follow(1, {"reward/true/mean": 1.0}) == {}


def test_lowering_multiplies_the_rate_and_looks_for_a_peak_anew():
    watch = Watch(RULE, world=None, lower=True)
    lowered = []
    for number, value in enumerate([0.5, 0.51] * 10 + [0.3, 0.31] * 20 + [0.1, 0.11] * 20, 1):
        if watch.follow(number, {"reward/true/mean": value}).get("watch/past_peak"):
            lowered.append(number)
    assert len(lowered) == 2 and 20 < lowered[0] < 40 and 60 < lowered[1] < 80
    assert watch.state["rate"] == pytest.approx(0.01)
    assert watch.peak.best == pytest.approx(0.505)  # of the whole run


def test_checkpoints_that_may_lie_nearest_a_peak_are_spared():
    """Windows of 5. After iteration 20 the next window is 17 to 21, whose middle, 19, was sampled
    by checkpoint 18. The peak, of 8 to 12, lies at 10: checkpoint 9."""
    watch = Watch(RULE.model_copy(update={"smooth": 5}), world=None)
    for number in range(1, 21):
        watch.follow(number, {"reward/true/mean": -abs(number - 10)})
    assert watch.peak.weights == 9
    assert watch.spared([0, 4, 8, 12, 16, 20]) == {8, 16, 20}
    assert watch.spared(list(range(21))) == {9, 18, 19, 20}
    assert nearest([8, 10], watch.peak) == 8  # the earlier of two equally near
    assert Watch(WatchConfig(), world=None).spared([0, 5]) == set()


def test_every_peak_finds_its_nearest_checkpoint_kept():
    """Whatever the curve: the checkpoint nearest the peak so far is never one that was removed."""
    for seed in range(10):
        watch, saved = Watch(RULE.model_copy(update={"smooth": 6}), world=None), [0]
        for number, value in enumerate(noisy(torch.zeros(60), seed), 1):
            watch.follow(number, {"reward/true/mean": value})
            if number % 2 == 0:
                saved.append(number)
                spared = watch.spared(saved)
                saved = [s for s in saved if s in spared or s in saved[-2:]]
                every = range(0, number + 1, 2)
                if watch.peak is not None:
                    assert nearest(list(every), watch.peak) in saved
        assert len(saved) < 10
