"""Scores of evaluation suites: official rules of aggregation by hand, intervals over prompts,
best-of-N, contamination."""

import json
from itertools import combinations

import numpy as np
import pytest

from flowrl.data.prompts import load_prompts
from flowrl.evaluation.suites import scores
from flowrl.evaluation.suites import suite as suites
from flowrl.evaluation.suites.contamination import contamination, near_duplicates
from flowrl.evaluation.suites.measure import Measured
from flowrl.evaluation.suites.summary import summary
from flowrl.rewards import load_set
from flowrl.runtime.statistics import mean_interval

TAGGED = [{"prompt": text, "tag": "colors" if text == "d" else "counting"} for text in "abcd"]


def task(prompts, **suite):
    """A task whose rewards are never asked."""
    entries = {"title": "t", "prompts": "p.jsonl", "rewards": {"jpeg": 1.0}, **suite}
    return suites.Task(
        name="t", suite=suites.Suite(**entries), prompts=prompts, rewards=load_set({"jpeg": 1.0})
    )


def measured(**values):
    columns = {name.replace("__", "/"): np.array(v) for name, v in values.items()}
    return Measured(values=columns, diversity={}, nfe=1)


def test_geneval_is_the_mean_of_task_accuracies_and_not_of_images():
    """counting: 1 of 6 images right; colors: 2 of 2. Mean of tasks (1/6 + 1) / 2 = 7/12; of images
    3/8. Held-out rewards are means."""
    right = [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    chosen = task(TAGGED, category="tag", aggregate="category_mean", held_out={"sharpness": {}})
    base = measured(jpeg=np.zeros((4, 2)), sharpness=right)
    out = summary(chosen, {"base": base, "tuned": measured(jpeg=right, sharpness=right)}, 2)
    tuned = out["rows"][-1]
    assert tuned["scores"]["jpeg"]["mean"] == pytest.approx(7 / 12)
    assert tuned["scores"]["sharpness"]["mean"] == pytest.approx(3 / 8)
    assert tuned["categories"]["jpeg"]["counting"]["mean"] == pytest.approx(1 / 6)
    assert tuned["categories"]["jpeg"]["counting"]["n"] == 6
    one = {"mean": 1.0, "ci": None, "n": 2, "prompts": 1}  # one prompt tells no interval
    assert tuned["categories"]["jpeg"]["colors"] == one
    change = out["paired"]["base"]["scores"]["jpeg"]
    assert change["difference"] == pytest.approx(7 / 12)
    assert change["ci"] and change["p"] is None  # four prompts are too few for a p-value
    assert out["paired"]["base"]["scores"]["sharpness"]["difference"] == 0


def test_a_failed_image_is_left_out_of_both_sides_and_counted():
    nan = float("nan")
    prompts = [{"prompt": "a"}, {"prompt": "b"}]
    base = measured(jpeg=[[0.0, 4.0], [2.0, 2.0]])
    out = summary(
        task(prompts), {"base": base, "tuned": measured(jpeg=[[1.0, nan], [3.0, 3.0]])}, 1
    )
    assert out["rows"][-1]["invalid"] == {"jpeg": 1}
    assert out["rows"][-1]["scores"]["jpeg"]["mean"] == pytest.approx(7 / 3)
    assert out["paired"]["base"]["scores"]["jpeg"]["difference"] == pytest.approx(1.0)
    assert out["paired"]["base"]["scores"]["jpeg"]["n"] == 3
    json.dumps(out, allow_nan=False)


def questions(*dimensions):
    return [{"question": "?", "dimension": d} for d in dimensions]


def test_unigenbench_pools_test_points_by_dimension_and_averages_dimensions():
    """Color 1 of 2 + shape 4 of 4 (two points a picture, all yes) = Attribute 5/6; Style 1/2;
    overall 100 (5/6 + 1/2) / 2.

    Of two pictures the better one of "a" is the second: Attribute 3 of 3, Style 0 of 1; overall 50.
    """
    nan = float("nan")
    prompts = [
        {"prompt": "a", "checklist": questions("Style", "Attribute - Color")},
        {"prompt": "b", "checklist": questions(*["Attribute - Shape"] * 2)},
    ]
    chosen = task(
        prompts,
        category="checklist",
        aggregate="category_mean",
        scale=100,
        rewards={"c": {"name": "jpeg"}},
    )
    begin = "c__dimension__"
    values = {
        "Style": [[1.0, 0.0], [nan, nan]],
        "Attribute - Color": [[0.0, 1.0], [nan, nan]],
        "Attribute - Shape": [[nan, nan], [1.0, 1.0]],
    }
    own = measured(c=[[0.4, 0.6], [1.0, 1.0]], **{begin + name: v for name, v in values.items()})
    (row,) = summary(chosen, {"tuned": own}, 2)["rows"]
    assert [entry["mean"] for entry in row["best_of"]] == pytest.approx(
        [100 * (5 / 6 + 1 / 2) / 2, 50.0]
    )
    assert row["scores"]["c"]["mean"] == pytest.approx(100 * (5 / 6 + 1 / 2) / 2)
    assert list(row["scores"]) == ["c"]
    assert row["categories"]["c"]["Attribute"]["mean"] == pytest.approx(500 / 6)
    assert row["categories"]["c"]["Attribute"]["n"] == 6
    assert row["details"]["c"]["Attribute - Color"]["mean"] == pytest.approx(50.0)


def test_dpg_is_100_times_the_mean_score_while_its_categories_count_answers():
    """Scores 0 (the parent's no zeroes a yes) and 1 -> 50; answers of entity: no, yes; of relation:
    yes, yes."""
    prompts = [
        {"prompt": p, "checklist": questions("entity - whole", "relation - spatial")} for p in "ab"
    ]
    chosen = task(prompts, category="checklist", scale=100, rewards={"c": {"name": "jpeg"}})
    own = measured(
        c=[[0.0], [1.0]],
        **{
            "c__dimension__entity - whole": [[0.0], [1.0]],
            "c__dimension__relation - spatial": [[1.0], [1.0]],
        },
    )
    (row,) = summary(chosen, {"tuned": own}, 1)["rows"]
    assert row["scores"]["c"]["mean"] == 50.0 and row["best_of"][0]["mean"] == 50.0
    assert {name: s["mean"] for name, s in row["categories"]["c"].items()} == {
        "entity": 50.0,
        "relation": 100.0,
    }


def test_intervals_of_suites_and_of_means_resample_prompts_alike():
    rng = np.random.default_rng(0)
    # images of a prompt are alike
    values = rng.normal(size=(60, 1)) + 0.1 * rng.normal(size=(60, 8))
    texts = [f"p{i // 2}" for i in range(60)]  # every prompt is there twice
    chosen = scores.design(texts, [""] * 60)
    got = scores.score(scores.cells({"": values}, chosen), chosen)
    want = mean_interval(values.ravel(), groups=np.repeat([int(t[1:]) for t in texts], 8))
    assert got["mean"] == pytest.approx(want.mean) and got["n"] == 480 and got["prompts"] == 30
    assert got["ci"] == pytest.approx(list(want.ci), abs=0.03)
    naive = mean_interval(values.ravel())
    assert np.ptp(got["ci"]) > 2 * np.ptp(naive.ci)


def test_tasks_keep_their_sizes_in_every_resample_and_single_prompts_are_drawn_together():
    chosen = scores.design(["a", "b", "c", "a", "d", "e"], ["x", "x", "x", "x", "y", "z"])
    assert chosen.cluster.tolist() == [0, 1, 2, 0, 3, 4]
    weights = chosen.resample(np.eye(5))  # how often each resample drew each cluster
    assert (weights[:, :3].sum(1) == 3).all() and (weights[:, 3:].sum(1) == 2).all()
    assert set(np.unique(weights[:, 3])) == {0, 1, 2}
    assert weights[:, 0].mean() == pytest.approx(1, abs=0.1)


def test_a_paired_interval_is_narrower_than_the_values_it_compares():
    before = np.random.default_rng(0).normal(size=(40, 4))
    after = before + 0.1 + 0.01 * np.random.default_rng(1).normal(size=(40, 4))
    chosen = scores.design([str(i) for i in range(40)], [str(i % 2) for i in range(40)])
    a, b = (scores.cells({"": v}, chosen) for v in (before, after))
    got = scores.difference(a, b, chosen, scale=100)
    assert 9 < got["ci"][0] < got["difference"] < got["ci"][1] < 11
    assert got["p"] == pytest.approx(2 / 2001)
    none = {"difference": 0.0, "ci": [0.0, 0.0], "p": 1.0, "n": 160, "prompts": 40}
    assert scores.difference(a, a, chosen) == none


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_best_of_n_is_the_mean_maximum_over_all_subsets_and_never_falls(n):
    values = np.random.default_rng(n).integers(0, 4, (3, n)).astype(float)  # with ties
    got = scores.best_of(values, n, {"own": values})["own"]
    want = [
        [np.mean([max(c) for c in combinations(row, size)]) for size in range(1, n + 1)]
        for row in values
    ]
    np.testing.assert_allclose(got, want)
    assert (np.diff(got, axis=1) >= -1e-12).all()
    np.testing.assert_allclose(got[:, 0], values.mean(1))
    np.testing.assert_allclose(got[:, -1], values.max(1))


def test_best_of_n_is_unbiased_and_leaves_out_prompts_with_too_few_images():
    def best_of(values, most):
        return scores.best_of(values, most, {"own": values})["own"]

    draws = np.random.default_rng(0).uniform(size=(20_000, 6))
    np.testing.assert_allclose(
        best_of(draws, 3).mean(0), [1 / 2, 2 / 3, 3 / 4], atol=0.01
    )  # of uniforms: N / (N + 1)
    some = best_of(np.array([[1.0, np.nan, 3.0], [np.nan, np.nan, 1.0]]), 2)
    np.testing.assert_allclose(some, [[2.0, 3.0], [np.nan, np.nan]])
    assert np.isfinite(best_of(np.random.default_rng(0).normal(size=(1, 1000)), 64)).all()


def test_what_is_read_of_the_best_image_is_that_of_the_image_and_of_equal_ones_their_mean():
    """Of 0.2, 0.9, 0.9 the best is one of the two 0.9, whichever: (5 + 7) / 2 = 6; of pairs it
    always holds one: 5 or 7 or their mean."""
    values = np.array([[0.2, 0.9, 0.9]])
    read = {"other": np.array([[3.0, 5.0, 7.0]]), "unasked": np.full((1, 3), np.nan)}
    got = scores.best_of(values, 3, read)
    np.testing.assert_allclose(got["other"], [[5.0, 6.0, 6.0]])
    assert np.isnan(got["unasked"]).all()


def test_best_of_one_is_the_headline_whatever_the_rule():
    """Mean of categories: counting 1 of 6 right, colors 2 of 2: 7/12. Of the best of two: counting
    1 of 3 prompts, colors 1: 2/3."""
    right = measured(jpeg=[[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    chosen = task(TAGGED, category="tag", aggregate="category_mean", scale=100)
    out = summary(chosen, {"tuned": right}, 2)["rows"][0]
    assert out["scores"]["jpeg"]["mean"] == out["best_of"][0]["mean"] == pytest.approx(100 * 7 / 12)
    assert out["best_of"][0]["ci"] == pytest.approx(out["scores"]["jpeg"]["ci"])
    assert out["best_of"][1]["mean"] == pytest.approx(100 * 2 / 3)


def test_contamination_counts_copies_near_copies_and_shared_8_grams():
    train = [
        "A photo of a Red Circle!",
        "one two three four five six seven eight nine",
        "the big dog ran fast",
    ]
    suite = [
        "a photo of a red circle",
        "fast ran the big dog",
        "x two three four five six seven eight nine y z w",
        "a blue square",
        "A blue square.",
    ]
    got = contamination(train, suite)
    counts = [got[k] for k in ("training", "suite", "exact", "near", "shared_8_grams")]
    assert counts == [3, 4, 1, 1, 1]
    kinds = ("exact", "near", "shared_8_grams")
    assert got["examples"] == [[kind, text] for kind, text in zip(kinds, suite, strict=False)]
    assert contamination(train, ["one two three four five six seven"])["shared_8_grams"] == 0


def test_near_duplicates_are_those_of_all_pairs():
    rng = np.random.default_rng(0)
    sets = [{str(w) for w in rng.integers(0, 14, rng.integers(1, 12))} for _ in range(160)]
    train, suite = sets[:80], sets[80:]
    want = [any(5 * len(a & b) >= 4 * len(a | b) for b in train) for a in suite]
    assert near_duplicates(train, suite) == want and 5 < sum(want) < 75


def test_held_out_prompts_of_the_shapes_world_are_not_trained_on():
    found = contamination(
        (p["prompt"] for p in load_prompts("shapes:train")),
        (p["prompt"] for p in load_prompts("shapes:eval")),
    )
    assert found["exact"] == 0 and found["suite"] > 50
