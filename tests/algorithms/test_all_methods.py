"""What holds of every method: a toy flow learns, parts of a unit give its gradient, and options
that have no meaning are refused."""

from importlib import import_module

import pydantic
import pytest
import torch
from toy import ToyPolicy, backward, gradient, learn, prepared

from flowrl.runtime.registry import choices
from flowrl.training import gradient as objective


def make(name, **options):
    algorithm = import_module(f"flowrl.algorithms.{name}").ALGORITHM
    return algorithm(algorithm.Config(**options))


MOVING = {"reference": "ema", "kl_weight": 1e-3, "steps": 3}
LEARN = [  # method, options, iterations, reward (minus a square) of the last five
    ("nft", {"decay": 0}, 40, -1.2),
    ("nft", {"beta": 0.5, "steps": 3}, 40, -1.2),
    ("nft", {"decay": 0, **MOVING}, 25, -1.3),
    ("awm", {"steps": 3}, 25, -1.0),
    (
        "awm",
        {
            "ema_weight": 0.0,
            "steps": 3,
            "off_policy": True,
            "ratio": "sample",
            "levels": "logit_normal",
            "shift": 3.0,
        },
        25,
        -1.0,
    ),
    ("crd", {"steps": 3}, 25, -1.0),
    ("crd", {"kl_weight": 0.0, "steps": 3, "temperature": 0.2, "beta": 0.3}, 25, -1.0),
    ("dgpo", {"beta": 1.0}, 25, -1.0),
    ("dgpo", {"beta": 10.0, "clip": None, "levels": "stratified", "share": "group"}, 25, -1.0),
    ("dgpo", {"beta": 10.0, "clip": 0.1, **MOVING}, 25, -1.3),
    ("dpo", {"beta": 5.0, "steps": 4}, 30, -1.2),
    (
        "dpo",
        {"beta": 50.0, "steps": 2, "reference": "reset", "reference_every": 3, "error": "eps"},
        30,
        -1.2,
    ),
    ("raft", {"steps": 2}, 30, -1.2),
    ("raft", {"steps": 2, "select": "softmax", "temperature": 0.5}, 30, -1.2),
    ("raft", {"steps": 2, "top": 4, "levels": "schedule", "kl_weight": 1e-3}, 30, -1.2),
    ("prdp", {"std": None, "adv_clip": 1e6, "beta": 0.3, "clip": 0.2}, 25, -1.4),
    ("reg_grpo", {"ratio_eps": 0.05, "scale": "std", "kl_weight": 0.01}, 25, -1.4),
    ("reg_grpo", {"ratio_eps": 0.05, "scale": "fixed", "kl_weight": 0.01}, 25, -1.4),
]


@pytest.mark.parametrize(("name", "options", "iterations", "end"), LEARN)
def test_a_toy_flow_learns(name, options, iterations, end):
    copies = 8 if name in ("prdp", "reg_grpo") else 16
    history = learn(make(name, **options), iterations=iterations, copies=copies)
    assert sum(history[:3]) / 3 < -1.8
    assert sum(history[-5:]) / 5 > end


@pytest.mark.parametrize("micro", [3, 20])
@pytest.mark.parametrize(
    ("name", "options", "couples"),
    [
        ("grpo", {"ratio": "sequence", "clip": (0.05, 0.05)}, "sample"),
        (
            "prdp",
            {"std": None, "adv_clip": 1e6, "beta": 2.0, "clip": 0.02},
            "group",
        ),
        ("reg_grpo", {"ratio_eps": 0.05, "scale": "std", "kl_weight": 0.1}, "group"),
        ("reg_grpo", {"ratio_eps": 0.05, "scale": "fixed", "kl_weight": 0.1}, "group"),
    ],
)
def test_micro_batches_smaller_than_a_unit_give_its_gradient(name, options, couples, micro):
    """The two-pass form, relative to the largest entry; a sample has 7 rows, a group 56. The policy
    is neither the reference nor, any more, the one that sampled."""
    algorithm = make(name, **options)
    policy, rollout, _, rows = prepared(algorithm, ToyPolicy(0.3))
    policy.update("old", 0.0)
    torch.nn.init.normal_(policy.net[2].bias, std=0.3)
    _, whole = backward(algorithm, policy, rollout, rows)
    expected = {n: float(v) for n, v in summed(algorithm, policy, rollout, rows).items()}
    policy.zero_grad()
    metrics = objective.accumulate(
        algorithm,
        policy,
        rollout,
        rows,
        micro=micro,
        total_weight=1.0,
        backward=torch.Tensor.backward,
    )
    largest = float(whole.abs().max())
    assert float((gradient(policy.net) - whole).abs().max()) <= 1e-6 * largest
    assert largest > 1
    assert {n: float(metrics[n]) for n in expected} == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert algorithm.couples == couples


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nft", {"kl_weight": 0.0}),
        ("awm", {"off_policy": True, "steps": 3}),
        ("crd", {"kl_weight": 0.0, "steps": 3}),
    ],
)
def test_one_forward_serves_trained_and_old_policy_while_they_are_equal(name, options):
    """Skipping the old policy's forward changes no bit of loss and gradient."""
    algorithm = make(name, **options)
    policy, rollout, _, rows = prepared(algorithm, ToyPolicy(0.3))
    policy.update("old", 0.0)
    policy.rows = 0
    one, saved = backward(algorithm, policy, rollout, rows)
    assert policy.rows == len(rows)
    policy.same = lambda a, b: False
    two, expected = backward(algorithm, policy, rollout, rows)
    assert policy.rows == 3 * len(rows)
    assert torch.equal(one, two)
    assert torch.equal(saved, expected)


def summed(algorithm, policy, rollout, rows):
    """Metrics of all rows at once."""
    with torch.no_grad():
        return algorithm.loss(algorithm.score(policy, rollout, rows), rows).metrics


REFUSED = [  # method, options, what is said
    ("grpo", {"clip_range": 1e-4}, "clip_range"),
    ("grpo", {"kl": "k3"}, "kl"),
    ("grpo", {"clip": (0.1, -0.1)}, "clip"),
    ("grpo", {"window": {"length": 3}}, "window.length"),
    ("grpo", {"timestep_fraction": 1.5}, "timestep_fraction"),
    ("grpo", {"dual_clip": 1.0}, "greater than 1"),
    ("grpo", {"keep": 1}, "greater than or equal to 2"),
    ("grpo", {"tail": 0.0}, "greater than 0"),
    ("grpo", {"tree": {"children": 0}}, "greater than 0"),
    ("grpo", {"reference": "old"}, "reference"),
    ("grpo", {"reference_decay": 1.0}, "less than 1"),
    ("grpo", {"reference_decay": -0.1}, "reference_decay"),
    ("grpo", {"reference_every": 0}, "reference_every"),
    ("grpo", {"kl_weight": -1.0}, "kl_weight"),
    ("prdp", {"plan": "tree"}, "prdp compares whole samples; algorithm.plan=tree"),
    ("prdp", {"credit": "td"}, "with credit=td does not fit"),
    ("prdp", {"keep": 4}, "prdp compares all samples of a group; algorithm.keep=4"),
    ("prdp", {"timestep_fraction": 0.5}, "leaves out terms of the sum"),
    ("prdp", {"sde": "cps"}, "has no density"),
    ("prdp", {"beta": 0.0}, "greater than 0"),
    ("reg_grpo", {"plan": "fan"}, "reg_grpo compares whole samples; algorithm.plan=fan"),
    ("reg_grpo", {"credit": "backup"}, "with credit=backup does not fit"),
    ("reg_grpo", {"keep": 4}, "reg_grpo compares all samples of a group; algorithm.keep=4"),
    ("reg_grpo", {"ratio_eps": 0.0}, "greater than 0"),
    ("reg_grpo", {"scale": "none"}, "'std' or 'fixed'"),
    ("nft", {"beta": 0}, "beta"),
    ("nft", {"adv_mode": "some"}, "adv_mode"),
    ("nft", {"decay": 3}, "decay"),
    ("nft", {"kl": 1e-4}, "kl"),
    ("nft", {"steps": 0}, "steps"),
    ("nft", {"range": 0}, "range"),
    ("nft", {"first": -1}, "first"),
    ("awm", {"levels": "log"}, "levels"),
    ("awm", {"power": 0}, "power"),
    ("dgpo", {"share": "sample"}, "share"),
    ("dgpo", {"clip": 0}, "clip"),
    ("dpo", {"share": "sample"}, "share"),
    ("crd", {"form": "mae"}, "form"),
    ("raft", {"select": "worst"}, "select"),
    ("raft", {"top": 0}, "top"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_options_without_a_meaning_are_refused(name, options, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        make(name, **options)


@pytest.mark.parametrize("name", choices("flowrl.algorithms"))
def test_every_option_is_described(name):
    schema = import_module(f"flowrl.algorithms.{name}").ALGORITHM.Config
    assert all(field.description for field in schema.model_fields.values())
