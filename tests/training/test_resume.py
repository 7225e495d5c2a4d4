"""A run that was killed, stopped or prolonged and then resumed equals the uninterrupted one, bit
for bit."""

import copy
import os
import shutil
import signal
import time

import pytest
import small
import torch
from forked import Forked

import flowrl
from flowrl.config.load import read_config
from flowrl.rollouts import draw
from flowrl.runtime.store import checkpoint, history
from flowrl.training import identity, outputs
from flowrl.training.resume import check_resume

ITERATIONS = "5"
forks = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a process with a GPU cannot be forked"
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Algorithm -> folder of a run of five iterations, made once."""
    made = {}

    def run(algorithm):
        if algorithm not in made:
            torch.set_num_threads(1)
            made[algorithm] = tmp_path_factory.mktemp(algorithm) / "run"
            small.trainer(made[algorithm], algorithm, iterations=ITERATIONS).run()
        return made[algorithm]

    return run


def assert_equal(run, other):
    assert [line["iteration"] for line in small.lines(run)] == [1, 2, 3, 4, 5]
    assert small.same(run, other)
    assert all(line["policy/grad_norm"] > 0 for line in small.lines(run))
    assert checkpoint.latest(run).name == checkpoint.latest(other).name == "step-000005"
    groups = {name.split("/")[0] for name in small.weights(run)}
    assert groups >= {"policy", "ema", "optimizer"}
    assert small.values(run, "after") == small.values(other, "after")
    assert small.values(run, "before") == small.values(other, "before")


def started(run, iterations, *words, **changes):
    """A training in a process of its own that has finished so many iterations."""
    words = small.words(run, *words, iterations=ITERATIONS, **changes)
    process, until = Forked(["train", *words], run.parent / "printed.txt"), time.monotonic() + 120
    while len(small.lines(run)) < iterations:
        assert process.poll() is None, process.printed.read_text()
        assert time.monotonic() < until
        time.sleep(0.01)
    return process


def resume(run, *overrides):
    result = small.invoke("train", "--resume", run, *overrides)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize(
    ("algorithm", "every", "done", "later"),
    [
        ("nft", 1, 2, 0.0),
        ("mix_grpo", 2, 3, 0.2),
    ],  # while a checkpoint is written; in the middle of an iteration past the last one
)
@forks
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(
    uninterrupted, tmp_path, algorithm, every, done, later
):
    run = tmp_path / "run"
    process = started(run, done, algorithm, checkpoint__every=str(every))
    time.sleep(later)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60).code == -signal.SIGKILL
    assert done <= len(small.lines(run)) < int(ITERATIONS)
    resume(run)
    assert_equal(run, uninterrupted(algorithm))


@forks
def test_sigterm_ends_with_a_checkpoint_and_the_command_that_resumes(uninterrupted, tmp_path):
    run = tmp_path / "run"
    process = started(run, 1, checkpoint__every="50")
    os.kill(process.pid, signal.SIGTERM)
    end = process.wait(180)
    assert end.code == 0, end.text
    assert "SIGTERM received" in end.text and f"flowrl train --resume {run}" in end.text
    finished = small.lines(run)[-1]["iteration"]
    assert finished < int(ITERATIONS) and checkpoint.latest(run).name == f"step-{finished:06d}"
    resume(run)
    assert_equal(run, uninterrupted("nft"))


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_finishes_the_iteration_and_a_second_one_gives_it_up(
    uninterrupted, tmp_path, monkeypatch, signals
):
    run, calls, decode_into = tmp_path / "run", [], draw.decode_into

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
        return decode_into(*args, **kwargs)

    monkeypatch.setattr(draw, "decode_into", interrupted)
    result = small.invoke("train", *small.words(run, iterations=ITERATIONS, checkpoint__every="50"))
    assert result.exit_code == 0, result.output
    assert "SIGINT received" in result.output and f"flowrl train --resume {run}" in result.output
    assert len(small.lines(run)) == 4 - signals
    resume(run)
    assert_equal(run, uninterrupted("nft"))


def test_a_signal_during_the_last_evaluation_leaves_a_run_that_resumes(
    uninterrupted, tmp_path, monkeypatch
):
    run, evaluate = tmp_path / "run", outputs.held_out.evaluate

    def interrupted(*args, **kwargs):
        if small.lines(run):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
        return evaluate(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(outputs.held_out, "evaluate", interrupted)
        result = small.invoke("train", *small.words(run, iterations=ITERATIONS))
    assert result.exit_code == 0 and f"flowrl train --resume {run}" in result.output
    assert len(small.lines(run)) == 5
    with pytest.raises(StopIteration):
        small.values(run, "after")
    resume(run)
    assert_equal(run, uninterrupted("nft"))


def test_a_prolonged_run_equals_one_that_was_long_from_the_start(uninterrupted, tmp_path):
    run = tmp_path / "run"
    small.trainer(run, "mix_grpo", iterations="2").run()
    resume(run, f"iterations={ITERATIONS}", "checkpoint.keep=1")
    assert_equal(run, uninterrupted("mix_grpo"))
    assert len(checkpoint.steps(run)) == 1


def test_a_run_left_early_and_saved_by_hand_goes_on(uninterrupted, tmp_path):
    trainer = small.trainer(
        tmp_path / "run", "mix_grpo", iterations=ITERATIONS, checkpoint__every="50"
    )
    for it in trainer:
        if it.number == 3:
            break
    trainer.save()
    flowrl.train(trainer.cfg, resume=tmp_path / "run")
    assert_equal(tmp_path / "run", uninterrupted("mix_grpo"))


def test_resuming_with_another_config_names_the_keys(uninterrupted):
    run = uninterrupted("nft")
    before = sorted(p.name for p in run.rglob("*"))
    result = small.invoke(
        "train", "--resume", run, "optimizer.lr=1e-5", "algorithm.beta=0.5", "iterations=9"
    )
    assert result.exit_code == 2
    assert "algorithm.beta 1.0 -> 0.5, optimizer.lr 0.0003 -> 1e-05;" in result.output
    assert sorted(p.name for p in run.rglob("*")) == before


def test_a_setting_that_is_newer_than_the_checkpoint_is_no_change_at_its_default(tmp_path):
    now = identity.of_config(small.config(tmp_path))
    config = copy.deepcopy(now["config"])
    del config["anchor"], config["data"]["mixture"], config["algorithm"]["kl_gate"]
    assert identity.differences({**now, "config": config}, now, tmp_path) == []
    del config["batch"]["group"]  # which is not at its default
    found = identity.differences({**now, "config": config}, now, tmp_path)
    assert found == ["batch.group unset -> 2"]


def test_the_number_of_iterations_may_change_only_while_the_learning_rate_does_not_depend_on_it(
    uninterrupted, tmp_path
):
    run = uninterrupted("nft")
    check_resume(small.config(run, iterations="9", stop__reward="3", trackers="[tensorboard]"), run)
    shutil.copytree(run, tmp_path / "run")
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(
        text.replace("schedule: constant", "schedule: cosine")
    )
    result = small.invoke("train", "--resume", tmp_path / "run", "iterations=9")
    assert result.exit_code == 2
    assert "iterations 5 -> 9, optimizer.schedule 'constant' -> 'cosine';" in result.output


DAMAGED = {
    "truncated": "optimizer.safetensors",
    "altered": "policy.safetensors",
    "missing": "ema.safetensors",
}


def damage(file, how):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data[:-7] if how == "truncated" else data)
    if how == "missing":
        file.unlink()


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(
    uninterrupted, tmp_path, caplog, how
):
    run = shutil.copytree(uninterrupted("nft"), tmp_path / "run")
    file = checkpoint.latest(run) / DAMAGED[how]
    damage(file, how)
    flowrl.train(read_config(run / "config.yaml"), resume=run)
    said = next(text for text in caplog.messages if str(file) in text)
    assert how in said and "kept as damaged-step-000005" in said and "from step-000004" in said
    assert_equal(run, uninterrupted("nft"))
    events = [line["event"] for line in history.read(run) if line["event"] != "edited"]
    assert events == ["started", "ended", "resumed", "damaged", "ended"]


def test_a_run_whose_checkpoints_are_all_damaged_says_what_to_do(uninterrupted, tmp_path):
    run = shutil.copytree(uninterrupted("nft"), tmp_path / "run")
    for folder in checkpoint.steps(run):
        damage(folder / "optimizer.safetensors", "missing")
    result = small.invoke("train", "--resume", run)
    assert result.exit_code == 2
    assert "optimizer.safetensors is missing, and no other checkpoint" in result.output
    assert "remove the folder checkpoints to start the run from iteration 0" in result.output


def test_a_folder_without_a_run_is_refused(tmp_path):
    result = small.invoke("train", "--resume", tmp_path / "nowhere")
    assert (
        result.exit_code == 2
        and "nowhere is not a run folder: it has no config.yaml" in result.output
    )
    assert not (tmp_path / "nowhere").exists()
