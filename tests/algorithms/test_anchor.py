"""What a policy is held to: the untrained model, a moving average, or itself some time ago."""

import pytest
import torch
from toy import ToyPolicy, advantages_of, backward, learn, prepared, roll_out, to_the_right

from flowrl.algorithms import grpo, prdp, reg_grpo
from flowrl.samplers import sde

METHODS = {"grpo": grpo.ALGORITHM, "prdp": prdp.ALGORITHM, "reg_grpo": reg_grpo.ALGORITHM}


def make(name="grpo", **options):
    return METHODS[name](METHODS[name].Config(**options))


def three_views():
    """default, old, anchor and reference all differ."""
    policy = ToyPolicy(0.3)
    policy.update("old", 0.0)
    for net in (policy.anchor, policy.net):
        torch.nn.init.normal_(net[2].bias, std=0.5)
    return policy


# --- which view


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, set()),
        ({"reference": "ema"}, set()),  # without a weight nothing reads it
        ({"kl_weight": 0.1}, {"reference"}),
        ({"kl_weight": 0.1, "reference": "ema"}, {"anchor"}),
        ({"kl_weight": 0.1, "reference": "reset"}, {"anchor"}),
    ],
)
@pytest.mark.parametrize("name", METHODS)
def test_needs_name_the_view_that_the_loss_reads(name, options, needs):
    if name == "prdp":  # its ratio is to the reference, KL or no KL
        needs = {"anchor" if "reference" in options else "reference"}
    assert make(name, **options).needs == {"log_prob"} | needs


@pytest.mark.parametrize(
    ("reference", "view"), [("frozen", "reference"), ("ema", "anchor"), ("reset", "anchor")]
)
def test_kl_is_measured_from_the_view_of_the_setting(reference, view):
    """exact: |mu - mu_view|^2 / 2 std^2 per latent dim, with gradient in the policy alone."""
    algorithm, policy = make(kl_weight=1.0, reference=reference), three_views()
    _, rollout, _, rows = prepared(algorithm, policy)
    expected = {}
    for other in ("reference", "anchor", "old"):
        with torch.no_grad():
            mine = algorithm.transition(policy, rollout, rows)[0]
            with policy.view(other):
                gap = (mine.mean - algorithm.transition(policy, rollout, rows)[0].mean) / mine.std
        expected[other] = gap.square().mean(1) / 2
    kl = algorithm.score(policy, rollout, rows)["kl"]
    assert torch.allclose(kl.detach(), expected.pop(view), rtol=1e-5)
    assert all(float((kl.detach() - other).abs().max()) > 0.01 for other in expected.values())
    kl.sum().backward()
    assert all(p.grad is None for net in (policy.anchor, policy.old) for p in net.parameters())
    assert policy.active == "default" and float(policy.net[2].bias.grad.abs().min()) > 0


def test_kl_has_gradient_zero_at_its_view_and_pulls_towards_it():
    algorithm, policy = make(kl_weight=1.0, reference="ema"), ToyPolicy(0.3)
    policy.update("anchor", 0.0)
    _, rollout, _, rows = prepared(algorithm, policy)
    algorithm.score(policy, rollout, rows)["kl"].sum().backward()
    assert not bool(policy.net[2].bias.grad.any())
    with torch.no_grad():
        policy.net[2].bias += 0.2
    algorithm.score(policy, rollout, rows)["kl"].sum().backward()
    assert bool((policy.net[2].bias.grad > 0).all())


@pytest.mark.parametrize("reference", ["frozen", "ema"])
def test_prdps_ratio_is_to_its_anchor(reference):
    algorithm, policy = make("prdp", reference=reference, std=None), three_views()
    _, rollout, _, rows = prepared(algorithm, policy)
    got = algorithm.score(policy, rollout, rows)["log_prob_ref"]
    with torch.no_grad(), policy.view("reference" if reference == "frozen" else "anchor"):
        expected = sde.log_prob(
            rollout.plan, algorithm.transition(policy, rollout, rows)[0], rollout.states[rows.dst]
        )
    assert torch.equal(got, expected) and not got.requires_grad


# --- how it follows


@pytest.mark.parametrize("name", METHODS)
def test_follow_says_how_the_anchor_moves_after_each_iteration(name):
    frozen = make(name, kl_weight=0.1)
    ema = make(name, kl_weight=0.1, reference="ema", reference_decay=0.9)
    reset = make(name, kl_weight=0.1, reference="reset", reference_every=3)
    assert [frozen.follow(i, i) for i in range(4)] == [{}] * 4
    assert [ema.follow(5 * i, i) for i in range(3)] == [
        {"anchor": 0.9}
    ] * 3  # an iteration, however many steps it had
    assert [reset.follow(i, i) for i in range(7)] == [
        {},
        {},
        {"anchor": 0.0},
        {},
        {},
        {"anchor": 0.0},
        {},
    ]


def test_without_a_weight_there_is_nothing_to_follow():
    assert make(reference="ema").follow(1, 0) == {}
    assert make(reference="reset", reference_every=1).follow(1, 0) == {}
    assert make("prdp", reference="ema").follow(1, 0) == {"anchor": 0.99}


def iterate(algorithm, iterations, size=1.0):
    """Weights of default and anchor after each iteration, in which every weight rises by `size`."""
    policy, out = ToyPolicy(), []
    for i in range(iterations):
        with torch.no_grad():
            policy.net[2].bias += size
        for view, decay in algorithm.follow(i + 1, i).items():
            policy.update(view, decay)
        out.append((float(policy.net[2].bias.detach().mean()), float(policy.anchor[2].bias.mean())))
    return out


def test_ema_is_the_geometric_average_and_reset_the_policy_of_the_last_reset():
    """Weights 1, 2, 3, 4: d = .5 gives .5, 1.25, 2.125, 3.0625; every = 2 gives 0, 2, 2, 4."""
    ema = make(kl_weight=0.1, reference="ema", reference_decay=0.5)
    assert iterate(ema, 4) == [(1, 0.5), (2, 1.25), (3, 2.125), (4, 3.0625)]
    reset = make(kl_weight=0.1, reference="reset", reference_every=2)
    assert iterate(reset, 4) == [(1, 0), (2, 2), (3, 2), (4, 4)]


def test_a_reset_starts_the_kl_anew():
    """After the second iteration the anchor is the policy: its KL is 0, that to the untrained model
    is not."""
    algorithm, policy = make(kl_weight=0.5, reference="reset", reference_every=2), ToyPolicy()
    seen = []
    for i in range(3):
        rollout = roll_out(policy, algorithm, iteration=i)
        rows = algorithm.columns(
            rollout, advantages_of(algorithm, rollout, to_the_right(rollout)), seed=0, iteration=i
        )
        seen.append(float(algorithm.score(policy, rollout, rows)["kl"].detach().max()))
        with torch.no_grad():
            policy.net[2].bias += 0.1
        for view, decay in algorithm.follow(i + 1, i).items():
            policy.update(view, decay)
    assert seen[0] == 0 and seen[1] > 1e-3 and seen[2] == 0
    assert not policy.same("anchor", "default")
    assert policy.anchor[2].bias.tolist() == pytest.approx([0.2, 0.2])


def test_a_strong_anchor_holds_and_a_following_one_lets_go():
    """The same weight: held to the untrained model the toy stays, held to itself of two iterations
    ago it learns."""
    options = {"clip": (0.2, 0.2), "kl_weight": 30.0}
    held, free = (
        learn(make(**options, reference=reference, reference_every=2), iterations=20, copies=8)
        for reference in ("frozen", "reset")
    )
    assert sum(free[-4:]) > sum(held[-4:]) + 1 and sum(held[-4:]) / 4 < -1.8


def test_kl_and_policy_terms_add_up_per_row():
    algorithm, policy = make(kl_weight=0.3, reference="ema"), three_views()
    _, rollout, _, rows = prepared(algorithm, policy)
    both, _ = backward(algorithm, policy, rollout, rows)
    alone, _ = backward(make(), policy, rollout, rows)
    kl = algorithm.score(policy, rollout, rows)["kl"].detach()
    assert float(both - alone) == pytest.approx(0.3 * float(kl.sum()), rel=1e-4)
