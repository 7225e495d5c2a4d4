"""ReinFlow: the density of a learned step by hand, its gradient, its bounds, entropy clipping."""

import math

import pytest
import small
import torch
from torch.distributions import Normal, kl_divergence
from toy import rewards_of
from two_d import TEXTS, learn, nearness, policy, roll_out, rows_of

from flowrl.algorithms.reinflow import ALGORITHM
from flowrl.config.load import ConfigError, load_config
from flowrl.policy.weights import heads
from flowrl.rollouts.generation import sample
from flowrl.rollouts.inference.generate import generate
from flowrl.samplers import learned, plan, sde, sigmas
from flowrl.training.loop import Trainer
from flowrl.types import Columns

CONFIG = {"noise": (0.1, 0.3), "ratio": "sequence"}


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**{**CONFIG, **options}))


def prepared(algorithm, lora=None, **how):
    own = policy(algorithm, lora)
    for weight in own.parts["step_noise"].values():
        torch.nn.init.normal_(weight, std=0.3)
    rollout = roll_out(own, algorithm, **how)
    rewards = rewards_of(nearness(rollout.leaves, rollout.group))
    return own, rollout, rows_of(algorithm, rollout, rewards)


def test_without_noise_the_step_is_eulers():
    v, x, s, t = torch.randn(4, 3), torch.randn(4, 3), torch.full((4,), 0.7), torch.zeros(4)
    step = learned.transition(v, x, s, t, eta=0.2, std=torch.full((4, 3), 1e-9))
    assert torch.allclose(step.mean, x - 0.7 * v)
    assert torch.allclose(step.sample(torch.randn(4, 3)), step.mean)


def test_every_step_is_noisy_the_last_too_and_one_is_enough():
    one = make().plan(sigmas.linear(1), sampler=roll_sampler(), iteration=0, seed=0)
    assert one.kind.tolist() == [1] and bool(one.trained.all()) and one.sigma_next.tolist() == [0]
    four = plan.full(sigmas.linear(4), eta=0.3, sde="learned", last=True)
    assert four.kind.tolist() == [1, 1, 1, 1]
    assert plan.full(sigmas.linear(4), eta=0.3).kind.tolist() == [1, 1, 1, 0]


def roll_sampler():
    return type("Sampler", (), {"eta": 0.0, "init_noise": "sample"})


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_log_probs_are_those_of_normal_and_the_ratio_is_one(steps):
    algorithm = make()
    own, rollout, rows = prepared(algorithm, steps=steps)
    assert len(rows) == 2 * 16 * steps
    x, y = rollout.states[rows.src], rollout.states[rows.dst]
    v = own.velocity(x, rows.sigma, rollout.cond, rows.prompt, guidance="none")
    std = own.step_std(rollout.cond, rows.sigma, rows.prompt, rows.eta)
    assert std.std() > 1e-3  # it differs by prompt, time and channel
    step = (rows.sigma_next - rows.sigma)[:, None].float()
    by_hand = Normal(x + step * v, std).log_prob(y).mean(1)
    scores = algorithm.score(own, rollout, rows)
    assert torch.allclose(scores["log_prob"], by_hand, atol=1e-5)
    assert torch.allclose(rows.log_prob, by_hand, atol=1e-5)
    again = Columns({**rows.data, "log_prob": scores["log_prob"].detach()})
    assert algorithm.loss(scores, again).metrics["policy/log_ratio"] == 0


def test_the_gradient_in_std_is_the_closed_form():
    std = torch.rand(6, 5).add(0.2).requires_grad_()
    x = torch.randn(6, 5)
    step = learned.transition(0 * x, x, torch.ones(6), torch.zeros(6), eta=1.0, std=std)
    gap = torch.randn(6, 5)
    step.log_prob(x + gap, reduction="sum").sum().backward()
    wanted = ((gap / std).square() - 1) / std
    assert torch.allclose(std.grad, wanted.detach(), rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_noise_and_the_lora_and_nothing_else():
    algorithm = make(ratio="ppo")
    own, rollout, rows = prepared(algorithm, lora={"rank": 2, "alpha": 4})
    algorithm.loss(algorithm.score(own, rollout, rows), rows).loss.backward()
    assert set(own.parts) == {"denoiser", "step_noise"}
    for part in own.parts.values():
        assert sum(p.grad.abs().sum() for p in part.values() if p.grad is not None) > 0
    trained = {id(p) for part in own.parts.values() for p in part.values()}
    others = [p for p in own.modules["module"].parameters() if id(p) not in trained]
    assert others and all(p.grad is None for p in others)


@pytest.mark.parametrize("size", [0.0, 1.0, 1e4])
def test_std_stays_within_its_bounds_whatever_the_weights_are(size):
    head = heads.StepNoise((3, 4, 4), {"least": 0.05})
    sigma, most = torch.linspace(0, 1, 9).double(), torch.full((9,), 0.4).double()
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=size)
    std = head(sigma, torch.randn(9, 7), most).detach()
    assert std.shape == (9, 3, 1, 1)
    assert float(std.min()) >= 0.05 - 1e-6 and float(std.max()) <= 0.4 + 1e-6
    if not size:  # the geometric mean
        assert torch.allclose(std, torch.tensor(math.sqrt(0.05 * 0.4)))


def test_the_upper_bound_is_held_and_falls_along_a_cosine():
    algorithm = make(noise=(0.1, 0.2), hold=10, fall=20, floor=0.5)
    found = [algorithm.most(i) for i in (0, 10, 20, 30, 99)]
    assert found == pytest.approx([0.2, 0.2, 0.175, 0.15, 0.15])
    assert make(noise=(0.1, 0.2)).most(10**6) == 0.2


@pytest.mark.parametrize("kl", ["exact", "velocity"])
def test_the_distance_to_the_reference_is_the_kl_of_two_gaussians(kl):
    algorithm = make(kl_weight=0.1, kl=kl)
    own, rollout, rows = prepared(algorithm, lora={"rank": 2, "alpha": 4})
    for weight in own.trainable.named().values():
        torch.nn.init.normal_(weight, std=0.3)
    scores = algorithm.score(own, rollout, rows)
    now = algorithm.transition(own, rollout, rows)
    with own.view("reference"):
        before = algorithm.transition(own, rollout, rows)
    gaussians = [Normal(step.mean, step.std.expand_as(step.mean)) for step, _ in (now, before)]
    exact, gap = kl_divergence(*gaussians).mean(1), (now[1] - before[1]).square().mean(1)
    assert torch.allclose(scores["kl"], exact if kl == "exact" else gap, atol=1e-5)
    assert float(gap.detach().min()) > 0
    assert now[0].kl(now[0]).abs().max() == 0


def test_entropy_clip_stops_the_gradient_of_exactly_the_rows_whose_noise_moved_too_far():
    algorithm = make(ratio="ppo", clip=(9.0, 9.0), entropy_clip=(0.05, 0.1))
    own, rollout, rows = prepared(algorithm)
    log_std = own.step_std(rollout.cond, rows.sigma, rows.prompt, rows.eta).log().mean(1)
    assert torch.allclose(rows.log_std, log_std, atol=1e-5)  # told by the stored log-prob alone
    four = rows[torch.arange(4)]
    moved = torch.tensor([0.94, 0.96, 1.09, 1.11]).log() + four.log_std
    log_prob = four.log_prob.clone().requires_grad_()
    out = algorithm.loss({"log_prob": log_prob, "log_std": moved}, four)
    out.loss.backward()
    assert (log_prob.grad != 0).tolist() == [False, True, True, False]
    assert torch.allclose(log_prob.grad[1:3], -four.adv[1:3])
    assert float(out.metrics["policy/entropy_clipped"]) == 2
    assert float(out.loss) == pytest.approx(-float(four.adv.sum()))  # values stay


def test_the_entropy_bonus_adds_the_mean_log_std():
    plain, paid = make(), make(entropy_weight=0.5)
    own, rollout, rows = prepared(plain)
    scores = plain.score(own, rollout, rows)
    gap = plain.loss(scores, rows).loss - paid.loss(scores, rows).loss
    assert float(gap) == pytest.approx(0.5 * float(scores["log_std"].sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["algorithm.sde=flow_sde"], "noise of a fixed size, whose entropy nothing can change"),
        (["algorithm.noise=[0.3,0.1]"], "the least and then the most standard deviation"),
        (["algorithm.ratio=guard"], "ratio=guard reads the size of a step's noise"),
        (["algorithm.step_weight=noise"], "step_weight=noise reads the size of a step's noise"),
    ],
)
def test_what_does_not_fit_is_refused(words, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config(None, ["algorithm=reinflow", "reward=jpeg", *words])


@pytest.mark.parametrize("option", ["entropy_clip=[0.1,0.1]", "entropy_weight=0.1"])
def test_entropy_options_are_of_learned_noise_alone(option):
    with pytest.raises(ConfigError, match=option.partition("=")[0]):
        load_config(None, ["algorithm=flow_grpo", "reward=jpeg", f"algorithm.{option}"])


def test_other_methods_do_not_take_learned_noise():
    with pytest.raises(ConfigError, match="use algorithm=reinflow"):
        load_config(None, ["algorithm=flow_grpo", "reward=jpeg", "algorithm.sde=learned"])
    assert sde.find("learned").learned and not sde.find("flow_sde").learned


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_it_learns_with_few_steps_and_is_evaluated_without_noise(steps):
    own, history = learn(make(clip=(0.1, 0.1)), rewards_of, iterations=40, lr=1e-2, steps=steps)
    assert history[-1] > history[0] + 0.3
    texts = TEXTS * 64
    x, _, _ = sample(own, texts, torch.arange(128), steps=steps, guidance="none")
    ode = nearness(x, torch.arange(128) % 2).mean()
    assert float(ode) > history[0] + 0.3
    assert torch.equal(generate(own, TEXTS, steps=steps), generate(own, TEXTS, steps=steps))


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, monkeypatch):
    options = {"algorithm.hold": "0", "algorithm.fall": "2", "algorithm.entropy_clip": "[0.1,0.1]"}
    monkeypatch.setitem(small.ALGORITHMS, "reinflow", options)
    how = {"data__eval": "null", "guard__check_rewards": "false", "sampler__steps": "2"}
    for name, most in (("whole", 2), ("cut", 1)):
        made = small.trainer(tmp_path / name, "reinflow", iterations="2", **how)
        before = made.policy.state()
        for it in made:
            if it.number == most:
                made.save()
                break
    del made
    for _ in Trainer(resume=tmp_path / "cut"):
        pass
    whole, again = small.weights(tmp_path / "whole"), small.weights(tmp_path / "cut")
    assert whole.keys() == again.keys() and small.lines(tmp_path / "cut")[-1]["iteration"] == 2
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert small.numbers(tmp_path / "whole") == small.numbers(tmp_path / "cut")
    moved = [name for name in before if not torch.equal(before[name], whole[f"policy/{name}"])]
    assert {name.partition(".")[0] for name in moved} == {"step_noise", "transformer"}
