"""Runs that watch a held-out reward: where they stop, what they keep and write, how they go on."""

import json

import pytest
import small
import torch
from page import Page
from safetensors.torch import load_file

from flowrl.report import run_page
from flowrl.runtime.store import checkpoint
from flowrl.training.watch.watch import Watch

HELD_OUT = {
    "reward__fair__name": "saturation",
    "reward__fair__weight": "0",
    "watch__held_out": "fair",
    "watch__smooth": "2",
    "watch__patience": "1",
    "guard__check_rewards": "false",
    "data__eval": "null",
}
PLANTED = (0.1, 0.2, 0.3, 0.4, 0.3, 0.05, 0.0)  # means of two are highest of iterations 3 and 4


@pytest.fixture
def planted(monkeypatch):
    """The held-out reward of every run has the values PLANTED."""
    follow = Watch.follow

    def on_planted(self, number, metrics):
        return follow(self, number, {**metrics, "reward/fair/mean": PLANTED[number - 1]})

    monkeypatch.setattr(Watch, "follow", on_planted)


@pytest.mark.long
def test_a_run_past_its_peak_stops_and_gives_the_weights_of_the_peak(planted, tmp_path):
    """Iterations 3 and 4 were sampled by checkpoints 2 and 3; the earlier one is exported. It is
    what a run of two iterations ends with."""
    run = tmp_path / "run"
    changes = {**HELD_OUT, "iterations": "7", "checkpoint__keep": "1", "watch__errors": "1.5"}
    result = small.invoke("train", *small.words(run, **changes, stop__watch="stop"))
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "significantly below its peak, 0.35 at iteration 3.5 (stop.watch=stop)" in said
    assert "fair was highest, 0.35, around iteration 3.5" in said
    assert "its LoRA is in lora-peak" in said
    last = small.lines(run)[-1]
    assert last["iteration"] == 6 and last["watch/past_peak"] == 1
    # squares .01 .01 .01 .01 .0625, windows of two that share nothing: 1.73 errors below
    assert pytest.approx(1.728, abs=1e-3) == 0.175 / (0.1025 / 5 / 2) ** 0.5

    peak = json.loads((run / "peak.json").read_text())
    assert (peak["checkpoint"], peak["iteration"]) == ("step-000002", 3.5)
    assert [folder.name for folder in checkpoint.steps(run)][0] == "step-000002"
    short = tmp_path / "short"
    small.trainer(short, **{**changes, "iterations": "2"}).run()
    names = sorted(p.name for p in (short / "lora").iterdir())
    assert names == sorted(p.name for p in (run / "lora-peak").iterdir())
    for name in names:
        assert (run / "lora-peak" / name).read_bytes() == (short / "lora" / name).read_bytes()
    (weights,) = (run / "lora").glob("*.safetensors")
    end, top = load_file(weights), load_file(run / "lora-peak" / weights.name)
    assert any(not torch.equal(end[name], top[name]) for name in end)

    html = run_page.build(run).read_text(encoding="utf-8")
    assert "Hacking watch" in html and 'class="mark"' in html and "peak 0.35" in html
    assert "its LoRA is in lora-peak" in Page(html).text


def test_a_resumed_run_forgets_the_files_of_an_earlier_peak(planted, tmp_path):
    run = tmp_path / "run"
    changes = {**HELD_OUT, "watch__errors": "1000"}
    small.trainer(run, **changes, iterations="3").run()
    assert json.loads((run / "peak.json").read_text())["checkpoint"] == "step-000001"
    result = small.invoke("train", "--resume", run, "iterations=4")
    assert result.exit_code == 0, result.output
    assert json.loads((run / "peak.json").read_text())["checkpoint"] == "step-000002"


def test_a_watched_run_that_was_resumed_equals_the_uninterrupted_one(tmp_path):
    """Every drop lowers the rate; the reference of drift is that of the first iteration."""
    changes = {
        **HELD_OUT,
        "watch__detectors": "[sharpness,saturation,tiling,diversity,drift]",
        "watch__smooth": "1",
        "watch__errors": "1e-9",
        "stop__watch": "lower",
    }
    whole, run = tmp_path / "whole", tmp_path / "run"
    small.trainer(whole, **changes, iterations="4").run()
    small.trainer(run, **changes, iterations="2").run()
    result = small.invoke("train", "--resume", run, "iterations=4")
    assert result.exit_code == 0, result.output
    assert small.same(run, whole)
    states = [checkpoint.load(checkpoint.latest(folder))[1]["watch"] for folder in (run, whole)]
    assert states[0] == states[1] and len(states[0]["curve"]) == 4 and states[0]["base"]["mean"]

    lines = small.lines(run)
    rates = [line["watch/rate"] for line in lines]
    assert rates[0] == 1 and rates[-1] < 1
    for line, rate in zip(lines[1:], rates, strict=False):  # of the update after
        assert line["optimizer/lr"] == rate * 3e-4
    assert all(line["watch/saturation"] == line["reward/fair/mean"] for line in lines)
    assert lines[0]["watch/drift"] == 0
    assert {"watch/sharpness", "watch/tiling", "watch/diversity"} <= lines[0].keys()


def test_nothing_is_watched_by_default(monkeypatch, tmp_path):
    small.load_once(monkeypatch)
    made = small.trainer(tmp_path / "run")
    assert made.source.rewards.detectors is None and made.parts.watch.peak is None
    assert made.parts.watch not in made.observers
    assert made.parts.watch.follow(1, {"reward/jpeg/mean": 1.0}) == {}
    assert made.parts.watch.spared([0, 1, 2]) == set() and made.parts.watch.state["rate"] == 1


def test_rare_checkpoints_are_said(monkeypatch, tmp_path, caplog):
    small.load_once(monkeypatch)
    changes = {**HELD_OUT, "checkpoint__every": "50"}
    small.trainer(tmp_path / "run", **changes)
    assert "checkpoint.every=50 is more than watch.smooth=2" in caplog.text
