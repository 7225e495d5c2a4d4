"""Runs with rewards by domain and prompts of two files: two processes train what one does, a resume
changes no bit, and one domain is as none."""

import json

import processes
import pytest
import small
import torch

from flowrl.config.load import load_config
from flowrl.shapes.prompts import eval_prompts, train_prompts
from flowrl.training.loop import Trainer

RUN = {
    "iterations": "2",
    "batch__group": "3",
    "optimizer__eps": "1e-3",  # Adam blows rounding up
    "algorithm__std": "global",
    "reward": None,
    "eval__images": "2",
}

# rewards that never tie and, unlike a JPEG's size, move by 1e-7 when pixels do
OWN = """
import flowrl


@flowrl.reward
def wide(media, prompts, context=None):
    return media.flatten(1).std(1)


@flowrl.reward
def warm(media, prompts, context=None):
    return 100 * (media[:, 0] - media[:, 2]).flatten(1).mean(1)
"""


def words(folder, run, **changes):
    """Two files, one of which carries its domain, and held-out prompts of both domains."""
    rows = {
        "one": train_prompts()[:8],
        "two": [{**row, "domain": "two"} for row in train_prompts()[8:16]],
        "held": [
            {**row, "domain": d} for row, d in zip(eval_prompts(), ("one", "two"), strict=False)
        ],
    }
    folder.mkdir(exist_ok=True)
    for name, entries in rows.items():
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "own.py").write_text(OWN)
    mixture = f"[{{path: {folder}/one.jsonl, domain: one}}, {{path: {folder}/two.jsonl}}]"
    own = {"data__eval": f"{folder}/held.jsonl"}
    for label, name in (("wide", "one"), ("warm", "two")):
        own |= {f"reward__{label}__name": f"{folder}/own.py:{label}"}
        own |= {f"reward__{label}__domains": f"[{name}]"}
    found = small.words(run, **{**RUN, **own, **changes})
    return ["~reward", f"data.mixture={mixture}", *found]


def run(folder, name, **changes):
    made = Trainer(load_config(None, words(folder, folder / name, **changes)))
    return made.run()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of one process, and another of two."""
    folder = tmp_path_factory.mktemp("domains")
    run(folder, "one_process")
    processes.on(2, lambda: run(folder, "two_processes"))
    return folder


def numbers(run):
    changing = (*small.CHANGING, "nfe/", "flops")
    return [
        {k: v for k, v in row.items() if not k.startswith(changing)} for row in small.lines(run)
    ]


def test_each_domain_is_logged_and_evaluated_by_itself(whole):
    lines = small.lines(whole / "one_process")
    for line in lines:
        assert line["reward/invalid"] == 0
        assert line["reward/total/one"] == pytest.approx(line["reward/wide/mean"])
        assert line["reward/total/two"] == pytest.approx(line["reward/warm/mean"])
    rows = json.loads((whole / "one_process" / "evaluation.json").read_text())["rows"]
    seen = {name: metric["mean"] for name, metric in rows[-1]["metrics"].items()}
    assert seen["one/total"] == seen["wide"] and seen["two/total"] == seen["warm"]
    assert seen["macro"] == pytest.approx((seen["wide"] + seen["warm"]) / 2)
    assert not any(metric["invalid"] for metric in rows[-1]["metrics"].values())


def test_two_processes_equal_one(whole):
    one, two = whole / "one_process", whole / "two_processes"
    for mine, theirs in zip(numbers(one), numbers(two), strict=True):
        assert mine.keys() == theirs.keys() and mine["policy/grad_norm"] > 0
        for name in mine:
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-6), name
    x, y = small.weights(one), small.weights(two)
    for name in (n for n in x if n.startswith("policy/")):
        torch.testing.assert_close(y[name], x[name], rtol=1e-4, atol=1e-6)


def test_a_resumed_run_is_equal_bit_for_bit(whole):
    made = Trainer(load_config(None, words(whole, whole / "resumed")))
    next(iter(made))
    made.save()
    made.finish()
    Trainer(resume=whole / "resumed").run()
    assert small.same(whole / "resumed", whole / "one_process")
