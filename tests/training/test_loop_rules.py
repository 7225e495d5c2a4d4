"""What must not go wrong in silence: whose weights sample, what the books count, when the ratio is
proved, what a stop leaves."""

import shutil
import signal
import time

import pytest
import small
import torch
from accelerate.utils import LoggerType

import flowrl
from flowrl.config import build
from flowrl.rewards import RewardBug, TooManyInvalid, load_set
from flowrl.rollouts import draw
from flowrl.runtime import install, signals
from flowrl.runtime.store import checkpoint
from flowrl.training import loop
from flowrl.training.resume import check_resume


def quiet(tmp_path, algorithm="nft", **changes):
    return small.trainer(tmp_path / "run", algorithm, **{"data__eval": "null", **changes})


def rewarded(made, reward):
    small.use_rewards(made, load_set({"custom": reward}))
    return made


def spread(media):
    return media.flatten(1).std(1)


def test_diffusion_nft_samples_with_its_old_policy(tmp_path, monkeypatch):
    made, at_work = quiet(tmp_path, iterations="2", algorithm__decay="1", optimizer__lr="3e-2"), []
    real = draw.roll_out

    def spy(policy, batch, plan, **options):
        cond, rows = policy.encode(batch.text), torch.arange(len(batch))
        x = torch.ones(len(batch), *policy.latent_shape)
        seen = [policy.velocity(x, 0.5, cond, rows, guidance="none")]
        for name in ("old", "default"):
            with policy.view(name):
                seen.append(policy.velocity(x, 0.5, cond, rows, guidance="none"))
        at_work.append([v.detach() for v in seen])
        return real(policy, batch, plan, **options)

    monkeypatch.setattr(draw, "roll_out", spy)
    list(made)
    _, (used, old, default) = at_work  # after one update with decay 0.001 the two policies differ
    assert torch.equal(used, old) and not torch.allclose(used, default, rtol=1e-4)


def test_the_ratio_is_proved_at_the_first_iteration_with_rows_and_not_again_after_a_resume(
    tmp_path,
):
    scored = []

    def reward(media, prompts, context):  # one chunk an iteration; all alike in the first
        scored.append(len(media))
        return spread(media) * (len(scored) > 1)

    made = rewarded(quiet(tmp_path, "flow_grpo", iterations="3"), reward)
    told, proved = [], []
    for it in made:
        told.append("policy/ratio_error" in it.metrics)
        proved.append(made.ratio_check.done)
    assert told == [False, True, False] and proved == [False, True, True]
    again = loop.Trainer(made.cfg, resume=made.path)
    assert again.ratio_check.done and again.iteration == 3


def test_weights_in_low_precision_are_not_held_to_fp32s_limit(tmp_path):
    assert build.precision(small.config(tmp_path)) == "no"
    assert build.precision(small.config(tmp_path, model__dtype="bf16")) == "bf16"
    assert (
        build.precision(small.config(tmp_path, model__dtype="bf16", train__precision="fp16"))
        == "fp16"
    )


@pytest.mark.parametrize("guidance", ["none", "2.0"])
@pytest.mark.parametrize("kl", ["0", "0.1"])
def test_network_rows_of_an_update_follow_the_table(tmp_path, guidance, kl):
    """GRPO evaluates G (T - 1) states a prompt, once more for a KL, twice with guidance (spec: cost
    of an iteration)."""
    made = quiet(
        tmp_path, "flow_grpo", iterations="2", sampler__guidance=guidance, algorithm__kl_weight=kl
    )
    _, second = list(made)  # the first iteration also proves the ratio
    rows = 2 * 2 * (4 - 1)
    assert second.metrics["policy/rows"] == rows
    branches = 1 if guidance == "none" else 2
    winners = 2 * rows // 2  # half of the rows, by the policy and by the reference
    assert second.metrics["nfe/update"] == rows * branches
    assert second.metrics["nfe/reference"] == (winners + rows * (kl != "0")) * branches


@pytest.mark.parametrize(
    ("decay", "kl", "calls"), [("0", "0", 1), ("1", "0", 2), ("0", "0.1", 2), ("1", "0.1", 3)]
)
def test_network_rows_of_diffusion_nft_follow_the_table(tmp_path, decay, kl, calls):
    """One call a row, one more for an old policy that lags, one more for a KL."""
    _, second = list(
        quiet(
            tmp_path,
            iterations="2",
            algorithm__decay=decay,
            algorithm__kl_weight=kl,
            optimizer__lr="1e-2",
        )
    )
    winners = 2 * 8 // 2  # half of the rows, by the policy and by the reference
    assert second.metrics["policy/rows"] == second.metrics["nfe/update"] == 2 * 2 * 2
    assert second.metrics["nfe/reference"] == (calls - 1) * 8 + winners


def test_the_gradient_is_clipped_and_the_rate_of_the_schedule_is_applied(tmp_path):
    made = quiet(
        tmp_path,
        iterations="3",
        optimizer__max_grad_norm="1e-3",
        optimizer__warmup="2",
        optimizer__lr="3e-3",
    )
    step, norms, rates = made.parts.weights.optimizer.step, [], []

    def spy():
        norms.append(
            torch.cat(
                [
                    p.grad.flatten()
                    for p in made.parts.weights.parameters.values()
                    if p.grad is not None
                ]
            )
            .norm()
            .item()
        )
        rates.extend(group["lr"] for group in made.parts.weights.optimizer.param_groups)
        step()

    made.parts.weights.optimizer.step = spy
    metrics = [it.metrics for it in made]
    assert norms == pytest.approx([1e-3] * 3, rel=1e-2) and all(
        m["policy/grad_norm"] > 2e-3 for m in metrics
    )
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3])
    assert [m["optimizer/lr"] for m in metrics] == pytest.approx([1e-3, 2e-3, 3e-3])


def test_only_from_the_second_update_on_do_ratios_leave_one_and_clip(tmp_path):
    made = quiet(
        tmp_path,
        "flow_grpo",
        iterations="1",
        batch__prompts="4",
        batch__updates="2",
        optimizer__lr="1e-2",
        algorithm__clip="[1e-6, 1e-6]",
    )
    gradient, seen = made.learner.gradient, []

    def spy(parts):
        metrics, norm = gradient(parts)
        (own,), (summed,) = parts, metrics
        seen.append({name: float(value) / own.weight for name, value in summed.items()})
        return metrics, norm

    made.learner.gradient = spy
    list(made)
    assert (
        seen[0]["policy/log_ratio"] == pytest.approx(0, abs=1e-6)
        and seen[0]["policy/clip_fraction"] == 0
    )
    assert abs(seen[1]["policy/log_ratio"]) > 1e-6 and seen[1]["policy/clip_fraction"] > 0.2


def test_rows_of_a_skipped_update_do_not_count(tmp_path):
    made = quiet(
        tmp_path,
        iterations="1",
        batch__prompts="4",
        batch__updates="2",
        algorithm__kl_weight="0.1",
        optimizer__lr="1e-2",
    )
    gradient, poisoned = made.learner.gradient, [False, True]

    def poison(parts):
        metrics, norm = gradient(parts)
        return metrics, float("nan") if poisoned.pop(0) else norm

    made.learner.gradient = poison
    (it,) = list(made)
    assert it.metrics["policy/skipped"] == 1 and it.metrics["policy/rows"] == 2 * 2 * 2


def test_a_stop_rule_ends_with_the_evaluation_of_what_was_trained(tmp_path):
    run = small.trainer(tmp_path / "run", iterations="50", stop__reward="-1000").run()
    assert "stop.reward" in run.stopped and [row["name"] for row in run.evaluation["rows"]] == [
        "before",
        "after",
    ]
    assert "jpeg" in run.evaluation["paired"]


def test_too_many_invalid_samples_leave_a_checkpoint_of_the_last_finished_iteration(tmp_path):
    def reward(media, prompts, context):
        if made.iteration == 2:
            raise OSError("the server is gone")
        return spread(media)

    made = rewarded(quiet(tmp_path, iterations="4", checkpoint__every="50"), reward)
    with pytest.raises(TooManyInvalid):
        made.run()
    assert [p.name for p in checkpoint.steps(made.path)] == ["step-000000", "step-000002"]
    plain = rewarded(
        small.trainer(tmp_path / "plain", data__eval="null", iterations="2"),
        lambda media, *_: spread(media),
    )
    plain.run()
    a, b = small.weights(made.path), small.weights(plain.path)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_bug_in_a_reward_saves_nothing(tmp_path):
    with pytest.raises(RewardBug):
        rewarded(
            quiet(tmp_path, guard__check_rewards="true"), lambda media, *_: spread(media)[:, None]
        ).run()
    assert not checkpoint.steps(tmp_path / "run")


def test_an_iteration_is_saved_once(tmp_path):
    made = quiet(tmp_path, iterations="2")
    list(made)
    written = checkpoint.latest(made.path).stat().st_mtime_ns
    assert (
        made.save() == checkpoint.latest(made.path)
        and checkpoint.latest(made.path).stat().st_mtime_ns == written
    )
    again = loop.Trainer(made.cfg, resume=made.path)
    assert (
        again.save() == checkpoint.latest(made.path)
        and checkpoint.latest(made.path).stat().st_mtime_ns == written
    )


def test_a_checkpoint_that_was_given_up_halfway_is_written_again(tmp_path, monkeypatch):
    """A second signal while a checkpoint is written: the one that the stop itself takes must be
    there."""
    made, save, given_up = quiet(tmp_path, iterations="3"), checkpoint.save, []

    def interrupted(*args, **options):
        if made.iteration and not given_up:
            given_up.append(args)
            raise signals.Aborted("SIGTERM received")
        return save(*args, **options)

    monkeypatch.setattr(checkpoint, "save", interrupted)
    run = made.run()
    assert given_up and run.stopped == "SIGTERM received"
    assert [p.name for p in checkpoint.steps(made.path)] == ["step-000000", "step-000001"]


def test_a_signal_that_comes_while_a_reward_scores_gives_the_iteration_up(tmp_path, monkeypatch):
    """What gives up is no failure of the sample that is being scored: the reward is not asked
    again, sample by sample."""
    monkeypatch.setattr(signals, "GRACE", 0.05)
    calls = []

    def reward(media, prompts, context):
        if made.iteration == 1:
            calls.append(time.monotonic())
            signal.raise_signal(signal.SIGTERM)
            time.sleep(5)
        return spread(media)

    made = rewarded(
        quiet(tmp_path, iterations="3", checkpoint__every="50"),
        reward,
    )
    run = made.run()
    assert run.stopped == "SIGTERM received" and len(calls) == 1
    assert time.monotonic() - calls[0] < 5
    assert [p.name for p in checkpoint.steps(made.path)] == ["step-000000", "step-000001"]


def test_all_weights_resume_bit_for_bit(tmp_path):
    words = {
        "train__mode": "full",
        "optimizer__lr": "1e-4",
        "data__eval": "null",
        "algorithm__kl_weight": "0.1",
    }
    whole = small.trainer(tmp_path / "whole", iterations="3", **words)
    whole.run()
    part = small.trainer(tmp_path / "part", iterations="3", **words)
    for it in part:
        if it.number == 2:
            break
    part.save()
    flowrl.train(part.cfg, resume=part.path)
    assert small.same(part.path, whole.path)


def test_averages_that_would_never_move_are_named(tmp_path, caplog):
    quiet(tmp_path, iterations="2", ema__every="8")
    assert "ema.every=8 exceeds the run's 2 optimizer steps" in caplog.text


def test_guidance_that_the_algorithm_overrules_is_told(tmp_path):
    assert (
        "guidance none (the algorithm's own, not sampler.guidance=4.5)"
        in quiet(tmp_path, sampler__guidance="4.5").describe()
    )


def test_a_linear_schedule_does_not_start_where_the_model_knows_nothing(tmp_path):
    from types import SimpleNamespace

    from flowrl.policy.replay.coords import Schedule

    known = Schedule(
        sigmas=torch.tensor([0.93, 0.5, 0.02], dtype=torch.float64),
        times=torch.tensor([999.0, 500.0]),
    )
    cfg = small.config(tmp_path, sampler__schedule="linear", sampler__steps="2")
    with pytest.raises(
        ValueError, match=r"starts at sigma 1, but this model knows noise up to 0\.9300 only"
    ):
        build.schedule(cfg, SimpleNamespace(schedule=lambda steps: known))


def test_a_tracker_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr(install, "find_spec", lambda package: None)
    for names, said in (
        (["wandb"], r"wandb is not installed; .*\[wandb\]', or leave"),
        (["aim"], "aim is not installed; pip install aim, or leave it out"),
        (["tensorbord"], 'unknown tracker "tensorbord"; did you mean "tensorboard"'),
    ):
        with pytest.raises(ValueError, match=said):
            install.check_trackers(names)


def test_all_trackers_of_accelerate_are_known():
    assert {kind.value for kind in LoggerType} == {*install.TRACKERS}


def test_a_resumed_run_stays_in_its_folder(tmp_path):
    made = quiet(tmp_path, iterations="1")
    made.run()
    with pytest.raises(ValueError, match="since its newest checkpoint: output "):
        check_resume(small.config(tmp_path / "other", data__eval="null", iterations="1"), made.path)
    moved = shutil.move(made.path, tmp_path / "moved")
    check_resume(small.config(moved, data__eval="null", iterations="1"), moved)
    check_resume(small.config(made.path, data__eval="null", iterations="1"), moved)


def test_decoding_and_rewards_run_outside_autocast_in_evaluation_as_in_training(tmp_path):
    """The network in bf16, the decoder and the reward in fp32, whoever asks."""
    cast, networks = [], []

    def reward(media, prompts, context):
        cast.append(torch.is_autocast_enabled("cpu"))
        return spread(media)

    made = rewarded(
        small.trainer(tmp_path / "run", iterations="1", train__precision="bf16"), reward
    )
    decoder, transformer = made.policy.pipe.vae.decoder, made.policy.modules["transformer"]
    decoder.register_forward_pre_hook(lambda *_: cast.append(torch.is_autocast_enabled("cpu")))
    transformer.register_forward_pre_hook(
        lambda *_: networks.append(torch.is_autocast_enabled("cpu"))
    )
    run = made.run()
    assert len(cast) >= 6 and not any(cast) and all(networks)
    assert [row["name"] for row in run.evaluation["rows"]] == ["before", "after"]
