"""The training loop, step by step on the embedded model: what an iteration reports, which rows it
trains, and when it stops."""

import itertools
import json
import math

import pytest
import small
import torch

from flowrl.config import build
from flowrl.policy.load import load_policy
from flowrl.rewards import load_set
from flowrl.runtime.store import checkpoint
from flowrl.training import outputs, records, update

TIMES = {
    f"time/{phase}"
    for phase in ("rollout", "decode", "reward", "update", "iteration", "overhead_fraction")
}
NAMES = {
    "reward/total",
    "reward/invalid",
    "reward/jpeg/mean",
    "reward/jpeg/std",
    "policy/grad_norm",
    "nfe/rollout",
    "nfe/update",
    "flops",
}


def quiet(tmp_path, algorithm="nft", **changes):
    """A trainer without held-out prompts."""
    return small.trainer(tmp_path / "run", algorithm, data__eval="null", **changes)


def own(trainer):
    """Trained weights as one vector."""
    return torch.cat([p.detach().flatten() for p in trainer.parts.weights.parameters.values()])


def relative(a, b, start):
    """Distance of two ends of training, relative to the way."""
    return ((a - b).norm() / (a - start).norm()).item()


@pytest.mark.parametrize("algorithm", ["nft", "flow_grpo"])
def test_iterating_shows_rollout_rewards_and_the_documented_metrics(tmp_path, algorithm):
    made = quiet(
        tmp_path,
        algorithm,
        iterations="2",
        batch__group="4",
        algorithm__kl_weight="0.01",
        trackers="[tensorboard]",
        model__self_check="true",
    )
    told = made.describe()
    assert "2 prompts x 4 = 8 samples" in told and f"{own(made).numel():,} trained weights" in told
    at_most = int(told.split("at most ")[1].split(" ")[0].replace(",", ""))
    calls = int(told.split("guidance none: ")[1].split(" ")[0].replace(",", ""))
    for number, it in enumerate(made, 1):
        assert (
            it.number == number
            and it.rollout.leaves.shape == (8, 4, 16, 16)
            and it.rewards.total.shape == (8,)
        )
        assert it.metrics.keys() >= NAMES | TIMES | {
            "policy/kl",
            "time/reference",
            "memory/peak_gb",
            "optimizer/lr",
            "optimizer/step",
        }
        assert all(isinstance(v, int | float) and math.isfinite(v) for v in it.metrics.values())
        assert it.metrics["nfe/rollout"] == calls == 8 * 4
        assert (
            0
            < it.metrics["policy/rows"]
            <= at_most
            == {"nft": 8 * 2, "flow_grpo": 8 * 3}[algorithm]
        )
        assert it.metrics["optimizer/step"] == number and it.metrics[
            "reward/total"
        ] == pytest.approx(it.rewards.total.mean().item())
        assert ("policy/ratio_error" in it.metrics) == (algorithm == "flow_grpo" and number == 1)
        assert (
            algorithm == "nft" or {"policy/clip_fraction", "policy/log_ratio"} <= it.metrics.keys()
        )
    written = small.lines(made.path)
    assert [line["iteration"] for line in written] == [1, 2] and written[-1].keys() == {
        "iteration",
        *it.metrics,
    }
    assert {p.name for p in made.path.iterdir()} >= {
        "config.yaml",
        "metrics.jsonl",
        "samples",
        "checkpoints",
        "tracker",
    }
    assert (made.path / "samples" / "iteration-000001.png").exists()


def test_samples_are_drawn_at_each_tenth_of_a_run(tmp_path):
    made = quiet(tmp_path, iterations="20", checkpoint__every="100")
    list(itertools.islice(made, 5))
    found = sorted(p.name for p in (made.path / "samples").glob("iteration-*.png"))
    assert found == [f"iteration-{i:06d}.png" for i in (1, 2, 4)]


@pytest.mark.parametrize(
    ("group", "places"),
    [
        ([0, 0, 1], [0, 1, 2]),
        (
            [p for p in range(8) for _ in range(16)],
            [16 * p + i for p in range(8) for i in range(4)],
        ),
        ([0, 1] * 30, [*range(32)]),
        ([*range(50)], [*range(32)]),
    ],
    ids=["few", "groups", "in turns", "prompts"],
)
def test_a_sheet_has_the_first_samples_of_each_prompt(group, places):
    assert outputs.on_sheet(group) == places


def test_a_damaged_evaluation_is_refused_before_anything_is_trained(tmp_path):
    made = quiet(tmp_path, iterations="2")
    (made.path / "evaluation.json").write_text('{"rows": [1,')
    with pytest.raises(ValueError, match=r"edited or damaged .* flowrl evaluate .*run"):
        next(iter(made))
    assert not (made.path / "metrics.jsonl").exists()


def test_updates_are_optimizer_steps_on_disjoint_prompts(tmp_path):
    made = quiet(tmp_path, iterations="1", batch__prompts="4", batch__updates="2", seed="1")
    gradient, seen = made.learner.gradient, []
    made.learner.gradient = lambda parts: (
        seen.append(set(parts[0].rows.prompt.tolist())) or gradient(parts)
    )
    (it,) = list(made)
    assert seen == [{0, 1}, {2, 3}] and it.metrics["optimizer/step"] == 2


@pytest.mark.parametrize("algorithm", ["nft", "flow_grpo"])
def test_the_size_of_micro_batches_does_not_matter(tmp_path, algorithm):
    ends = []
    for micro in ("3", "1000"):
        made = small.trainer(
            tmp_path / micro,
            algorithm,
            data__eval="null",
            iterations="1",
            batch__micro=micro,
            optimizer__eps="1e-3",
        )
        # a JPEG's size jumps where pixels are rounded
        small.use_rewards(made, load_set({"spread": lambda media, *_: media.flatten(1).std(1)}))
        start = own(made)
        list(made)
        ends.append(own(made))
    assert relative(*ends, start) < 1e-4  # of the way
    assert ((ends[0] - ends[1]).norm() / ends[0].norm()).item() <= 1e-6


def test_gradient_checkpointing_gives_the_same_gradients(tmp_path):
    gradients = []
    for on in ("false", "true"):
        made = small.trainer(
            tmp_path / on, data__eval="null", iterations="1", train__gradient_checkpointing=on
        )
        trained = made.parts.weights.parameters.values()
        made.learner.apply = lambda trained=trained: gradients.append(
            torch.cat([p.grad.flatten() for p in trained if p.grad is not None])
        )
        list(made)
    assert gradients[0].norm() > 0
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)


def test_all_weights_can_be_trained(tmp_path):
    made = quiet(tmp_path, iterations="2", train__mode="full", optimizer__lr="1e-5")
    start, reference = own(made), made.policy.state("reference")
    run = made.run()
    assert own(made).numel() > 2e6 and not torch.equal(own(made), start)
    assert torch.equal(torch.cat([v.flatten() for v in reference.values()]), start)
    assert (
        len(run.metrics) == 2
        and run.metrics[-1]["policy/kl"] > 0
        and not (run.path / "lora").exists()
    )


def test_evaluation_uses_averaged_weights_and_leaves_the_own_ones(tmp_path, monkeypatch):
    made, used = (
        small.trainer(tmp_path / "run", iterations="2", ema__decay="0.5", optimizer__lr="1e-2"),
        [],
    )
    monkeypatch.setattr(
        made.parts.weights.ema, "step", lambda: None
    )  # the average stays where training began
    start, evaluate = own(made), outputs.held_out.evaluate
    monkeypatch.setattr(
        outputs.held_out, "evaluate", lambda *a, **k: used.append(own(made)) or evaluate(*a, **k)
    )
    run = made.run()
    assert len(used) == 2 and torch.equal(used[0], start) and torch.equal(used[1], start)
    assert not torch.equal(own(made), start)
    assert small.values(run.path, "before") == small.values(run.path, "after")


def test_training_starts_from_an_exported_lora(tmp_path):
    first = small.trainer(tmp_path / "first", iterations="2", optimizer__lr="1e-2").run()
    assert small.values(first.path, "before") != small.values(first.path, "after")
    second = small.trainer(
        tmp_path / "second", iterations="1", train__init_lora=first.path / "lora"
    ).run()
    assert small.values(second.path, "before") == small.values(first.path, "after")


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", [1 / 3, 2 / 3, 1, (1 + math.sqrt(0.5)) / 2, 1 / 2, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(tmp_path, schedule, rates):
    """Two warm-up steps, then four of six: the fraction done is 0, 1/4, 2/4, 3/4."""
    cfg = small.config(
        tmp_path,
        iterations="3",
        batch__updates="2",
        optimizer__warmup="2",
        optimizer__schedule=schedule,
    )
    assert [
        update.learning_rate(cfg, step) / cfg.optimizer.lr for step in range(6)
    ] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stop__reward": "-1000"}, "reached stop.reward=-1000"),
        ({"stop__hours": "1e-9"}, "stop.hours=1e-09 are over"),
        (
            {
                "stop__kl": "1e-12",
                "optimizer__lr": "1e-2",
                "batch__prompts": "4",
                "batch__updates": "2",
            },
            "exceeds stop.kl=1e-12",
        ),
    ],
)
def test_stop_rules_end_a_run_with_a_checkpoint(tmp_path, changes, reason):
    run = quiet(tmp_path, iterations="50", checkpoint__every="50", **changes).run()
    assert reason in run.stopped and len(run.metrics) == 1
    assert (run.path / "checkpoints" / "step-000001").is_dir() and (
        run.path / "report.html"
    ).exists()


def test_a_nonfinite_gradient_is_skipped_written_out_and_at_last_fatal(tmp_path):
    made = quiet(tmp_path, iterations="9", guard__nonfinite="3")
    start, gradient, poisoned = (
        own(made),
        made.learner.gradient,
        [False, True, True, False, True, True, True],
    )

    def poison(parts):
        metrics, norm = gradient(parts)
        return metrics, math.nan if poisoned.pop(0) else norm

    made.learner.gradient = poison
    steps = []
    with pytest.raises(
        records.RunFailed,
        match="3 updates in a row had a non-finite loss or gradient; lower optimizer.lr",
    ):
        for it in made:
            steps.append((it.metrics["optimizer/step"], it.metrics["policy/skipped"]))
            if it.number == 1:
                start = own(made)
            assert torch.equal(own(made), start) == (it.number <= 3)
    assert steps == [(1, 0), (1, 1), (1, 1), (2, 0), (2, 1), (2, 1)]
    assert torch.isfinite(own(made)).all() and checkpoint.steps(made.path)
    from safetensors.torch import load_file

    dumps = sorted((made.path / "nonfinite").iterdir())
    assert [p.name for p in dumps] == [
        "step-000001-rank-0.safetensors",
        "step-000002-rank-0.safetensors",
    ]
    assert load_file(dumps[0]).keys() >= {"columns.adv", "columns.prompt", "states", "prompt"}


def test_a_poisoned_weight_gives_a_nonfinite_norm(tmp_path):
    """Not only a patched norm: an inf in the loss reaches the guard, and no weight moves."""
    made = quiet(tmp_path, iterations="1", guard__nonfinite="2")
    score = made.algorithm.score
    made.algorithm.score = lambda *a: {k: v * math.inf for k, v in score(*a).items()}
    start = own(made)
    (it,) = list(made)
    assert (
        it.metrics["policy/skipped"] == 1
        and made.learner.step == 0
        and torch.equal(own(made), start)
    )


@pytest.mark.parametrize(("decay", "expected"), [(0, 0.0), (1, 0.001)])
def test_the_old_policy_follows_with_its_decay(tmp_path, decay, expected):
    """decay 0 copies; decay 1 after one optimizer step is min(0.001 * 1, 0.5)."""
    made = quiet(tmp_path, iterations="1", algorithm__decay=str(decay), optimizer__lr="1e-2")
    start = made.policy.state("default")
    list(made)
    new, old = made.policy.state("default"), made.policy.state("old")
    for name in start:
        torch.testing.assert_close(old[name], expected * start[name] + (1 - expected) * new[name])
    assert made.policy.same("default", "old") == (decay == 0)


@pytest.mark.parametrize(
    ("algorithm", "guidance"),
    [("flow_grpo", "2.0"), ("dance_grpo", "none"), ("mix_grpo", "2.0"), ("flow_grpo_fast", "none")],
)
def test_at_the_behaviour_policy_the_ratio_is_one(tmp_path, algorithm, guidance):
    made = quiet(tmp_path, algorithm, iterations="1", sampler__guidance=guidance)
    with (
        torch.no_grad()
    ):  # away from the base model, so that a forward without the adapters would show
        for p in made.parts.weights.parameters.values():
            p.add_(0.02 * torch.randn_like(p))
    told = made.describe()
    (it,) = list(made)
    assert it.metrics["policy/ratio_error"] <= 1e-5 and it.metrics["policy/clip_fraction"] == 0
    nodes = (
        2 * (1 + 3 * 2) if made.parts.setup.plan.init == "batch" else 4 * 4
    )  # samples of a prompt share the first state, or nothing
    assert it.metrics["nfe/rollout"] == nodes * (1 if guidance == "none" else 2)
    assert (
        it.metrics["policy/rows"] > 0 and f"{it.metrics['nfe/rollout']:.0f} network calls" in told
    )


def test_a_planted_mismatch_of_rollout_and_loss_is_caught(tmp_path):
    made = quiet(tmp_path, "flow_grpo", iterations="1")
    velocity = made.policy.velocity
    made.policy.velocity = lambda *a, **k: (
        velocity(*a, **k) * (1 + 1e-2 * torch.rand(1).item())
    )  # as dropout in train mode would
    start = own(made)
    with pytest.raises(
        RuntimeError,
        match=(
            r"ratio self-test: \|log ratio\| is .* at the behaviour policy, at most 1e-05 .*dropout"
        ),
    ):
        list(made)
    assert torch.equal(own(made), start)


def test_bf16_runs_on_a_cpu_and_reports_its_ratio(tmp_path):
    made, types = quiet(tmp_path, "flow_grpo", iterations="2", train__precision="bf16"), set()
    made.policy.modules["transformer"].transformer_blocks[
        0
    ].attn.to_q.base_layer.register_forward_hook(lambda m, i, o: types.add(o.dtype))
    first, second = list(made)
    assert types == {torch.bfloat16} and 0 <= first.metrics["policy/ratio_error"] < 1
    assert made.ratio_check.recompute == ("policy/ratio_error" in second.metrics)
    assert all(p.dtype == torch.float32 for p in made.parts.weights.parameters.values())
    assert (
        second.metrics["policy/clip_fraction"] <= first.metrics["policy/clip_fraction"] + 1e-6
        or made.ratio_check.recompute
    )
    assert (
        first.metrics["policy/clip_fraction"] == 0 or not made.ratio_check.recompute
    )  # recomputed log-probs make the first ratios one


def test_what_is_not_network_vae_or_reward_takes_little_time(tmp_path):
    made = quiet(
        tmp_path,
        iterations="3",
        batch__prompts="4",
        batch__group="8",
        sampler__steps="8",
        checkpoint__every="50",
    )
    shares = [it.metrics["time/overhead_fraction"] for it in made]
    assert min(shares[1:]) < 0.15  # the first iteration also warms up


def test_an_evaluation_in_the_middle_is_in_the_metrics(tmp_path):
    run = small.trainer(tmp_path / "run", iterations="3", eval__every="1").run()
    assert ["eval/jpeg" in line and "eval/total" in line for line in small.lines(run.path)] == [
        True,
        True,
        False,
    ]
    rows = json.loads((run.path / "evaluation.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["before", "after"]


def test_the_written_lora_loads_as_diffusers_loads_it(tmp_path):
    run = quiet(tmp_path, iterations="1", optimizer__lr="1e-2").run()
    weights, settings = build.lora_of(run.path)
    policy = load_policy("shapes-sd3", **settings)
    policy.load_lora(weights)
    ema = small.weights(run.path)
    assert all(torch.equal(value, ema[f"ema/{name}"]) for name, value in policy.state().items())
    pipe = load_policy("shapes-sd3").pipe
    pipe.load_lora_weights(str(weights))
    assert pipe.get_active_adapters()
