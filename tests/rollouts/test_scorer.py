"""Scores while sampling goes on: the same numbers in the same order, whole groups for rewards that
compare, a clean end."""

import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest
import small
import torch

import flowrl
from flowrl.rewards import RewardUnavailable, load_set
from flowrl.rewards.core.features import load_features
from flowrl.rollouts import draw
from flowrl.rollouts.overlap import OverlappedScorer
from flowrl.rollouts.scorer import Scorer
from flowrl.runtime.ledger import Ledger
from flowrl.types import PromptBatch

BATCH = PromptBatch(text=["a", "b", "c"], ids=torch.arange(3), meta=[{"k": 1}, {"k": 2}, {"k": 3}])


def mean(media, prompts, context=None):
    return media.flatten(1).mean(1) + torch.tensor([float(m["k"]) for m in context.meta])


def scores(reward, sizes, *, overlap, group=(0, 0, 0, 1, 1, 1, 2, 2, 2)):
    media, group = (
        torch.arange(9.0)[:, None, None, None].expand(9, 3, 2, 2) / 10,
        torch.tensor(group),
    )
    kind = OverlappedScorer if overlap else Scorer
    with closing(kind(load_set({"it": reward}), Ledger())) as scorer:
        for rows in torch.arange(9).split(sizes):
            scorer.add(media[rows], BATCH, group[rows])
        scorer.finish_groups()
        return scorer.scores()


@pytest.mark.parametrize("sizes", [[9], [2, 3, 4], [1] * 9, [4, 5]])
def test_scores_are_the_same_in_a_thread_and_for_any_chunks(sizes):
    expected = torch.arange(9) / 10 + torch.tensor([1.0, 1, 1, 2, 2, 2, 3, 3, 3])
    for overlap in (False, True):
        found = scores(mean, sizes, overlap=overlap)
        assert torch.allclose(found.total, expected) and found.valid.all()
    assert torch.equal(
        scores(mean, sizes, overlap=True).total, scores(mean, sizes, overlap=False).total
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sizes", [[9], [2, 3, 4], [1] * 9, [4, 5]])
def test_a_reward_that_compares_a_group_sees_whole_groups_however_they_are_decoded(sizes, overlap):
    seen = []

    @flowrl.reward(needs=["group"])
    def place(media, prompts, context=None):
        seen.append(context.group.tolist())
        values = media.flatten(1).mean(1)
        return torch.stack(
            [
                (values[context.group == g] < v).float().sum()
                for g, v in zip(context.group, values, strict=True)
            ]
        )

    found = scores(place, sizes, overlap=overlap)
    assert found.total.tolist() == [0, 1, 2] * 3
    for g in range(3):
        assert sum(g in chunk for chunk in seen) == 1 and all(
            chunk.count(g) in (0, 3) for chunk in seen
        )


def test_features_are_the_same_in_a_thread_and_for_any_chunks():
    rewards = load_set({"it": mean})
    features = load_features("live:pair", live=lambda media: media.flatten(1)[:, :2] + 1)
    for kind in (Scorer, OverlappedScorer):
        media, group = torch.arange(90.0).view(5, 3, 3, 2) / 90, torch.tensor([0, 0, 0, 1, 1])
        with closing(kind(replace(rewards, features=features), Ledger())) as scorer:
            for rows in torch.arange(5).split([2, 3]):
                scorer.add(media[rows], BATCH, group[rows])
            scorer.finish_groups()
            assert torch.equal(scorer.scores().features, media.flatten(1)[:, :2] + 1)


def test_the_caller_goes_on_while_a_reward_is_computed_and_waits_when_two_chunks_are_behind():
    gate, started = threading.Event(), []

    def slow(media, prompts, context=None):
        started.append(len(media))
        assert gate.wait(10)
        return media.flatten(1).mean(1)

    ledger = Ledger()
    with closing(OverlappedScorer(load_set({"slow": slow}), ledger)) as scorer:
        for k in range(OverlappedScorer.AHEAD):
            scorer.add(
                torch.zeros(2, 3, 2, 2), BATCH, torch.tensor([k, k])
            )  # returns although nothing is scored yet
        assert len(scorer.pending) == OverlappedScorer.AHEAD and not scorer.parts
        threading.Timer(0.2, gate.set).start()
        scorer.add(torch.zeros(2, 3, 2, 2), BATCH, torch.tensor([2, 2]))
        assert len(scorer.parts) >= 1, "memory is bounded: the third chunk waited for the first"
        assert len(scorer.scores().total) == 6
    assert ledger.time["reward"] >= 0.1


def test_time_that_nobody_waited_for_is_booked_as_hidden():
    def slow(media, prompts, context=None):
        time.sleep(0.1)
        return media.flatten(1).mean(1)

    ledger = Ledger()
    with closing(OverlappedScorer(load_set({"slow": slow}), ledger)) as scorer:
        scorer.add(torch.zeros(1, 3, 2, 2), BATCH, torch.tensor([0]))
        time.sleep(0.3)
        scorer.scores()
    assert ledger.time["reward_hidden"] >= 0.09 and ledger.time["reward"] < 0.05


@pytest.mark.parametrize("overlap", [False, True])
def test_a_broken_reward_stops_the_caller(overlap):
    def broken(media, prompts, context=None):
        return torch.zeros(len(media), dtype=torch.float64)

    with pytest.raises(flowrl.rewards.RewardBug, match="float64"):
        scores(broken, [3, 6], overlap=overlap)


def test_a_run_with_overlap_is_the_run_without(tmp_path):
    """But for rounding: prompts are encoded two by two instead of four at once, and a JPEG file may
    be a byte longer for it."""
    runs = {}
    for overlap in ("0", "2"):
        changes = {
            "batch__prompts": "4",
            "batch__micro": "4",
            "batch__decode": "4",
            "iterations": "2",
            "checkpoint__every": "9",
            "optimizer__eps": "1e-3",  # Adam blows rounding up
        }
        run = flowrl.train(small.config(tmp_path / overlap, **changes, batch__overlap=overlap))
        runs[overlap] = [
            {k: v for k, v in line.items() if not k.startswith(small.CHANGING)}
            for line in small.lines(run.path)
        ]
    for without, overlapped in zip(runs["0"], runs["2"], strict=True):
        assert overlapped == pytest.approx(without, rel=5e-3, abs=1e-6)


def test_a_run_stops_resumable_when_a_reward_is_gone(tmp_path, monkeypatch):
    real, calls = draw.decode_into, []

    def gone(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RewardUnavailable("the reward server is gone; start it and resume")
        return real(*args, **kwargs)

    monkeypatch.setattr(draw, "decode_into", gone)
    run = tmp_path / "run"
    result = small.invoke("train", *small.words(run, iterations="3", checkpoint__every="50"))
    assert result.exit_code == 1
    assert (
        "the reward server is gone" in result.output
        and f"flowrl train --resume {run}" in result.output
    )
    assert small.invoke("train", "--resume", run).exit_code == 0
    assert [line["iteration"] for line in small.lines(run)] == [1, 2, 3]


def test_a_run_whose_rewards_all_compare_groups_has_nothing_to_evaluate_with(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import flowrl\n@flowrl.reward(needs=['group'])\ndef ones(media, prompts, context=None):\n "
        "   return media.new_ones(len(media))\n"
    )
    words = small.words(tmp_path / "run", reward=f"{tmp_path}/mine.py:ones")
    result = small.invoke("train", *words)
    assert result.exit_code == 2 and "a reward that judges each sample by itself" in result.output
    result = small.invoke("train", *words, "draw.mode=balance", "reward.jpeg.weight=0")
    assert (
        result.exit_code == 2
        and "draw.mode=balance compares rewards of several draws" in result.output
    )
