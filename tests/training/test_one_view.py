"""How far the trained policy is from the old one, and the warning where both are one."""

import contextlib
from types import SimpleNamespace

import pytest
import small
import torch
from toy import prepared

from flowrl.algorithms.common.base import checked_loss
from flowrl.config.build import make_algorithm
from flowrl.config.load import load_config
from flowrl.policy.weights.parts import TrainedParts
from flowrl.training.watch import one_view

SAID = "the trained policy and the old one are one view of the weights"


@pytest.mark.parametrize("name", ["nft", "awm", "dgpo", "crd"])
def test_a_loss_logs_the_mean_square_distance_to_the_old_policy(name):
    algorithm = make_algorithm(load_config(None, [f"algorithm={name}", "sampler.steps=8"]))
    policy, rollout, _, rows = prepared(algorithm)
    torch.nn.init.constant_(policy.net[2].bias, 0.3)
    scores = algorithm.score(policy, rollout, rows)
    logged = checked_loss(algorithm, scores, rows).metrics["policy/old_deviation"]
    x = algorithm.noised(rollout, rows).x
    with torch.no_grad():
        v = algorithm.velocity(policy, rollout, rows, x)
        with policy.view("old"):
            far = (v - algorithm.velocity(policy, rollout, rows, x)).square().mean(1)
    assert float(logged) == pytest.approx(float((rows.weight * far).sum())) != 0


def look(steps, far, decay=0.5):
    """Iterations of a fake run: optimizer steps and deviation of each."""
    algorithm = SimpleNamespace(follow=lambda step, iteration: {"old": decay})
    learner = SimpleNamespace(step=0, algorithm=algorithm)
    watch = one_view.OneView(learner)
    for number, value in enumerate(far, 1):
        learner.step += steps
        metrics = {} if value is None else {"policy/old_deviation": value}
        assert watch(SimpleNamespace(number=number, metrics=metrics)) == {}


@pytest.mark.parametrize(
    ("steps", "far", "decay", "times"),
    [
        (1, [0.0] * 9, 0.5, 0),
        (1, [0.0] * 25, 0.5, 1),
        (4, [0.0] * 3, 0.0, 1),
        (1, [0.0] * 25, 0.0, 0),  # a copy at each step is equal by intent
        (0, [0.0] * 25, 0.5, 0),  # nothing was trained
        (1, [0.0, 1e-9] * 20, 0.5, 0),
        (1, [None] * 25, 0.5, 0),
    ],
)
def test_the_warning_comes_once_and_only_where_a_difference_is_due(
    steps, far, decay, times, caplog
):
    look(steps, far, decay)
    assert caplog.text.count(SAID) == times


@pytest.mark.parametrize("planted", [True, False])
def test_a_view_that_is_not_switched_is_found(planted, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(one_view, "STEPS", 3)
    if planted:
        monkeypatch.setattr(TrainedParts, "view", lambda self, name: contextlib.nullcontext())
        monkeypatch.setattr(TrainedParts, "same", lambda self, a, b: False)
    trainer = small.trainer(tmp_path / "run", "nft", iterations="4", data__eval="null")
    far = [it.metrics["policy/old_deviation"] for it in trainer]
    assert (SAID in caplog.text) == planted == (far[-1] == 0)
