"""Micro-batches change no gradient, for losses that couple rows too; and what the gain of winners
measures."""

from dataclasses import replace

import pytest
import torch
from toy import ToyPolicy, advantages_of, gradient, roll_out, to_the_right

from flowrl.algorithms import awm, crd, dgpo, dpo, grpo, nft, prdp, raft, reg_grpo
from flowrl.algorithms.common.base import checked_loss
from flowrl.samplers import keys
from flowrl.training import gradient as objective
from flowrl.training import two_pass
from flowrl.training.winner_gain import mean_gain
from flowrl.types import Columns

ALGORITHMS = {
    "grpo": (grpo, {"clip": (0.2, 0.2)}),
    "grpo of sequences": (grpo, {"clip": (0.2, 0.2), "ratio": "sequence"}),
    "nft": (nft, {}),
    "awm": (awm, {"steps": 4, "kl_weight": 0.1}),
    "awm of samples": (
        awm,
        {"steps": 4, "ratio": "sample", "off_policy": True, "clip": (0.2, 0.2)},
    ),
    "dgpo": (dgpo, {"beta": 5.0, "clip": None, "kl_weight": 0.1}),
    "crd": (crd, {"steps": 2, "temperature": 0.3}),
    "crd bce": (crd, {"steps": 2, "form": "bce", "kl_weight": 0.0}),
    "dpo": (dpo, {"steps": 3, "beta": 5.0}),
}
METHODS = {
    **ALGORITHMS,
    "prdp": (prdp, {}),
    "reg_grpo": (reg_grpo, {}),
    "raft": (raft, {"steps": 3}),
}
COUPLED = ["grpo of sequences", "awm of samples", "dgpo", "crd", "crd bce", "dpo"]


def make(name):
    module, options = METHODS[name]
    return module.ALGORITHM(module.ALGORITHM.Config(**options))


def prepared(algorithm):
    """A policy apart from those that sampled and that it is compared with."""
    policy = ToyPolicy(0.3)
    rollout = roll_out(policy, algorithm)
    for net, std in ((policy.net, 0.1), (policy.old, 0.3)):
        torch.nn.init.normal_(net[2].bias, std=std)
    return (
        policy,
        rollout,
        algorithm.columns(
            rollout, advantages_of(algorithm, rollout, to_the_right(rollout)), seed=0, iteration=0
        ),
    )


@pytest.fixture
def double(monkeypatch):
    """Everything in fp64, so that a difference of two gradients is not one of rounding."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(previous)


def accumulated(algorithm, policy, rollout, rows, *, micro=7, total_weight=10.0):
    policy.zero_grad()
    calls = []

    def backward(loss):
        calls.append(loss.item())
        loss.backward()

    metrics = objective.accumulate(
        algorithm, policy, rollout, rows, micro=micro, total_weight=total_weight, backward=backward
    )
    return gradient(policy.net), metrics, calls


def at_once(algorithm, policy, rollout, rows, total_weight=10.0):
    policy.zero_grad()
    out = checked_loss(algorithm, algorithm.score(policy, rollout, rows), rows)
    (out.loss / total_weight).backward()
    return gradient(policy.net), out.metrics


def gap(a, b):
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("micro", [1, 7, 50])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_micro_batches_give_the_gradient_of_the_whole_batch(name, micro, double):
    """Whether units fit (one pass) or not (two passes): far below 1e-6 of the largest entry, and
    the same metrics."""
    algorithm = make(name)
    policy, rollout, rows = prepared(algorithm)
    whole, expected = at_once(algorithm, policy, rollout, rows)
    got, metrics, calls = accumulated(algorithm, policy, rollout, rows, micro=micro)
    assert (len(calls) > 1 or micro == 50) and float(whole.abs().max()) > 1e-3
    assert got.dtype == torch.float64 and gap(got, whole) < 1e-9
    assert metrics.keys() == expected.keys()
    for metric, value in expected.items():
        assert float(metrics[metric]) == pytest.approx(float(value), rel=1e-9, abs=1e-9), metric


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_same_in_fp32_to_a_millionth(name):
    algorithm = make(name)
    policy, rollout, rows = prepared(algorithm)
    whole, _ = at_once(algorithm, policy, rollout, rows)
    for micro in (1, 7, 50):
        assert gap(accumulated(algorithm, policy, rollout, rows, micro=micro)[0], whole) < 1e-6


@pytest.mark.parametrize("name", COUPLED)
def test_splitting_the_rows_of_a_unit_would_be_wrong(name, double):
    """The tests above can fail: a loss that joins rows, summed over micro-batches that cut them,
    has another gradient."""
    algorithm = make(name)
    policy, rollout, rows = prepared(algorithm)
    right, _, _ = accumulated(algorithm, policy, rollout, rows, micro=5)
    algorithm.couples = "row"
    wrong, _, _ = accumulated(algorithm, policy, rollout, rows, micro=5)
    assert gap(wrong, right) > 1e-3


@pytest.mark.parametrize(
    ("name", "unit"),
    [("grpo of sequences", 7), ("awm of samples", 4), ("dgpo", 8), ("crd", 8), ("dpo", 2)],
)
def test_units_that_fit_go_through_the_network_once_others_twice(name, unit):
    """`unit` rows belong together: with micro = unit one pass in whole units; below it, one without
    and one with gradient."""
    algorithm = make(name)
    policy, rollout, rows = prepared(algorithm)
    assert set(torch.unique(rows.unit, return_counts=True)[1].tolist()) == {unit}
    views = []
    velocity = policy.velocity
    policy.velocity = lambda *args, **options: (
        views.append((policy.active, torch.is_grad_enabled())) or velocity(*args, **options)
    )
    _, _, calls = accumulated(algorithm, policy, rollout, rows, micro=unit)
    assert (
        len(calls) == len(rows) // unit == views.count(("default", True))
        and ("default", False) not in views
    )
    views.clear()
    _, _, calls = accumulated(algorithm, policy, rollout, rows, micro=unit - 1)
    assert (
        len(calls)
        == -(-len(rows) // (unit - 1))
        == views.count(("default", True))
        == views.count(("default", False))
    )


def test_two_processes_add_up_to_one(double):
    """DGPO's sum over a group needs no other process: each has whole groups, and gradients are
    summed."""
    algorithm = make("dgpo")
    policy, rollout, rows = prepared(algorithm)
    whole, _ = at_once(algorithm, policy, rollout, rows)
    parts = [
        accumulated(algorithm, policy, rollout, rows[(rows.prompt == 0) == first], micro=3)[0]
        for first in (True, False)
    ]
    assert gap(parts[0] + parts[1], whole) < 1e-9


def test_the_weight_of_the_update_divides_the_gradient():
    for name in ("grpo", "dgpo"):
        policy, rollout, rows = prepared(make(name))
        a, _, _ = accumulated(make(name), policy, rollout, rows, total_weight=5.0)
        b, _, _ = accumulated(make(name), policy, rollout, rows, total_weight=20.0)
        assert torch.allclose(a, 4 * b, rtol=1e-5, atol=1e-7)


def test_coefficients_are_the_losss_derivative_by_each_score_that_it_depends_on():
    algorithm = make("dgpo")
    policy, rollout, rows = prepared(algorithm)
    scores = algorithm.score(policy, rollout, rows)
    out, c = two_pass.coefficients(algorithm, scores, rows)
    assert c.keys() == {"error", "kl"} and torch.equal(out.loss, algorithm.loss(scores, rows).loss)
    assert torch.allclose(c["kl"], torch.full((len(rows),), 0.1)) and out.loss.grad_fn is not None
    total = torch.stack(
        [
            (rows.adv * (scores["error"] - scores["error_ref"])).detach()[rows.unit == u].sum()
            for u in rows.unit
        ]
    )
    assert torch.allclose(c["error"], torch.sigmoid(5 * total / 8) * rows.adv, atol=1e-6)


def test_micro_caps_network_rows_and_keeps_rows_of_a_state_together():
    algorithm = make("grpo")
    _, _, rows = prepared(algorithm)
    shared = Columns({**rows.data, "src": rows.src // 3})
    parts = objective.split(algorithm, shared, 4)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(rows)))
    assert all(torch.unique(shared.src[p]).numel() <= 4 for p in parts)
    owners = [set(shared.src[p].tolist()) for p in parts]
    assert sum(map(len, owners)) == len(set.union(*owners))
    for name in ("grpo", "dgpo"):
        policy, rollout, rows = prepared(make(name))
        with pytest.raises(ValueError, match="micro=0"):
            accumulated(make(name), policy, rollout, rows, micro=0)


def test_whole_units_fill_micro_batches_and_none_is_cut():
    """Units of 3, 1, 2 and 4 network rows at micro 4: (3 + 1), 2, 4; rows that share a state count
    once."""
    algorithm = make("grpo of sequences")
    unit = torch.tensor([5, 5, 5, 6, 7, 7, 8, 8, 8, 8])
    order = torch.randperm(10)
    rows = Columns({"unit": unit[order], "src": torch.arange(10)[order], "weight": torch.ones(10)})
    parts = two_pass.split_units(algorithm, rows, 4)
    assert [sorted(rows.unit[p].tolist()) for p in parts] == [[5, 5, 5, 6], [7, 7], [8, 8, 8, 8]]
    assert two_pass.split_units(algorithm, rows, 3) is None
    shared = Columns({**rows.data, "src": rows.src // 2})  # states: 0 0 1 | 1 | 2 2 | 3 3 4 4
    assert [
        sorted(set(shared.unit[p].tolist())) for p in two_pass.split_units(algorithm, shared, 3)
    ] == [[5, 6, 7], [8]]
    assert (
        len(two_pass.split_units(algorithm, shared, 2)) == 3
        and two_pass.split_units(algorithm, shared, 1) is None
    )


@pytest.mark.parametrize("name", ["nft", "dgpo"])
def test_an_empty_batch_is_no_micro_batch(name):
    algorithm = make(name)
    policy, rollout, rows = prepared(algorithm)
    none = torch.zeros(0, dtype=torch.int64)
    assert objective.split(algorithm, rows[none], 5) == []
    metrics = objective.accumulate(
        algorithm,
        policy,
        rollout,
        rows[none],
        micro=5,
        total_weight=1.0,
        backward=torch.Tensor.backward,
    )
    assert metrics == {}


# ---------------------------------------------------------------------------
# the gain of winners


def trained(algorithm, policy, rollout, rows, sign):
    """A few steps that make rows of positive advantage likelier (sign 1) or less likely (-1)."""
    part = rows[torch.nonzero(rows.adv > 0).flatten()]
    optimizer = torch.optim.Adam(policy.net.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        (-sign * algorithm.fit(policy, rollout, part).mean()).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "name", ["grpo", "nft", "awm", "dgpo", "crd", "dpo", "prdp", "reg_grpo", "raft"]
)
def test_winners_gain_where_the_policy_moved_towards_them(name):
    """Exactly 0 while the policy is the reference; above 0 after fitting winners, below 0 after
    unfitting them."""
    algorithm = make(name)
    for sign in (1, -1):
        policy = ToyPolicy()
        rollout = roll_out(policy, algorithm)
        rows = algorithm.columns(
            rollout, advantages_of(algorithm, rollout, to_the_right(rollout)), seed=0, iteration=0
        )
        assert mean_gain(algorithm, policy, rollout, rows) == 0.0
        trained(algorithm, policy, rollout, rows, sign)
        gain = mean_gain(algorithm, policy, rollout, rows, most=1000)
        assert sign * gain > 1e-4 and sign * mean_gain(algorithm, policy, rollout, rows) > 0


def test_the_gain_is_the_mean_difference_of_fits_over_winners_alone():
    algorithm = make("nft")
    policy, rollout, rows = prepared(algorithm)
    win = rows[torch.nonzero(rows.adv > 0).flatten()]
    with torch.no_grad():
        now = algorithm.fit(policy, rollout, win)
        with policy.view("reference"):
            expected = (now - algorithm.fit(policy, rollout, win)).mean()
    assert mean_gain(algorithm, policy, rollout, rows, most=len(win)) == pytest.approx(
        float(expected), rel=1e-6
    )
    assert abs(float(expected)) > 1e-3 and policy.active == "default"


def test_the_gain_looks_at_few_rows_the_same_on_any_number_of_processes_none_without_winners():
    """20 winners, most=5: five of them, in two forwards; split over two processes, the same
    five."""
    algorithm = make("nft")
    policy, rollout, rows = prepared(algorithm)
    rows = rows[:40]
    rows = Columns(
        {
            **rows.data,
            "adv": torch.where(torch.arange(40) % 2 == 0, 1.0, -1.0),
            "place": torch.arange(40),
        }
    )
    seen, fit = [], algorithm.fit
    algorithm.fit = lambda policy, rollout, part: (
        seen.append(part.place.tolist()) or fit(policy, rollout, part)
    )
    policy.rows = 0
    assert mean_gain(algorithm, policy, rollout, rows, most=5) is not None
    assert (
        seen[0] == seen[1]
        and len(set(seen[0])) == 5
        and all(place % 2 == 0 for place in seen[0])
        and policy.rows == 10
    )
    draws = keys.uniform(keys.key("winners", rows.noise_key[rows.adv > 0]))
    for half in (rows[:20], rows[20:]):
        mean_gain(algorithm, policy, rollout, half, most=5, gather=lambda _: draws)
    assert sorted(sum(seen[2:], [])) == sorted(seen[0] * 2)
    del seen[2:]
    assert mean_gain(algorithm, policy, rollout, rows[rows.adv < 0]) is None and len(seen) == 2


@pytest.mark.parametrize("name", ["nft", "dgpo"])
@pytest.mark.parametrize(
    ("give", "said"),
    [
        (lambda out: out.loss, r"returned a Tensor of shape \(\), and not a LossOutput"),
        (lambda out: replace(out, loss=out.loss.expand(3)), r"a LossOutput of shape \(3,\), and"),
        (lambda out: replace(out, loss=out.loss.detach()), r"a LossOutput of shape \(\), and not"),
        (lambda out: None, "returned a NoneType, and not"),
    ],
    ids=["a tensor", "three numbers", "no gradient", "nothing"],
)
def test_a_loss_that_is_not_one_number_with_a_gradient_is_said(name, give, said, monkeypatch):
    algorithm = make(name)
    policy, rollout, rows = prepared(algorithm)
    right = type(algorithm).loss
    monkeypatch.setattr(type(algorithm), "loss", lambda *a: give(right(*a)))
    with pytest.raises(ValueError, match=rf"{type(algorithm).__name__}\.loss .*{said}"):
        accumulated(algorithm, policy, rollout, rows, micro=1)
