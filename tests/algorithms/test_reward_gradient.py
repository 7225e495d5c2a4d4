"""Direct reward gradients: identities between the methods, what is drawn, what is refused."""

import pytest
import small
import torch
from pydantic import ValidationError
from toy import GRID, ToyPolicy, backward, gradient, in_fp64, learn, nearness, prepared, roll_out
from zoo import cases

import flowrl
from flowrl.algorithms.reward_gradient import ALGORITHM
from flowrl.config.build import make_algorithm
from flowrl.config.load import load_config
from flowrl.samplers import keys
from flowrl.samplers import plan as plans


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**options))


def slope(policy=None, **options):
    """Loss and its gradient in the net of a toy policy."""
    algorithm = make(**options)
    policy, rollout, _, rows = prepared(algorithm, policy or ToyPolicy(0.3))
    return backward(algorithm, policy, rollout, rows)


def test_all_steps_are_full_backpropagation():
    policy = ToyPolicy(0.3)
    loss, got = slope(policy, last=None)
    algorithm = make(last=None)
    rollout = roll_out(policy, algorithm)
    x = rollout.states[rollout.src]  # where the only kept transition begins: the noise
    assert bool((rollout.sigma == GRID[0]).all())
    for s, end in zip(GRID[:-1].tolist(), GRID[1:].tolist(), strict=True):
        v = policy.velocity(x, torch.full((len(x),), s), None, rollout.group)
        x = x + (end - s) * v
    assert torch.allclose(x, rollout.leaves, atol=1e-5)
    by_hand = -nearness(x, rollout.group).sum()
    policy.zero_grad()
    by_hand.backward()
    assert torch.allclose(loss, by_hand.detach(), rtol=1e-5)
    assert torch.allclose(got, gradient(policy.net), rtol=1e-4, atol=1e-5)


def test_draft_1_is_refl_at_the_last_step():
    """The last step ends at noise level 0, where a step and an estimate are one."""
    policy = ToyPolicy(0.3)
    draft = slope(policy, last=1)
    refl = slope(policy, begin="uniform", earliest=1.0, estimate=True)
    assert torch.equal(draft[0], refl[0]) and torch.equal(draft[1], refl[1])


@pytest.mark.parametrize("last", [1, 3, None])
def test_the_last_k_steps_have_the_gradient_and_the_others_none(last, monkeypatch):
    """In central differences of the steps that are left, from the same state."""
    policy, algorithm = ToyPolicy(0.3), make(last=last)
    _, rollout, _, rows = prepared(algorithm, policy)
    rollout, rows = in_fp64(monkeypatch, rollout, rows)
    policy.double()
    _, got = backward(algorithm, policy, rollout, rows)
    weight = policy.net[2].weight
    at = [p is weight for p in policy.net.parameters()].index(True)
    offset = sum(p.numel() for p in list(policy.net.parameters())[:at])
    for place in (0, 17, 40):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                weight.view(-1)[place] += sign * 1e-3
                ends.append(
                    float(algorithm.loss(algorithm.score(policy, rollout, rows), rows).loss)
                )
                weight.view(-1)[place] -= sign * 1e-3
        expected = (ends[0] - ends[1]) / 2e-3
        assert float(got[offset + place]) == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_computing_again_changes_nothing():
    policy = ToyPolicy(0.3)
    kept, again = (slope(policy, last=4, checkpoint=flag) for flag in (False, True))
    assert torch.equal(kept[0], again[0]) and torch.equal(kept[1], again[1])


def test_rescaling_divides_the_gradient_by_sigma_and_keeps_the_loss():
    policy = ToyPolicy(0.3)
    plain, scaled = (slope(policy, last=1, rescale=flag) for flag in (False, True))
    assert torch.equal(plain[0], scaled[0])
    assert torch.allclose(scaled[1] * float(GRID[-2]), plain[1], rtol=1e-4, atol=1e-6)


def test_noised_copies_are_estimates_from_the_last_noise_level():
    policy, algorithm = ToyPolicy(0.3), make(noised=2)
    _, rollout, _, rows = prepared(algorithm, policy)
    assert rows.sample.tolist() == sorted(list(range(24)) * 2)
    assert float(rows.weight.sum()) == 24 and len(set(rows.noise_key.tolist())) == 48
    x0, s = rollout.leaves[rows.sample], float(GRID[-2])
    x = (1 - s) * x0 + s * keys.gaussian(rows.noise_key, (2,))
    with torch.no_grad():
        v = policy.velocity(x, torch.full((48,), s), None, rows.prompt)
        got = algorithm.score(policy, rollout, rows)["reward"]
    assert torch.allclose(got, nearness(x - s * v, rows.prompt), atol=1e-5)


def test_one_copy_noised_by_what_leads_back_to_the_state_before_is_draft_1():
    policy = ToyPolicy(0.3)
    algorithm = make(last=1)
    _, rollout, _, rows = prepared(algorithm, policy)
    s, before = float(GRID[-2]), rollout.states[rollout.src]
    noise = (before - (1 - s) * rollout.leaves) / s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "gaussian", lambda *a, **k: noise)
        noised = make(noised=1)
        rows_of_noised = noised.columns(
            rollout, noised.advantages(rollout, torch.zeros(24)), seed=0, iteration=0
        )
        got = backward(noised, policy, rollout, rows_of_noised)
    want = backward(algorithm, policy, rollout, rows)
    assert torch.allclose(got[0], want[0], rtol=1e-4)
    assert torch.allclose(got[1], want[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ("reward", lambda r: -r),
        ("hinge", lambda r: (-1 - r).clamp(min=0)),
        ("distance", lambda r: (-1 - r).abs()),
    ],
)
def test_objectives(objective, expected):
    target = {} if objective == "reward" else {"target": -1.0}
    algorithm = make(objective=objective, scale=0.5, **target)
    policy, rollout, _, rows = prepared(algorithm)
    scores = algorithm.score(policy, rollout, rows)
    out = algorithm.loss(scores, rows)
    reward = scores["reward"].detach()
    assert out.loss.item() == pytest.approx(float(0.5 * expected(reward).sum()), rel=1e-5)
    assert out.metrics["policy/reward"].item() == pytest.approx(float(reward.sum()), rel=1e-5)
    assert torch.allclose(reward, nearness(rollout.leaves, rollout.group), atol=1e-4)


def test_the_distance_to_the_reference_is_of_the_steps_with_a_gradient():
    policy = ToyPolicy(0.3)
    algorithm = make(last=2, kl_weight=0.5)
    _, rollout, _, rows = prepared(algorithm, policy)
    policy.rows = 0
    kl = algorithm.score(policy, rollout, rows)["kl"]
    assert policy.rows == 4 * len(rows) and bool((kl > 0).all()) and kl.requires_grad
    assert make().needs == {"reward"} and make(kl_weight=0.5).needs == {"reward", "reference"}


def drawn(steps, iterations=400, **options):
    algorithm = make(**options)
    return [algorithm.begin(steps, 0, i) for i in range(iterations)]


def test_where_the_gradient_begins():
    assert set(drawn(40, begin="uniform", earliest=0.75)) == set(range(30, 40))
    normal = drawn(50, begin="normal", iterations=2000)
    assert min(normal) >= 1 and max(normal) <= 49
    clipped = torch.distributions.Normal(42, 5)
    inside = torch.arange(1, 50)
    weight = (clipped.cdf(inside + 1.0) - clipped.cdf(inside + 0.0)).double()
    mean = float((weight / weight.sum() * inside).sum())
    assert torch.tensor(normal).double().mean().item() == pytest.approx(mean, abs=0.4)
    assert drawn(1, begin="normal", iterations=3) == [0, 0, 0]
    assert drawn(8, last=3, iterations=1) == [5] and drawn(8, last=None, iterations=1) == [0]


def test_the_kept_step_of_a_plan():
    plan = plans.ode(GRID, solver="euler", kept=2)
    assert torch.nonzero(plan.trained).flatten().tolist() == [2] and not bool(plan.kind.any())


@pytest.mark.parametrize(
    "options",
    [
        {"last": 1, "rescale": True},
        {"last": 4},
        {"last": None},
        {"noised": 2, "rescale": True},
        {"begin": "normal"},
        {"begin": "uniform", "estimate": True, "objective": "distance", "target": 0.0},
    ],
    ids=str,
)
def test_it_learns(options):
    history = learn(make(**options), iterations=30, copies=4)
    assert history[-1] > 0.4 * history[0] and history[-1] > history[0] + 0.7, history


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noised": 2, "last": 3}, "it goes with begin=fixed and last=1"),
        ({"last": 3, "rescale": True}, "rescale is of a single step"),
        ({"last": 0}, "greater than 0"),
        ({"begin": "uniform", "earliest": 1.5}, "less than or equal to 1"),
    ],
)
def test_options_that_do_not_go_together(options, said):
    with pytest.raises(ValidationError, match=said):
        make(**options)


def test_more_steps_than_there_are_and_schedules_that_end_above_0():
    with pytest.raises(ValueError, match=r"algorithm.last=9 of sampler.steps=8; lower it"):
        make(last=9).check(plans.ode(GRID))
    above = plans.ode(torch.cat([GRID[:-1], torch.tensor([0.1], dtype=torch.float64)]))
    with pytest.raises(ValueError, match="ends above noise level 0, where the last step gives"):
        make(rescale=True).check(above)
    make().check(above)
    make(estimate=True, rescale=True).check(above)


# --- through the loop


REWARD = {
    "reward": "preference",
    "reward.preference.rounding": "false",
    "batch.group": "1",
}


@pytest.mark.parametrize("name", ["draft", "draft_lv", "refl", "alignprop"])
def test_each_trains_lora_and_says_the_reward(name, tmp_path, monkeypatch):
    monkeypatch.setitem(small.ALGORITHMS, name, REWARD)
    made = small.trainer(tmp_path / "run", name, iterations="2", data__eval="null")
    before = {key: p.detach().clone() for key, p in made.parts.weights.parameters.items()}
    for it in made:
        assert it.metrics["policy/rows"] == 2 * (1 + (name == "draft_lv"))
        assert it.metrics["policy/grad_norm"] > 0
    if name == "draft":  # one step at the end, from the rollout's own states
        assert it.metrics["policy/reward"] == pytest.approx(it.metrics["reward/total"], abs=1e-3)
    now = made.parts.weights.parameters
    assert any(not torch.equal(before[key], now[key]) for key in before)


def test_checkpointing_books_a_network_call_once(tmp_path, monkeypatch):
    calls = {}
    for flag in ("true", "false"):
        monkeypatch.setitem(
            small.ALGORITHMS,
            "draft",
            {**REWARD, "algorithm.checkpoint": flag, "algorithm.last": "2"},
        )
        (it,) = small.trainer(tmp_path / flag, "draft", iterations="1", data__eval="null")
        calls[flag] = it.metrics["nfe/update"]
    assert calls["true"] == calls["false"] == 4


@pytest.mark.parametrize("last", [1, 2])
def test_a_schedule_that_ends_above_0_is_walked_to_its_end(tmp_path, last):
    @flowrl.reward(differentiable=True, scale="mean")
    def bright(media, prompts, context=None):
        return media.flatten(1).mean(1)

    words = ["algorithm=draft", f"algorithm.last={last}", "batch.prompts=2", "iterations=1"]
    words += ["sampler.steps=3", "sampler.guidance=none", "trackers=[]", f"output={tmp_path}/run"]
    policy = flowrl.load_policy(cases()["sd15"].make(), lora={"rank": 2, "alpha": 2})
    assert float(policy.schedule(3).sigmas[-1]) > 0
    given = {"rewards": bright, "prompts": {"train": ["a", "b"]}}
    (metrics,) = flowrl.train(load_config(None, words), policy=policy, **given).metrics
    assert metrics["policy/reward"] == pytest.approx(metrics["reward/total"], abs=1e-4)
    assert metrics["policy/grad_norm"] > 0


def refused(tmp_path, monkeypatch, said, **changes):
    monkeypatch.setitem(small.ALGORITHMS, "draft", changes)
    with pytest.raises(ValueError, match=said):
        list(small.trainer(tmp_path / "run", "draft", iterations="1", data__eval="null"))


def test_what_gives_no_gradient_is_refused(tmp_path, monkeypatch):
    refused(tmp_path, monkeypatch, "and jpeg as loaded gives none", reward="jpeg")
    rounded = {**REWARD, "reward.preference.rounding": "true"}
    refused(tmp_path, monkeypatch, "preference as loaded gives none: .*rounding=false", **rounded)
    assert not (tmp_path / "run").exists()


def test_a_decoder_without_a_gradient_is_refused(tmp_path):
    @flowrl.reward(differentiable=True, scale="mean")
    def bright(media, prompts, context=None):
        return media.flatten(1).mean(1)

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = net

        def forward(self, x, t, cond):
            return self.layer(x)

    settings = {
        "algorithm": "draft",
        "batch": {"prompts": 2},
        "sampler": {"steps": 2, "guidance": "none"},
        "iterations": 2,
        "trackers": [],
        "output": str(tmp_path / "run"),
    }
    given = {"rewards": bright, "prompts": {"train": ["a", "b"]}}
    policy = flowrl.load_policy(Net(), shape=(4,), decode=lambda x: x.detach())
    with pytest.raises(ValueError, match="the decoder of this policy passes no gradient on"):
        flowrl.train(settings, policy=policy, **given)
    assert not (tmp_path / "run").exists()  # refused before anything was written
    policy = flowrl.load_policy(Net(), shape=(4,))
    run = flowrl.train({**settings, "output": str(tmp_path / "own")}, policy=policy, **given)
    assert len(run.metrics) == 2 and run.metrics[-1]["policy/grad_norm"] > 0


def test_the_shipped_settings_are_those_of_the_papers():
    refl = load_config(None, ["algorithm=refl"])
    assert refl.sampler.steps == 40 and refl.sampler.guidance == "none"
    assert set(drawn(40, **{k: refl.algorithm[k] for k in ("begin", "earliest")})) == set(
        range(30, 40)
    )
    assert (refl.algorithm["objective"], refl.algorithm["target"]) == ("hinge", 2.0)
    align = make_algorithm(load_config(None, ["algorithm=alignprop"])).config
    assert (align.begin, align.mean, align.spread) == ("normal", 42 / 50, 5 / 50)
    assert make_algorithm(load_config(None, ["algorithm=draft_lv"])).config.noised == 2
