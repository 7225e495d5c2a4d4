"""Signs of dead training are said once, end a run that goes on so, and leave honest runs alone."""

import dataclasses
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import small
import torch

from flowrl.config.training import GuardConfig
from flowrl.rewards import Reward, RewardUnavailable, load_set
from flowrl.runtime.store import checkpoint, history, lines
from flowrl.training import loop
from flowrl.training.records import NothingTrained
from flowrl.training.run import recorded
from flowrl.training.watch.guards import Dead, Guards, signs

CELLS = Path(__file__).parents[2] / "docs/results/cells"
WELL = {
    "optimizer/step": 1,
    "policy/rows": 8,
    "policy/grad_norm": 0.1,
    "policy/skipped": 0,
    "reward/total": 0.5,
    "reward/good/mean": 0.5,
    "reward/good/std": 0.1,
}


class Rail(Reward):
    """A reward with a best value, which it mostly has."""

    range = (-1.0, 0.0)


def guards(rewards=None, **settings):
    return Guards(GuardConfig(**settings), load_set(rewards or {"good": Reward()}))


def lived(watch, iterations, **changes):
    """How many of these iterations the run lives through, with the same metrics but for steps."""
    for i in range(iterations):
        step = i + 1 if changes.get("optimizer/step", 1) else 0
        try:
            watch({**WELL, **changes, "optimizer/step": step})
        except Dead as dead:
            return i, str(dead)
    return iterations, ""


def test_an_honest_run_shows_no_sign(caplog):
    assert lived(guards(), 300) == (300, "") and not caplog.records


@pytest.mark.parametrize(
    ("changes", "warned", "stopped", "sentence"),
    [
        ({"optimizer/step": 0}, 10, 100, "no optimizer step was taken"),
        ({"policy/rows": 0}, 10, 100, "no row of the method was trained, because the samples of"),
        ({"reward/good/std": 0.0}, 10, 100, 'reward "good" is 0.5 for every sample'),
        ({"policy/grad_norm": 0.0}, 1, 5, "the gradient is exactly 0, although 8 rows"),
        ({"reward/good/mean": -2e6}, 1, 100, 'reward "good" times its weight is beyond guard.huge'),
        ({"reward/good/std": 2e6}, 1, 100, 'reward "good" times its weight is beyond guard.huge'),
    ],
)
def test_a_sign_is_said_once_and_then_ends_the_run(caplog, changes, warned, stopped, sentence):
    if warned > 1:
        assert lived(guards(), warned - 1, **changes)[0] == warned - 1 and not caplog.records
    lasted, dead = lived(guards(), 200, **changes)
    assert lasted + 1 == stopped and sentence in dead
    (said,) = [record.message for record in caplog.records]
    assert sentence in said and f"the run stops after {stopped} such iterations" in said
    assert said.startswith(f"for {warned} iterations in a row, ") == (warned > 1)


@pytest.mark.parametrize("name", ["optimizer/step", "reward/good/std"])
def test_a_sign_that_goes_away_is_counted_anew(name):
    watch = guards(stop_after=3)
    for step in range(20):
        change = {name: 0} if step % 3 else {}
        watch({**WELL, "optimizer/step": step + 1, **change})


def test_a_constant_is_one_value_over_iterations_too():
    """All samples of an iteration alike, and those of the next alike at another value."""
    watch = guards(stop_after=3)
    for step in range(20):
        same = {"reward/good/std": 0.0, "reward/good/mean": float(step)}
        watch({**WELL, "optimizer/step": step + 1, **same})


@pytest.mark.parametrize(
    ("rewards", "mean"),
    [
        ({"good": Rail()}, 0.0),
        ({"good": {"reward": Rail(), "weight": -1.0}}, -1.0),
        ({"good": {"reward": Reward(), "weight": 0.0}}, 0.5),
    ],
)
def test_a_safety_rail_that_always_holds_and_a_mere_measurement_end_nothing(rewards, mean, caplog):
    constant = {"reward/good/std": 0.0, "reward/good/mean": mean}
    assert lived(guards(rewards), 300, **constant) == (300, "")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("weight", "mean"), [(1.0, -1.0), (-1.0, 0.0)])
def test_a_rail_at_its_worst_ends_the_run(weight, mean):
    constant = {"reward/good/std": 0.0, "reward/good/mean": mean}
    rewards = {"good": {"reward": Rail(), "weight": weight}}
    assert lived(guards(rewards), 300, **constant)[0] == 99


def test_null_never_ends_a_run(caplog):
    assert lived(guards(stop_after=None), 300, **{"optimizer/step": 0}) == (300, "")
    assert len(caplog.records) == 1


def test_samples_without_a_score_are_named_by_kind(caplog):
    lived(guards(), 3, **{"reward/invalid/reply": 2.0})
    (said,) = [record.message for record in caplog.records]
    assert "2 samples have no score, reply: a judge's reply could not be read" in said


def test_a_resumed_run_counts_on():
    first = guards(stop_after=4)
    lived(first, 3, **{"optimizer/step": 0})
    second = guards(stop_after=4)
    second.state = json.loads(json.dumps(first.state))
    with pytest.raises(Dead, match="for 4 iterations in a row"):
        second({**WELL, "optimizer/step": 0})


def test_no_published_run_whose_model_is_ever_right_would_have_been_stopped():
    """Their longest stretch without a step is the reason for the default."""
    longest = 0
    for file in sorted(CELLS.glob("*.json")):
        idle, curve = 0, json.loads(file.read_text()).get("curve", [])
        if not any(line["policy/grad_norm"] for line in curve):
            continue  # sampled with one or two steps
        for line in curve:
            idle = 0 if line["policy/grad_norm"] else idle + 1
            longest = max(longest, idle)
    assert 10 < longest < GuardConfig().stop_after / 1.5


def test_an_iteration_without_any_score_is_no_constant():
    metrics = {name: value for name, value in WELL.items() if "good" not in name}
    assert not signs(metrics, {}, GuardConfig(), load_set({"good": Reward()}))


# --- in runs


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    small.load_once(monkeypatch)


def run_with(tmp_path, reward, **changes):
    """A small run whose samples a function scores."""
    settings = {"data__eval": "null", "guard__check_rewards": "false", "iterations": "9"}
    settings = {**settings, "checkpoint__every": "50", **changes}
    made = small.trainer(tmp_path / "run", "flow_grpo", **settings)
    return small.use_rewards(made, load_set({"custom": reward}))


def saved(run):
    return [folder.name for folder in checkpoint.steps(run)][-1]


def test_a_constant_reward_ends_the_run_after_a_checkpoint(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("flowrl.training.watch.guards.WARN_AFTER", 1)
    settings = {"guard__stop_after": "2"}
    made = run_with(tmp_path, lambda media, *_: torch.ones(len(media)), **settings)
    with caplog.at_level(logging.WARNING), pytest.raises(Dead, match="no optimizer step was taken"):
        made.run()
    assert 'reward "custom" is 1 for every sample' in caplog.text
    assert saved(made.path) == "step-000002" and len(small.lines(made.path)) == 2
    assert not (made.path / "lora").exists()
    again = loop.Trainer(made.cfg, resume=made.path)
    assert again.parts.guards.state["iterations"]["no step"] == 2


def test_a_gradient_of_0_ends_the_run(tmp_path, monkeypatch):
    made = run_with(tmp_path, lambda media, *_: media.flatten(1).std(1), guard__nonfinite="2")
    velocity = made.policy.velocity
    monkeypatch.setattr(
        made.policy,
        "velocity",  # adapters that the network's output does not depend on
        lambda x, *rest, **named: 0 * velocity(x, *rest, **named),
    )
    with pytest.raises(Dead, match="the gradient is exactly 0, although"):
        made.run()


def test_a_run_without_a_step_ends_with_an_error_and_no_lora(tmp_path):
    made = run_with(tmp_path, lambda media, *_: torch.ones(len(media)), iterations="1")
    with pytest.raises(NothingTrained, match="no optimizer step was taken in 1 iterations") as told:
        made.run()
    run = told.value.run
    assert len(run.metrics) == 1 and not (run.path / "lora").exists()
    assert "Nothing was trained" in (run.path / "report.html").read_text()


def test_a_reward_that_hangs_ends_the_run_after_a_checkpoint(tmp_path):
    def hangs(media, *_):
        if made.iteration == 1:
            time.sleep(60)
        return media.flatten(1).std(1)

    made = run_with(tmp_path, hangs)
    small.use_rewards(made, dataclasses.replace(load_set({"custom": hangs}), seconds=2.0))
    with pytest.raises(RewardUnavailable, match='reward "custom" did not return within 2 seconds'):
        made.run()
    assert saved(made.path) == "step-000001"
    line = history.read(made.path)[-1]
    assert (line["event"], line["iteration"]) == ("failed", 1)
    assert line["what"].startswith('reward "custom" did not return within 2 seconds')


def test_a_run_that_fails_on_a_full_disk_says_its_own_error(tmp_path, monkeypatch):
    (tmp_path / history.FILE).touch()
    monkeypatch.setattr(lines, "append", Mock(side_effect=OSError(28, "No space left on device")))
    source = SimpleNamespace(world=SimpleNamespace(main=True))
    parts = SimpleNamespace(path=tmp_path, source=source)
    with (
        pytest.raises(RuntimeError, match="own"),
        recorded(SimpleNamespace(parts=parts, iteration=3)),
    ):
        raise RuntimeError("own")


def test_the_limit_of_the_config_reaches_the_rewards(tmp_path):
    made = small.trainer(
        tmp_path / "run", "flow_grpo", guard__reward_seconds="7", data__eval="null"
    )
    assert made.source.rewards.seconds == 7
