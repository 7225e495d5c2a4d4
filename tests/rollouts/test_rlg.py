"""Guidance by the reference: its mathematics on Gaussian flows, and one function for all users."""

import json

import pytest
import small
import torch
from torch import nn

from flowrl.evaluation.held_out import evaluate
from flowrl.policy.module import ModulePolicy
from flowrl.rollouts.generation import sample
from flowrl.rollouts.roll_out import roll_out, velocity_of
from flowrl.runtime.ledger import Ledger
from flowrl.samplers import keys, plan
from flowrl.types import PromptBatch

REFERENCE, TUNED = torch.tensor([0.5, -1.0]), torch.tensor([1.5, 0.0])
WEIGHTS = [0.0, 0.5, 1.0, 2.0, 3.0]


class Gaussian(nn.Module):
    """v = E[eps - x0 | x] of data N(mean, variance): with V = (1-s)^2 variance + s^2,

    E[x0 | x] = mean + (1-s) variance / V (x - (1-s) mean), E[eps | x] = s / V (x - (1-s) mean).
    """

    def __init__(self, mean, variance=0.25):
        super().__init__()
        self.mean = nn.Parameter(mean.clone())
        self.variance = nn.Parameter(torch.tensor(variance))

    def forward(self, x, t, cond):
        s, var = t[:, None], self.variance
        share = (s - (1 - s) * var) / ((1 - s) ** 2 * var + s**2)
        return share * (x - (1 - s) * self.mean) - self.mean


def tuned(mean=TUNED):
    """A policy at `mean` whose reference is at REFERENCE."""
    policy = ModulePolicy(Gaussian(REFERENCE), (2,))
    policy.trainable.add_view("reference")
    with torch.no_grad():
        policy.modules["module"].mean.copy_(mean)
    return policy


def samples(policy, rlg=1.0, count=6):
    noise = keys.key(3, torch.arange(count))
    how = {"steps": 5, "guidance": "none", "rlg": rlg}
    return sample(policy, ["x"] * count, noise, **how)[0]


def test_weight_zero_is_the_reference_and_one_the_policy_bit_for_bit():
    policy = tuned()
    own = samples(policy)
    with policy.view("reference"):
        reference = samples(policy)
    assert torch.equal(samples(policy, 1.0), own) and torch.equal(samples(policy, 0.0), reference)
    assert (own - reference).abs().min() > 0.5


def test_where_the_policy_is_its_reference_no_weight_changes_a_bit():
    policy = tuned(mean=REFERENCE)
    for rlg in WEIGHTS:
        assert torch.equal(samples(policy, rlg), samples(policy))


@pytest.mark.parametrize("w", WEIGHTS)
def test_gaussians_of_one_covariance_are_extrapolated_exactly(w):
    """pi_ref^(1-w) pi^w of N(m0, s2) and N(m1, s2) is N(m0 + w (m1 - m0), s2).

    The same holds of the noised densities, so all along the path. On x - (1-sigma) m the velocity
    of a mean m does not depend on m, but for the term -m: a path for mean m + d is the path for m
    plus (1-sigma) d, and Euler's steps follow such a straight line exactly.
    """
    gap = TUNED - REFERENCE
    expected = samples(tuned(), 0.0) + w * gap
    torch.testing.assert_close(samples(tuned(), w), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("w", WEIGHTS)
def test_the_weight_divides_the_coefficient_of_the_kl_term(w):
    """Reward r x under KL coefficient beta: pi ~ N(m0, s2) exp(r x / beta), which is
    N(m0 + s2 r / beta, s2); weight w samples what a run with beta / w would, m0 + s2 r w / beta."""
    r, beta, s2 = torch.tensor([1.0, -2.0]), 0.5, 0.25
    run = tuned(mean=REFERENCE + s2 * r / beta)
    other = ModulePolicy(Gaussian(REFERENCE + s2 * r * w / beta), (2,))
    torch.testing.assert_close(samples(run, w), samples(other), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("sigma", "exact"), [(0.01, True), (0.5, False)])
def test_gaussians_of_two_covariances_are_extrapolated_exactly_at_small_sigma_only(sigma, exact):
    """N(0, 1) and N(0, 1/4) at w = 2: precision -1 + 8 = 7, so that the score of the noised
    product is -x / ((1-sigma)^2 / 7 + sigma^2).

    At 0.5 that is -3.5 x, and the combined one is (2 - 2 / 0.3125) x = -4.4 x."""
    policy = ModulePolicy(Gaussian(torch.zeros(2), 1.0), (2,))
    policy.trainable.add_view("reference")
    x, s = torch.tensor([[1.0, -0.5]]), sigma
    with torch.no_grad():
        policy.modules["module"].variance.fill_(0.25)
        velocity = velocity_of(
            policy, policy.encode(["x"]), guidance="none", ledger=Ledger(), rlg=2.0
        )
        v = velocity(x, torch.full((1,), s), torch.zeros(1, dtype=torch.int64))
    score = -(x + (1 - s) * v) / s
    product = -x / ((1 - s) ** 2 / 7 + s**2)
    error = float(((score - product) / product).abs().max())
    assert error < 1e-3 if exact else abs(error - (4.4 / 3.5 - 1)) < 1e-3


def test_a_rollout_takes_the_same_guidance():
    batch = PromptBatch(text=["x"], ids=torch.tensor([7]), meta=[{}])
    path = plan.ode(torch.linspace(1, 0, 6, dtype=torch.float64), solver="euler")
    how = {"group": 4, "guidance": "none", "seed": 1, "iteration": 2, "micro": 8}

    def leaves(policy, **more):
        return roll_out(policy, batch, path, ledger=Ledger(), **how, **more).leaves

    policy = tuned()
    moved = leaves(policy, rlg=2.0)
    assert policy.calls == 2 * 4 * 5
    other = ModulePolicy(Gaussian(2 * TUNED - REFERENCE), (2,))
    torch.testing.assert_close(moved, leaves(other), rtol=0, atol=1e-5)


def test_evaluation_takes_the_same_guidance():
    def first(media, prompts, context):
        return media[:, 0]

    how = {"images": 6, "steps": 5}
    made = evaluate(tuned(), ["x"], first, rlg=2.0, **how)
    base = evaluate(tuned(), ["x"], first, rlg=0.0, **how)
    gap = made.values["first"] - base.values["first"]
    torch.testing.assert_close(gap, torch.full((6,), 2 * float((TUNED - REFERENCE)[0])))
    assert (made.nfe, base.nfe) == (10, 5)


@pytest.mark.parametrize(
    ("rlg", "sentence"),
    [
        (2.0, "trains all weights and keeps no copy of the old ones"),
        (-1.0, "rlg=-1.0 should be 0"),
        (float("nan"), "rlg=nan should be 0"),
        (float("inf"), "rlg=inf should be 0"),
    ],
)
def test_a_weight_that_cannot_be_used_is_refused(rlg, sentence):
    with pytest.raises(ValueError, match=sentence):
        samples(ModulePolicy(Gaussian(TUNED), (2,)), rlg)


def test_a_run_samples_and_evaluates_with_its_weights(tmp_path):
    """Before training the policy is its reference, so that no weight changes the row before."""
    weights = {"sampler__rlg": "2", "eval__rlg": "3"}
    run = small.trainer(tmp_path / "run", iterations="1", optimizer__lr="1e-2", **weights).run()
    rows = json.loads((run.path / "evaluation.json").read_text())["rows"]
    assert [(row["rlg"], row["nfe"]) for row in rows] == [(3.0, 2 * 2)] * 2
    assert small.numbers(run.path)[0]["nfe/rollout"] == 2 * (2 * 2 * 4)
    answer = small.invoke("evaluate", run.path, "--rlg", 0)
    assert answer.exit_code == 0, answer.output
    base = small.values(run.path, "evaluate, 2 steps, guidance none, rlg 0, seed 0")
    assert base == small.values(run.path, "before") != small.values(run.path, "after")


def test_a_run_of_all_weights_keeps_a_reference_where_it_is_read(tmp_path):
    made = small.trainer(tmp_path / "run", train__mode="full", eval__rlg="2")
    assert made.policy.trainable.has("reference")
