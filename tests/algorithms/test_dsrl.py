"""Noise-space RL: the Gaussian over initial noise by hand, its shell, and black-box generators."""

from pathlib import Path

import pytest
import small
import torch
from torch.distributions import Normal, kl_divergence
from toy import rewards_of
from two_d import TEXTS, cond, learn, nearness, policy, roll_out, rows_of

import flowrl
from flowrl.algorithms.dsrl import ALGORITHM
from flowrl.policy import GeneratorPolicy
from flowrl.policy.weights import heads
from flowrl.rollouts.inference.generate import generate
from flowrl.samplers import keys
from flowrl.training.loop import Trainer


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**options))


def moved(algorithm):
    """A policy whose Gaussian is not the standard normal."""
    own = policy(algorithm)
    for weight in own.parts["initial_noise"].values():
        torch.nn.init.normal_(weight, std=0.4)
    own.trainable.copy("default", "old")
    return own


def test_at_the_start_samples_are_the_base_policys_bit_for_bit():
    algorithm = make()
    own = policy(algorithm)
    rollout = roll_out(own, algorithm, steps=3)
    images = generate(own, TEXTS, steps=3)
    own.trainable.set_heads(None)
    assert torch.equal(rollout.states, roll_out(own, algorithm, steps=3).states)
    assert torch.equal(images, generate(own, TEXTS, steps=3))


def test_moved_noise_stays_on_its_shell():
    own, prompts = moved(make()), torch.arange(500) % 2
    noise = torch.randn(500, 2)
    x = own.start(noise, 1.0, own.encode(TEXTS), prompts)
    assert torch.allclose(x.norm(dim=1), noise.norm(dim=1), rtol=1e-5)
    step = own.initial(own.encode(TEXTS), prompts)
    z = step.mean + step.std * noise
    assert torch.allclose(x / x.norm(dim=1, keepdim=True), z / z.norm(dim=1, keepdim=True))
    assert (x - noise).abs().mean() > 0.1


def test_mean_and_deviation_are_bounded_and_constant_within_cells():
    head = heads.InitialNoise((3, 8, 8), {"offset": 1.5, "spread": 2.0, "cells": 2})
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=5.0)
    step = head(torch.randn(4, 9), 4, torch.device("cpu"))
    assert step.mean.shape == step.std.shape == (4, 3, 8, 8)
    assert step.mean.abs().max() <= 1.5 and 0.5 - 1e-6 <= step.std.min() <= step.std.max() <= 2
    cells = step.mean.reshape(4, 3, 2, 4, 2, 4)
    assert torch.equal(cells, cells[:, :, :, :1, :, :1].expand_as(cells))
    assert step.mean[0, 0].unique().numel() == 4
    two = heads.InitialNoise((16, 5), {"offset": 1.5, "spread": 2.0, "cells": 1})
    assert two.grid == (1, 5)  # of two axes the last holds the channels


def test_log_probs_are_normals_kl_is_closed_and_the_ratio_is_one():
    algorithm = make()
    own = moved(algorithm)
    rollout = roll_out(own, algorithm)
    rows = rows_of(algorithm, rollout, rewards_of(nearness(rollout.leaves, rollout.group)))
    assert len(rows) == 32
    scores = algorithm.score(own, rollout, rows)
    assert scores["log_ratio"].abs().max() == 0
    step = own.initial(rollout.cond, rows.prompt)
    gaussian = Normal(step.mean, step.std)
    z, _ = algorithm.drawn(own, rollout, rows)
    first = own.init(heads.on_shell(z, keys.gaussian(rows.noise_key, (2,))), 1.0)
    sampled = roll_out(own, algorithm, steps=2)
    v = own.velocity(first, 1.0, rollout.cond, rows.prompt)
    half = first - 0.5 * v
    end = half - 0.5 * own.velocity(half, 0.5, rollout.cond, rows.prompt)
    assert torch.allclose(end, sampled.leaves, atol=1e-5)  # z is what the rollout began with
    by_hand = gaussian.log_prob(z).mean(1)
    assert torch.allclose(algorithm.fit(own, rollout, rows), by_hand, atol=1e-5)
    kl = kl_divergence(gaussian, Normal(0.0, 1.0)).mean(1)
    assert torch.allclose(scores["kl"], kl, atol=1e-5) and kl.min() > 0


def test_the_loss_is_the_clipped_ratio_and_the_kl():
    algorithm = make(clip=(0.1, 0.2), kl_weight=0.5)
    own = policy(algorithm)
    rollout = roll_out(own, algorithm)
    rows = rows_of(algorithm, rollout, rewards_of(nearness(rollout.leaves, rollout.group)))
    rows = type(rows)({**rows[torch.arange(3)].data, "adv": torch.tensor([1.0, 1.0, -1.0])})
    ratio = torch.tensor([1.5, 0.5, 0.5])
    scores = {"log_ratio": ratio.log(), "kl": torch.tensor([0.0, 2.0, 0.0]), "offset": 0 * ratio}
    out = algorithm.loss(scores, rows)
    assert float(out.loss) == pytest.approx(-1.2 - 0.5 + 0.9 + 0.5 * 2)
    assert float(out.metrics["policy/clip_fraction"]) == 2


def test_it_learns_the_better_direction_and_the_network_stays():
    algorithm = make(clip=(0.1, 0.1), kl_weight=0.0)
    own, history = learn(algorithm, rewards_of, iterations=60, lr=1e-2, steps=4, group=32)
    assert sum(history[-5:]) / 5 > sum(history[:5]) / 5 + 0.3
    assert set(own.parts) == {"initial_noise"}
    fresh = policy(algorithm)
    weights = dict(own.modules["module"].named_parameters())
    for name, weight in fresh.modules["module"].named_parameters():
        assert torch.equal(weights[name], weight) and not weights[name].requires_grad


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, monkeypatch):
    monkeypatch.setitem(small.ALGORITHMS, "dsrl", {})
    how = {"data__eval": "null", "guard__check_rewards": "false", "sampler__steps": "2"}
    for name, most in (("whole", 2), ("cut", 1)):
        made = small.trainer(tmp_path / name, "dsrl", iterations="2", **how)
        for it in made:
            assert it.metrics["policy/rows"] > 0 and "policy/winner_gain" in it.metrics
            if it.number == most:
                made.save()
                break
    assert all(name.startswith("initial_noise.") for name in made.parts.weights.parameters)
    del made
    for _ in Trainer(resume=tmp_path / "cut"):
        pass
    whole, again = small.weights(tmp_path / "whole"), small.weights(tmp_path / "cut")
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert small.numbers(tmp_path / "whole") == small.numbers(tmp_path / "cut")


# --- black boxes


def ring(prompts, noise):
    """Media (n, 2): the noise, scaled and moved to the prompt's centre. Asks that nobody wants a
    gradient."""
    assert not torch.is_grad_enabled() and not noise.requires_grad
    return cond(prompts) + 0.5 * noise


def near_target(media, prompts, context=None):
    """Minus the squared distance to the prompts' centres moved by (0.6, 0.6)."""
    return -(media - cond(prompts) - 0.6).square().sum(1)


SETTINGS = {
    "algorithm": "dsrl",
    "algorithm.clip": [0.1, 0.1],
    "algorithm.kl_weight": 0.0,
    "batch": {"prompts": 2, "group": 32, "updates": 1},
    "optimizer": {"lr": 1e-2},
    "eval": {"every": 0, "images": 128, "guidance": "none", "baseline_guidance": None},
    "sampler": {"guidance": "none"},
    "checkpoint": {"every": 1000},
    "ema": {"decay": 0.0},
    "trackers": [],
    "iterations": 30,
}


def test_a_generator_without_gradients_is_trained_saved_and_loaded_again(tmp_path):
    own = GeneratorPolicy(ring, (2,), embed=cond)
    reward = flowrl.reward(scale="minus a squared distance")(near_target)
    run = flowrl.train(
        {**SETTINGS, "output": str(tmp_path / "run")},
        policy=own,
        rewards=reward,
        prompts={"train": TEXTS, "eval": TEXTS},
    )
    before, after = (row["metrics"]["near_target"]["mean"] for row in run.evaluation["rows"])
    assert after > before + 0.3
    other = GeneratorPolicy(ring, (2,), embed=cond)
    plain = generate(other, TEXTS)
    other.load_heads(tmp_path / "run" / "heads")
    assert torch.equal(generate(other, TEXTS), generate(own, TEXTS))
    assert not torch.equal(generate(other, TEXTS), plain)
    with pytest.raises(ValueError, match=r"of latents \(2,\), and this policy's are \(3,\)"):
        GeneratorPolicy(ring, (3,)).load_heads(tmp_path / "run" / "heads")
    with pytest.raises(ValueError, match="has no head"):
        other.load_heads(tmp_path)


def test_generate_takes_the_head_of_a_run_as_it_takes_a_lora(tmp_path, monkeypatch):
    """And a folder with neither is refused."""
    monkeypatch.chdir(tmp_path)
    own = flowrl.load_policy("shapes-sd3")
    own.trainable.set_heads(heads.make(make().heads, own.latent_shape, 0))
    with torch.no_grad():
        for weight in own.parts["initial_noise"].values():
            weight += 0.3
    heads.save(own.trainable.heads, Path("run/heads"))
    words = ["generate", "shapes-sd3", "a red circle", "--steps", "2", "--guidance", "none"]
    assert small.invoke(*words, "-o", "plain.png").exit_code == 0
    assert small.invoke(*words, "--lora", "run", "-o", "moved.png").exit_code == 0
    assert Path("plain.png").read_bytes() != Path("moved.png").read_bytes()
    Path("other").mkdir()
    refused = small.invoke(*words, "--lora", "other", "-o", "none.png")
    assert refused.exit_code == 2 and "other holds no LoRA" in refused.output


def test_other_methods_refuse_a_generator(tmp_path):
    with pytest.raises(ValueError, match="no weights to train.*use algorithm=dsrl"):
        flowrl.train(
            {**SETTINGS, "algorithm": "flow_grpo", "output": str(tmp_path / "run")}
            | {"algorithm.clip": [1e-4, 1e-4]},
            policy=GeneratorPolicy(ring, (2,)),
            rewards=flowrl.reward(scale="a distance")(near_target),
            prompts={"train": TEXTS, "eval": TEXTS},
        )
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    ("generator", "sentence"),
    [
        (lambda prompts, noise: noise + torch.rand(()), "other media for equal noise"),
        (lambda prompts, noise: noise - noise.mean(0), "other media for equal noise"),
        (lambda prompts, noise: 0 * noise, "the same media for any noise"),
        (lambda prompts, noise: noise[:1], "made (1, 2) of 2 prompts"),
        (lambda prompts, noise: None, "made NoneType of 2 prompts"),
    ],
)
def test_a_generator_that_cannot_serve_is_refused(generator, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        GeneratorPolicy(generator, (2,)).self_check(["left", "right"])


def test_what_makes_no_generator_is_refused():
    with pytest.raises(ValueError, match="should be a function of a list of prompts"):
        GeneratorPolicy(3, (2,))
    with pytest.raises(ValueError, match="whole numbers above 0"):
        GeneratorPolicy(ring, (0,))
    with pytest.raises(ValueError, match="embed is a int"):
        GeneratorPolicy(ring, (2,), embed=3)
    with pytest.raises(ValueError, match=r"embed returned \(1,\) for 2 prompts"):
        GeneratorPolicy(ring, (2,), embed=lambda texts: torch.ones(1)).encode(TEXTS)
