"""GRPO on unmasking steps: one ratio a token, what is refused, and runs from end to end."""

import importlib.util
from pathlib import Path

import long
import masked
import pytest
import small
import torch

import flowrl
from flowrl.algorithms.grpo import GRPO, GRPOConfig
from flowrl.algorithms.remask import Remask
from flowrl.config.compose import ConfigError
from flowrl.training.loop import Trainer

TOKENS = {"name": "grpo", "sde": "random_order", "ratio": "token", "clip": [0.2, 0.2]}


def prepared(own, **options):
    """(algorithm, rollout, its rows) of two samples of each prompt, one with advantage 1."""
    algorithm = GRPO(GRPOConfig(sde="random_order", **options))
    made = masked.roll_out(own, algorithm)
    advantages = algorithm.advantages(made, torch.tensor([1.0, -1.0] * 3))
    return algorithm, made, algorithm.columns(made, advantages, seed=0, iteration=0)


def test_every_token_of_a_sample_is_a_term_once():
    _, made, rows = prepared(masked.policy(), ratio="token")
    assert len(rows) == 18 and rows.weight.shape == (18, 16) and rows.adv.shape == (18, 1)
    each = torch.zeros(6, 16).index_add(
        0, torch.unique(rows.sample, return_inverse=True)[1], rows.weight
    )
    assert torch.equal(each, torch.ones(6, 16))
    assert torch.equal(rows.log_prob != 0, rows.weight == 1)


@pytest.mark.parametrize("ratio", ("token", "ppo"))
def test_the_gradient_at_the_behaviour_policy_is_that_of_minus_a_log_p(ratio):
    """And it is the same for both ratios, up to the 16 places that a mean divides by."""
    own = masked.policy()
    algorithm, made, rows = prepared(own, ratio=ratio, kl_weight=0.0)
    scores = algorithm.score(own, made, rows)
    out = algorithm.loss(scores, rows)
    assert float(out.metrics["policy/clip_fraction"]) == 0
    torch.testing.assert_close(scores["log_prob"].detach(), rows.log_prob, atol=1e-6, rtol=0)
    parameters = list(own.modules["module"].parameters())
    found = torch.autograd.grad(out.loss, parameters)
    logits = own.velocity(made.leaves.new_full((0, 4, 4), 0), 0.5, made.cond, rows.prompt[:0])
    assert logits.shape == (0, 4, 4, 5)
    x, y = made.at(rows.src), made.at(rows.dst)
    log_p = own.velocity(x, rows.sigma, made.cond, rows.prompt).log_softmax(-1).flatten(1, 2)
    token = log_p.gather(-1, y.flatten(1).clamp(min=0).long()[..., None])[..., 0]
    alone = torch.where(x.flatten(1) != y.flatten(1), token, 0.0).sum(1)
    scale = 1 if ratio == "token" else 1 / 16
    exact = torch.autograd.grad(-(rows.adv.flatten() * alone).sum() * scale, parameters)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_step_of_gradient_makes_good_tokens_likelier_and_bad_ones_less():
    own = masked.policy()
    algorithm, made, rows = prepared(own, ratio="token")
    before = algorithm.fit(own, made, rows).detach()
    algorithm.loss(algorithm.score(own, made, rows), rows).loss.backward()
    with torch.no_grad():
        for weight in own.modules["module"].parameters():
            weight -= 1e-3 * weight.grad
    moved = algorithm.fit(own, made, rows).detach() - before
    adv = rows.adv.flatten()
    assert float(moved[adv > 0].mean()) > 0 > float(moved[adv < 0].mean())


@pytest.mark.parametrize("shrink", (1, 2, 3, 9))
def test_steps_scored_together_have_every_token_once_from_where_the_first_starts(shrink):
    """Three steps: 1 leaves the rows as they are, 2 makes rows of two and of one, 3 makes one."""
    own = masked.policy()
    _, _, each = prepared(own, ratio="token")
    algorithm, made, rows = prepared(own, ratio="token", shrink=shrink)
    starts = {1: [0, 1, 2], 2: [0, 2], 3: [0], 9: [0]}[shrink]
    ends = {1: [0, 1, 2], 2: [1, 2], 3: [2], 9: [2]}[shrink]
    assert len(rows) == 6 * len(starts) == algorithm.most_rows(made.plan, 6)
    assert torch.equal(rows.src.view(6, -1), each.src.view(6, 3)[:, starts])
    assert torch.equal(rows.dst.view(6, -1), each.dst.view(6, 3)[:, ends])
    assert torch.equal(rows.weight.view(6, -1, 16).sum(1), torch.ones(6, 16))
    assert algorithm.rescored == (shrink > 1)


def test_with_the_inverse_of_their_length_all_steps_weigh_alike():
    """The length of a step is the share of the places that it reveals."""
    algorithm, _, rows = prepared(masked.policy(), ratio="token", step_weight="inverse_step")
    tokens = rows.weight.sum(1)
    assert len(torch.unique(tokens)) > 1
    torch.testing.assert_close((rows.weight * rows.scale[:, None]).sum(1), torch.full((18,), 16.0))
    scores = {"log_prob": rows.log_prob.clone().requires_grad_()}
    out = algorithm.loss(scores, rows)
    torch.testing.assert_close(out.loss, (-rows.adv.flatten() * tokens * rows.scale).sum())


def test_all_steps_scored_together_are_diffu_grpo():
    """The same loss and gradient as of samples with all tokens masked, when all start there."""
    own = masked.policy()
    found = []
    for method, options in (
        (GRPO, {"ratio": "token", "shrink": 3, "sde": "random_order"}),
        (Remask, {}),
    ):
        algorithm = method(method.Config(**options, clip=(0.2, 0.2)))
        made = masked.roll_out(own, algorithm)
        advantages = algorithm.advantages(made, torch.tensor([1.0, -1.0] * 3))
        rows = algorithm.columns(made, advantages, seed=0, iteration=0)
        scores = algorithm.score(own, made, rows)
        old = type(rows)({**rows.data, "log_prob": scores["log_prob"].detach()})
        out = algorithm.loss(scores, old)
        parameters = own.modules["module"].parameters()
        found.append((out.loss, *torch.autograd.grad(out.loss, [*parameters])))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, 16 * b, atol=1e-5, rtol=1e-4)  # rows of Remask weigh 1


@pytest.mark.parametrize("ratio", ("token", "ppo"))
def test_the_kl_of_tokens_to_themselves_is_zero_and_grows_as_they_move(ratio):
    own = masked.policy(lora={"rank": 2, "alpha": 4})
    algorithm, made, rows = prepared(own, ratio=ratio, kl_weight=0.1)
    assert float(algorithm.score(own, made, rows)["kl"].detach().abs().max()) == 0
    for weight in own.trainable.named().values():
        torch.nn.init.normal_(weight, std=0.5)
    kl = algorithm.score(own, made, rows)["kl"].detach()
    assert kl.shape == ((18, 16) if ratio == "token" else (18,))
    assert float(kl.min()) >= 0 < float(kl.max())
    out = algorithm.loss(algorithm.score(own, made, rows), rows)
    assert float(out.metrics["policy/kl"]) == pytest.approx(float((rows.weight * kl).sum()))


# ------------------------------------------------------------- what is refused


def settings(output, **changes):
    return {
        "algorithm": TOKENS,
        "batch": {"prompts": 3, "group": 4, "updates": 1},
        "optimizer": {"lr": 1e-2},
        "sampler": {"steps": 4, "eta": 1.0, "guidance": "none", "init_noise": "group"},
        "eval": {"every": 0, "images": 6, "steps": 4, "guidance": "none"},
        "guard": {"check_rewards": False},
        "train": {"mode": "full"},
        "iterations": 3,
        "output": str(output),
        **changes,
    }


TRAINED = {"rewards": masked.counted, "prompts": {"train": masked.PROMPTS}}
LIVE = {"rewards": masked.counted, "prompts": {"train": masked.PROMPTS, "eval": masked.PROMPTS}}


@flowrl.reward(scale="mean of the tokens", differentiable=True)
def smooth(media, prompts, context=None):
    return media.flatten(1).mean(1)


@pytest.mark.parametrize("name", ("nft", "ddpo", "draft"))
def test_methods_on_velocities_refuse_tokens(name, tmp_path):
    live = LIVE | {"rewards": smooth}
    with pytest.raises(ConfigError, match=f"algorithm={name} trains flows, and the model"):
        Trainer(settings(tmp_path / "run", algorithm=name), policy=masked.policy(), **live)


def test_methods_on_tokens_refuse_gradients_of_rewards(tmp_path):
    live = LIVE | {"rewards": {"smooth": {"reward": smooth, "mode": "grad"}, "c": masked.counted}}
    with pytest.raises(ConfigError, match="the gradient of a reward cannot pass through them"):
        Trainer(settings(tmp_path / "run"), policy=masked.policy(), **live)


def test_methods_on_tokens_refuse_flows(tmp_path):
    with pytest.raises(ConfigError, match="trains the tokens of masked generators, and the model"):
        small.trainer(
            tmp_path / "run",
            "flow_grpo",
            algorithm__sde="random_order",
            sampler__eta="1",
            algorithm__kl="exact",
        )


@pytest.mark.parametrize("section", ("sampler", "eval"))
def test_more_steps_than_tokens_are_refused_at_the_start_by_their_own_name(section, tmp_path):
    given = settings(tmp_path / "run")
    given[section] = given[section] | {"steps": 17}
    with pytest.raises(ConfigError, match=rf"^{section}.steps=17 .* of \(4, 4\) tokens; use at"):
        Trainer(given, policy=masked.policy(), **LIVE)
    if section == "eval":  # nothing reads it where there are no prompts of evaluations
        Trainer(given | {"data": {"eval": None}}, policy=masked.policy(), **TRAINED)


# ------------------------------------------------------------- runs


def test_a_run_learns_is_resumed_to_the_bit_and_is_evaluated(tmp_path):
    def live(**more):
        return {"policy": masked.policy(), **LIVE, **more}

    whole = flowrl.train(settings(tmp_path / "whole", iterations=12), **live())
    first, last = whole.metrics[0], whole.metrics[-1]
    assert first["policy/ratio_error"] < 1e-6 and last["reward/total"] > first["reward/total"] + 0.1
    # three prompts: the first grid once each, then three steps of four samples
    assert first["nfe/rollout"] == 3 * (1 + 3 * 4)
    assert (whole.path / "report.html").is_file()
    resumed(tmp_path, 7, lambda: settings(tmp_path / "part", iterations=12), live)
    assert small.lines(tmp_path / "part")[-1]["iteration"] == 12


def resumed(tmp_path, after, config, live):
    """Train a run in the folder "part", which ends after an iteration and is resumed; its numbers
    are those of the run in "whole"."""
    trainer = Trainer(config(), **live())
    for it in trainer:
        if it.number == after:
            trainer.save()
            break
    del trainer
    for _ in Trainer(resume=tmp_path / "part", **live()):
        pass
    assert small.numbers(tmp_path / "whole") == small.numbers(tmp_path / "part")
    whole, part = (small.weights(tmp_path / name) for name in ("whole", "part"))
    assert whole.keys() == part.keys() and all(torch.equal(whole[k], part[k]) for k in whole)


def test_lora_by_confidence_resumes_to_the_bit(tmp_path):
    lora = {"rank": 2, "alpha": 4}
    changes = {
        "algorithm": TOKENS | {"sde": "confidence", "ratio": "ppo", "kl_weight": 0.01},
        "sampler": {"steps": 4, "eta": 2.0, "guidance": 2.0},
        "train": {"mode": "lora", "lora": lora},
        "data": {"eval": None},
    }

    def live():
        return LIVE | {"policy": masked.policy(lora=lora), "prompts": {"train": masked.PROMPTS}}

    for it in Trainer(settings(tmp_path / "whole", **changes), **live()):
        assert it.metrics["policy/rows"] > 0
    resumed(tmp_path, 2, lambda: settings(tmp_path / "part", **changes), live)


@long.mark
@pytest.mark.parametrize("method", ("trace_rl", "unigrpo"))
def test_amused_resumes_to_the_bit(method, tmp_path, monkeypatch):
    monkeypatch.setitem(small.ALGORITHMS, method, {})
    few = {"iterations": "3", "batch__group": "4", "sampler__steps": "4", "data__eval": "null"}
    few |= {"eval__at_start": "false", "guard__check_rewards": "false"}

    def config(name):
        return small.config(tmp_path / name, method, model="shapes-masked", **few)

    for it in Trainer(config("whole")):
        assert it.metrics["policy/rows"] > 0
    resumed(tmp_path, 1, lambda: config("part"), dict)


def test_steps_scored_together_train(tmp_path):
    changes = {"algorithm": TOKENS | {"shrink": 2}, "iterations": 2, "data": {"eval": None}}
    changes["batch"] = {"prompts": 2, "group": 4, "updates": 2}
    live = {**LIVE, "prompts": {"train": masked.PROMPTS}}
    for it in Trainer(settings(tmp_path / "run", **changes), policy=masked.policy(), **live):
        assert it.metrics["policy/grad_norm"] > 0 and it.metrics["policy/log_ratio"] > 0
        assert it.metrics["policy/rows"] <= 2 * 4 * 2


def test_lora_and_the_order_by_confidence_train(tmp_path):
    own = masked.policy(lora={"rank": 2, "alpha": 4})
    changes = {
        "algorithm": TOKENS | {"sde": "confidence", "ratio": "ppo", "kl_weight": 0.01},
        "sampler": {"steps": 4, "eta": 2.0, "guidance": 2.0},
        "train": {"mode": "lora", "lora": {"rank": 2, "alpha": 4}},
        "iterations": 2,
        "data": {"eval": None},
    }
    live = {**LIVE, "prompts": {"train": masked.PROMPTS}}
    for it in Trainer(settings(tmp_path / "run", **changes), policy=own, **live):
        assert it.metrics["policy/rows"] > 0 and it.metrics["policy/grad_norm"] > 0
        assert it.metrics.get("policy/ratio_error", 0) < 1e-5


@pytest.mark.parametrize("method", ("trace_rl", "diffu_grpo"))
def test_the_text_example_runs_and_checks_answers(method, tmp_path, monkeypatch):
    """scripts/examples/arithmetic.py with hardly any training: two digits, sums without carries."""
    file = Path(__file__).parents[2] / "scripts/examples/arithmetic.py"
    spec = importlib.util.spec_from_file_location("arithmetic_example", file)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    media = torch.tensor([[7.0, 6.0], [6.0, 7.0]])
    assert example.correct(media, ["31+45="] * 2).tolist() == [1.0, 0.0]
    pairs = set(example.PAIRS)
    assert (31, 45) in pairs and (39, 45) not in pairs and (60, 45) not in pairs
    assert 0.15 < len(example.HELD_OUT) / len(pairs) < 0.25
    given = example.settings

    def short(seed, output, method):
        full = given(seed, output, method)
        few = {"batch": {"prompts": 4, "group": 8, "updates": 1}, "iterations": 1}
        return full | few | {"eval": full["eval"] | {"images": 8}}

    @flowrl.reward(scale="share of the right digits")
    def digits(media, prompts, context=None):
        sums = torch.tensor([int(prompt[:2]) + int(prompt[3:5]) for prompt in prompts])
        return (media.long() == example.digits(sums)).float().mean(1)

    monkeypatch.setattr(example, "settings", short)
    monkeypatch.setattr(example, "correct", digits)  # an untrained net is never all right
    network = example.pretrained(0, updates=2)
    before, after = example.align(0, tmp_path / "run", network, method)
    assert 0 <= before <= 1 and 0 <= after <= 1
