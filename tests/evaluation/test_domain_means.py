"""Evaluation by domain: readings of each domain, their macro mean, and what is not missing."""

import math

import numpy as np
import pytest
import torch

from flowrl.evaluation import record
from flowrl.evaluation.domains import by_domain
from flowrl.evaluation.held_out import Evaluation
from flowrl.evaluation.suites import suite as suites
from flowrl.evaluation.suites.measure import Measured
from flowrl.evaluation.suites.summary import summary
from flowrl.report.numbers import distinct_metrics
from flowrl.rewards import load_set

NAN = math.nan
DOMAINS = ["a", "b", "b", "a", "b", "b"]
REWARDS = load_set({"jpeg": {"domains": ["a"]}, "tiling": {"domains": ["b"]}, "shapes": 0.0})
VALUES = {
    "jpeg": torch.tensor([1, NAN, NAN, 3, NAN, NAN]),
    "tiling": torch.tensor([NAN, 10, 20, NAN, NAN, 60]),  # one of them failed
    "shapes": torch.tensor([0.0, 1, 0, 1, 1, 1]),
    "total": torch.tensor([1.0, 10, 20, 3, NAN, 60]),
}


def evaluation(domains=DOMAINS, rewards=REWARDS, values=VALUES):
    made, asked = by_domain(values, domains, rewards)
    return Evaluation(
        values=made, asked=asked, prompt=[*range(len(domains))], images=torch.zeros(1), nfe=1
    )


def test_each_domain_has_the_means_of_its_images_and_macro_is_the_mean_of_domains():
    """a: (1 + 3) / 2 = 2. b: (10 + 20 + 60) / 3 = 30. macro: 16, and the mean of images 18.8."""
    seen = evaluation().metrics()
    assert seen["eval/a/total"] == seen["eval/a/jpeg"] == seen["eval/jpeg"] == 2
    assert seen["eval/b/total"] == seen["eval/b/tiling"] == seen["eval/tiling"] == 30
    assert seen["eval/macro"] == pytest.approx(16) and seen["eval/total"] == pytest.approx(18.8)
    assert seen["eval/a/shapes"] == 0.5 and seen["eval/b/shapes"] == 0.75
    assert not {"eval/a/tiling", "eval/b/jpeg"} & seen.keys()


def test_an_absent_reading_is_not_counted_as_one_that_failed(tmp_path):
    prompts = [{"prompt": f"{name}{i}"} for i, name in enumerate(DOMAINS)]
    (row,) = record.add_row(tmp_path, "before", evaluation(), prompts)["rows"]
    missing = {name: metric["invalid"] for name, metric in row["metrics"].items()}
    assert missing["jpeg"] == missing["a/total"] == 0
    assert missing["tiling"] == missing["b/tiling"] == missing["total"] == missing["macro"] == 1
    assert row["metrics"]["macro"]["mean"] == pytest.approx(16)


def test_parts_of_a_reward_of_one_domain_are_shown_once_and_macro_comes_first():
    values = VALUES | {"jpeg/size": VALUES["jpeg"], "shapes/strict": VALUES["shapes"]}
    made = evaluation(values=values)
    assert {"a/jpeg", "jpeg/size", "a/shapes/strict", "b/shapes/strict"} <= made.values.keys()
    assert "a/jpeg/size" not in made.values
    row = {"name": "before", "metrics": {k: made.mean(k) for k in made.values}}
    titles = distinct_metrics({"rows": [row], "paired": dict.fromkeys(made.values, {})})
    assert next(iter(titles)) == "macro"


def test_a_domain_without_images_adds_nothing():
    values = {name: value[[0, 3]] for name, value in VALUES.items()}
    seen = evaluation(["a", "a"], values=values).metrics()
    assert "eval/tiling" not in seen and seen["eval/macro"] == seen["eval/total"] == 2
    failed = {**values, "total": torch.tensor([NAN, NAN])}
    assert math.isnan(evaluation(["a", "a"], values=failed).metrics()["eval/macro"])


def test_the_order_of_domains_changes_names_alone():
    other = load_set({"jpeg": {"domains": ["b"]}, "tiling": {"domains": ["a"]}, "shapes": 0.0})
    first = evaluation().metrics()
    swapped = evaluation([{"a": "b", "b": "a"}[name] for name in DOMAINS], other).metrics()
    names = {"eval/a/": "eval/b/", "eval/b/": "eval/a/"}
    for name, value in first.items():
        begin = name[: name.rindex("/") + 1]
        assert swapped[names.get(begin, begin) + name.removeprefix(begin)] == value


def test_a_suite_sums_a_reward_up_over_its_own_categories():
    """jpeg is asked for a alone: its mean of categories is that of a, and nothing is missing."""
    prompts = [{"prompt": f"{name}{i}", "domain": name} for i, name in enumerate("aabb")]
    rewards = {"jpeg": {"domains": ["a"]}, "tiling": {}}
    entries = {"title": "t", "rewards": rewards, "category": "domain"}
    suite = suites.Suite(prompts="p.jsonl", aggregate="category_mean", **entries)
    task = suites.Task(name="t", suite=suite, prompts=prompts, rewards=load_set(rewards))
    columns = {"jpeg": [[1.0], [3.0], [NAN], [NAN]], "tiling": [[1.0], [1.0], [4.0], [NAN]]}
    made = Measured(values={k: np.array(v) for k, v in columns.items()}, diversity={}, nfe=1)
    row = summary(task, {"base": made, "tuned": made}, 1)["rows"][-1]
    assert row["scores"]["jpeg"]["mean"] == 2 and list(row["categories"]["jpeg"]) == ["a"]
    assert row["scores"]["tiling"]["mean"] == 2.5 and row["invalid"] == {"tiling": 1}
