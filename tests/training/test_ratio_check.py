"""The ratio's self-test, by hand."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from toy import ToyPolicy, advantages_of, roll_out, to_the_right

from flowrl.algorithms.grpo import ALGORITHM as GRPO
from flowrl.training import ratio_check
from flowrl.training.ratio_check import RatioCheck, RatioError, needs_recomputing, old_scores
from flowrl.types import Columns


def columns(*log_probs):
    return Columns({"log_prob": torch.tensor(log_probs)})


def test_equal_log_probs_pass_in_every_precision():
    rows = columns(-1.0, -2.0, 0.5)
    for precision in ("no", "bf16", "fp16"):
        assert (
            needs_recomputing(rows.log_prob.clone(), rows, precision=precision, clip=1e-4) is False
        )


def test_fp32_allows_a_hundred_thousandth_and_names_the_likely_causes():
    rows = columns(0.0, 0.0)
    assert needs_recomputing(torch.tensor([0.9e-5, 0.0]), rows, precision="no", clip=1e-4) is False
    with pytest.raises(
        RatioError, match=r"is 1.1e-05 .* at most 1e-05 is right in fp32; likely causes: dropout"
    ):
        needs_recomputing(torch.tensor([0.0, -1.1e-5]), rows, precision="no", clip=1e-4)


def test_nan_does_not_pass():
    with pytest.raises(RatioError):
        needs_recomputing(torch.tensor([math.nan]), columns(0.0), precision="no", clip=1e-4)
    assert needs_recomputing(torch.tensor([math.nan]), columns(0.0), precision="bf16", clip=1e-4)


@pytest.mark.parametrize(("gap", "recompute"), [(0.9e-5, False), (1.1e-5, True)])
def test_low_precision_recomputes_above_a_tenth_of_the_clip_range(gap, recompute):
    """clip 1e-4: the limit is 1e-5, for the 99th percentile of 200 gaps; one outlier does not
    count."""
    gaps = torch.full((200,), gap)
    gaps[0] = 1.0
    assert needs_recomputing(gaps, columns(*[0.0] * 200), precision="bf16", clip=1e-4) is recompute


def test_without_rows_there_is_nothing_to_prove():
    assert (
        needs_recomputing(
            torch.empty(0), Columns({"log_prob": torch.empty(0)}), precision="no", clip=1e-4
        )
        is False
    )


@pytest.mark.parametrize("ratio", ["ppo", "guard", "log"])
def test_ratios_are_one_against_recomputed_scores_of_the_same_weights(ratio):
    """A training forward that differs from the rollout's, as in bf16: against the rollout ratios
    are off, against itself they are 1."""
    algorithm, policy = GRPO(GRPO.Config(ratio=ratio)), ToyPolicy(0.1)
    rollout = roll_out(policy, algorithm)
    rows = algorithm.columns(
        rollout, advantages_of(algorithm, rollout, to_the_right(rollout)), seed=0, iteration=0
    )
    with torch.no_grad():
        policy.net[2].bias.add_(0.05)
    old = old_scores(algorithm, policy, rollout, rows, micro=7)
    assert old.keys() == ({"log_prob", "normed"} if ratio == "guard" else {"log_prob"})
    recomputed = Columns({**rows.data, **old})

    def log_ratio(batch):
        return float(
            algorithm.loss(algorithm.score(policy, rollout, batch), batch).metrics[
                "policy/log_ratio"
            ]
        ) / len(rows)

    assert log_ratio(rows) > 1e-4 and log_ratio(recomputed) < 1e-7


@pytest.mark.parametrize(
    ("others", "own", "told"),
    [
        ([0.5], [0.1, -0.25], 0.5),  # another process has the largest
        ([0.125, None], [0.0, -0.25], 0.25),
        ([None, 0.5], [], 0.5),  # this one has no rows
        ([None], [], None),
    ],
)
def test_the_logged_error_is_the_largest_of_all_processes(monkeypatch, others, own, told):
    rows = columns(*[0.0] * len(own))
    monkeypatch.setattr(ratio_check, "old_scores", lambda *_: {"log_prob": torch.tensor(own)})
    learner = SimpleNamespace(
        cfg=None,
        algorithm=SimpleNamespace(needs={"log_prob"}, rescored=False),
        policy=SimpleNamespace(ledger=SimpleNamespace(phase=lambda _: nullcontext())),
        micro=1,
        world=SimpleNamespace(collect=lambda mine: [mine, *others]),
    )
    check, metrics = RatioCheck(learner), {}
    check.done = True
    check(None, rows, metrics)
    assert metrics.get("policy/ratio_error") == told
