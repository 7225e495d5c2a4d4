"""Rewards of mode=grad beside a method's own loss: one gradient, which is the sum of both."""

from types import SimpleNamespace

import pytest
import small
import torch
from toy import ToyPolicy, gradient, nearness, prepared
from toy_learner import learner, term

import flowrl
from flowrl.algorithms.common.climb import Climb
from flowrl.algorithms.grpo import ALGORITHM as GRPO
from flowrl.algorithms.nft import ALGORITHM as NFT
from flowrl.config.load import load_config
from flowrl.config.training import GradientConfig
from flowrl.rewards import load_set, score
from flowrl.rewards.core.rules import parse_rule, settings_of
from flowrl.samplers import keys
from flowrl.training.update import weighted_means
from flowrl.types import Columns


def climb(**settings):
    return Climb(GradientConfig(**settings))


def climbed(policy, rollout, **settings):
    objective = climb(**settings)
    valid = torch.ones(len(rollout.leaf), dtype=torch.bool)
    return term(objective, rollout, objective.rows(rollout, valid, seed=0, iteration=0))


@pytest.mark.parametrize(("method", "options"), [(GRPO, {"kl_weight": 0.1}), (NFT, {})])
def test_the_joint_gradient_is_the_sum_of_both(method, options):
    policy = ToyPolicy(0.3)
    algorithm = method(method.Config(**options))
    _, rollout, _, rows = prepared(algorithm, policy)
    own, beside = term(algorithm, rollout, rows), climbed(policy, rollout, scale=0.3)
    found = {}
    for name, terms in {"own": [own], "beside": [beside], "both": [own, beside]}.items():
        _, norm = learner(policy).gradient(terms)
        found[name] = gradient(policy.net).clone()
        assert norm == pytest.approx(float(found[name].norm()), rel=1e-5)
    assert found["own"].norm() > 1e-2 and found["beside"].norm() > 1e-2
    assert torch.allclose(found["both"], found["own"] + found["beside"], rtol=1e-4, atol=1e-6)


def test_each_term_is_a_mean_over_its_own_rows():
    """Half of the method's rows leave the other term as it is, and it has the gradient of minus the
    mean reward of the estimates, divided by their sigma."""
    policy = ToyPolicy(0.3)
    algorithm = GRPO(GRPO.Config())
    _, rollout, _, rows = prepared(algorithm, policy)
    beside = climbed(policy, rollout, sigma=0.3)
    found = []
    for kept in (rows, rows[torch.arange(0, len(rows), 2)]):
        own = term(algorithm, rollout, kept)
        learner(policy).gradient([own])
        alone = gradient(policy.net).clone()
        metrics, _ = learner(policy).gradient([own, beside])
        found.append(gradient(policy.net) - alone)
    assert torch.allclose(found[0], found[1], rtol=1e-4, atol=1e-5)
    chosen, s = beside.rows, 0.3
    x = (1 - s) * rollout.leaves[chosen.sample] + s * keys.gaussian(chosen.noise_key, (2,))
    v = policy.velocity(x, torch.full((24,), s), None, chosen.prompt)
    loss = -nearness(x - s * v, chosen.prompt).mean()
    policy.zero_grad()
    loss.backward()
    assert torch.allclose(found[0], gradient(policy.net) / s, rtol=1e-3, atol=1e-5)
    assert beside.weight == 24 and float(metrics[1]["gradient/reward"]) / 24 == pytest.approx(
        -loss.item(), rel=1e-5
    )


class Linear:
    """v = a x, of one number a. Reward: the sum over dims."""

    def __init__(self):
        self.a = torch.tensor(0.5, requires_grad=True)

    def velocity(self, x, sigma, cond, rows, *, guidance="pipeline"):
        return self.a * x

    def reward(self, x, rollout, samples, sigma=0.0):
        return x.sum(1)


def test_an_estimate_of_a_linear_field_by_hand(monkeypatch):
    """x0 = (2, 4), eps = (1, -1), sigma = .25: x = .75 x0 + .25 eps = (1.75, 2.75) and the estimate
    is x - .25 * .5 x = .875 x, whose sum is .875 * 4.5 = 3.9375. d/da = -.25 * 4.5 = -1.125, or
    -4.5 divided by sigma. With scale 2 the loss has -2 times both."""
    monkeypatch.setattr(keys, "gaussian", lambda *_, **__: torch.tensor([[1.0, -1.0]]))
    x0, leaf = torch.tensor([[2.0, 4.0]]), torch.arange(1)
    rollout = SimpleNamespace(leaf=leaf, at=x0.__getitem__, guidance="none", cond=None)
    one = torch.zeros(1, dtype=torch.int64)
    columns = {"prompt": one, "sample": one, "noise_key": one, "weight": torch.ones(1)}
    rows = Columns({**columns, "sigma": torch.tensor([0.25], dtype=torch.float64)})
    policy, objective = Linear(), climb(scale=2.0)
    scores = objective.score(policy, rollout, rows)
    out = objective.loss(scores, rows)
    out.loss.backward()
    assert scores["reward"].item() == pytest.approx(3.9375)
    assert out.loss.item() == pytest.approx(-7.875)
    assert policy.a.grad.item() == pytest.approx(9.0)


def test_rows_are_valid_samples_at_levels_of_their_own():
    _, rollout, _, _ = prepared(GRPO(GRPO.Config()))
    valid = torch.ones(24, dtype=torch.bool)
    valid[3] = False
    rows = climb(sigma=(0.2, 0.4)).rows(rollout, valid, seed=0, iteration=1)
    assert rows.sample.bincount().tolist() == [1, 1, 1, 0, *[1] * 20]
    assert len(set(rows.noise_key.tolist())) == len(set(rows.sigma.tolist())) == 23
    assert 0.2 <= float(rows.sigma.min()) < 0.23 and 0.37 < float(rows.sigma.max()) <= 0.4
    assert float(rows.weight.sum()) == pytest.approx(23)
    few = climb(samples=2, sigma=0.3).rows(rollout, valid, seed=0, iteration=1)
    later = climb(samples=2, sigma=0.3).rows(rollout, valid, seed=0, iteration=2)
    assert few.prompt.bincount().tolist() == [2, 2, 2] and bool((few.sigma == 0.3).all())
    assert few.sample.tolist() != later.sample.tolist()
    others = valid.clone()
    others[8:] = False  # another process has them: what is drawn here stays
    mine = climb(samples=2, sigma=0.3).rows(rollout, others, seed=0, iteration=1)
    assert mine.sample.tolist() == few.sample[:2].tolist()
    assert mine.noise_key.tolist() == few.noise_key[:2].tolist()


def test_metrics_of_several_updates_are_means_over_the_rows_of_their_term():
    """(6 + 2) / (3 + 1) and (10 + 0) / (2 + 3); the largest of largest values stays."""
    summed = []
    for own, weight, other, beside in ((6.0, 3.0, 10.0, 2.0), (2.0, 1.0, 0.0, 3.0)):
        own_metrics = {"policy/kl": own, "trust/divergence_max": -own}
        summed += [(own_metrics, weight), ({"gradient/reward": other}, beside)]
    means = {"policy/kl": 2.0, "gradient/reward": 2.0}
    assert weighted_means(summed) == {**means, "trust/divergence_max": -2.0}


# --- rewards


@flowrl.reward(differentiable=True, scale="mean")
def bright(media, prompts, context=None):
    return media.flatten(1).mean(1)


@flowrl.reward(scale="deviation")
def spread(media, prompts, context=None):
    return media.flatten(1).std(1)


def both(**more):
    return load_set({"spread": spread, "bright": {"reward": bright, "mode": "grad", **more}})


def test_climbed_rewards_are_measured_and_enter_no_total():
    media = torch.rand(3, 3, 4, 4)
    chosen = both(weight={0: 0.5, 10: 1.5}).at(5)
    all_of_it = score(media, [""] * 3, chosen)
    scored = score(media, [""] * 3, chosen.credited())
    assert torch.allclose(all_of_it.total, all_of_it.raw["spread"] + all_of_it.raw["bright"])
    assert torch.equal(scored.total, scored.raw["spread"])
    assert torch.equal(scored.raw["bright"], media.flatten(1).mean(1))
    assert scored.weights == {"spread": 1.0, "bright": 0.0}
    assert chosen.climbed().weights == {"bright": 1.0}
    assert chosen.stated("bright") == {"weight": {0: 0.5, 10: 1.5}, "mode": "grad"}
    plain = load_set({"spread": spread, "bright": {"reward": bright, "mode": "pg"}})
    assert plain.credited() is plain and not plain.rules


def test_a_climbed_reward_that_fails_invalidates_its_sample():
    @flowrl.reward(differentiable=True, scale="mean")
    def broken(media, prompts, context=None):
        return media.flatten(1).mean(1).where(torch.arange(len(media)) != 1, torch.nan)

    chosen = load_set({"spread": spread, "broken": {"reward": broken, "mode": "grad"}})
    scored = score(torch.rand(3, 3, 4, 4), [""] * 3, chosen.at(0).credited())
    assert scored.valid.tolist() == [True, False, True] and scored.kinds


def test_gates_of_climbed_rewards_are_asked_without_a_gradient():
    chosen = both(gate={"spread": 0.5}).at(0).climbed()
    assert chosen.decisive == {"bright", "spread"} and chosen.weights["spread"] == 0
    assert both().climbed().rewards.keys() == {"bright"}


# --- through the loop

MIXED = {
    "reward": "jpeg",
    "reward.preference.rounding": "false",
    "reward.preference.mode": "grad",
    "batch.updates": "2",
    "gradient.samples": "1",
    "data.eval": "null",
    "guard.check_rewards": "false",
    "iterations": "2",
}


def mixed(folder, algorithm="nft", **changes):
    words = {**MIXED, **{k.replace("__", "."): v for k, v in changes.items()}}
    return small.trainer(folder, algorithm, **{k.replace(".", "__"): v for k, v in words.items()})


def test_a_resumed_run_of_two_updates_equals_the_uninterrupted_one(tmp_path):
    made = mixed(tmp_path / "whole")
    made.run()
    for line in small.lines(tmp_path / "whole"):
        assert line["reward/total"] == pytest.approx(line["reward/jpeg/mean"], rel=1e-6)
        assert abs(line["gradient/reward"] - line["reward/preference/mean"]) < 2
    assert made.learner.step == 4
    half = mixed(tmp_path / "half", iterations="1")
    half.run()
    assert small.invoke("train", "--resume", tmp_path / "half", "iterations=2").exit_code == 0
    assert small.same(tmp_path / "half", tmp_path / "whole")


def test_groups_without_a_signal_still_climb(tmp_path):
    flat = {"reward": lambda media, *_: torch.ones(len(media)), "weight": 1.0}
    chosen = load_set({"flat": flat, "bright": {"reward": bright, "mode": "grad"}})
    (it,) = list(small.use_rewards(mixed(tmp_path / "run", iterations="1"), chosen))
    assert it.metrics["policy/rows"] == 0 and it.metrics["policy/skipped"] == 0
    assert it.metrics["policy/grad_norm"] > 0 and it.metrics["optimizer/step"] == 2


def test_a_weight_of_0_leaves_the_iteration_to_the_method(tmp_path):
    first, second = list(mixed(tmp_path / "run", reward__preference__weight="{0: 0, 1: 1}"))
    assert "gradient/reward" not in first.metrics and "gradient/reward" in second.metrics
    measured = {"reward__preference__mode": "pg", "reward__preference__weight": "0"}
    (alone,) = list(mixed(tmp_path / "pg", iterations="1", **measured))
    assert alone.metrics["policy/grad_norm"] == first.metrics["policy/grad_norm"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reward.clip.mode=gradient"], "reward.clip: mode='gradient' should be pg"),
        (
            ["reward.clip.mode=grad", "reward.clip=0.5", "reward.clip.stratify=shapes"],
            "clip.mode=grad has a gradient in their place; write clip.gate.shapes=0.5",
        ),
        (
            ["reward.shapes.mode=grad", "reward.clip=0.5", "reward.clip.stratify=shapes"],
            "shapes.mode=grad has a gradient .* or leave shapes.mode out",
        ),
        (["gradient.sigma=[0.5,0.1]"], r"from low to high; write \[0.1, 0.5\]"),
        (["gradient.sigma=0"], "greater than 0"),
    ],
)
def test_settings_that_cannot_hold(words, said):
    with pytest.raises(ValueError, match=said):
        load_config(None, words)


def test_a_reward_may_have_a_mode_of_its_own():
    words = ["~reward", "reward.vr_thinker.mode=pairwise", "reward.vr_thinker.model=any"]
    assert load_config(None, words).reward["vr_thinker"]["mode"] == "pairwise"
    assert parse_rule("vr_thinker", {"mode": "pairwise"}).mode == "pg"
    assert settings_of({"mode": "pairwise", "weight": 1.0}) == {"mode": "pairwise"}
    assert settings_of({"mode": "grad", "weight": 1.0}) == {}
