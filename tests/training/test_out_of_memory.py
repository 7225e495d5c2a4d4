"""Memory that runs out: one sentence with the phase, what holds memory, the nearest setting and the
checkpoint that stands."""

import importlib
import os
from pathlib import Path

import pytest
import small
import tiny
import torch

import flowrl
from flowrl.config.load import load_config
from flowrl.policy.pipeline import PipelinePolicy
from flowrl.runtime import checkpoint
from flowrl.runtime.memory import OutOfMemory, advice, during, ran_out
from flowrl.training.out_of_memory import advised, explained_start
from flowrl.training.update import Learner

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
QUICK = {"guard__check_rewards": "false", "eval__at_start": "false", "iterations": "2"}


def full(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


@flowrl.reward(scale="none: memory always runs out")
def hungry(media, prompts, context=None):
    return full()


FAULTS = {
    "rollout": (PipelinePolicy, "_velocity", "batch.micro=32"),
    "update": (Learner, "gradient", "train.gradient_checkpointing=true"),
    "decode": (PipelinePolicy, "decode", "batch.decode=2"),
}


@pytest.mark.parametrize("phase", FAULTS)
def test_the_phase_is_named_and_the_setting_that_needs_less(phase, tmp_path, monkeypatch):
    made = small.trainer(tmp_path / "run", **QUICK)
    next(iter(made))
    made.save()
    where, what, setting = FAULTS[phase]
    monkeypatch.setattr(where, what, full)
    with pytest.raises(OutOfMemory) as raised:
        made.run()
    said = str(raised.value)
    assert f"memory ran out in the phase {phase} (CUDA out of memory. Tried" in said
    assert f"set {setting};" in said and "GB weights of the model" in said
    assert "the checkpoint of iteration 1 is intact" in said and f"--resume {tmp_path}" in said
    assert checkpoint.iteration_of(checkpoint.latest(tmp_path / "run")) == 1


@pytest.mark.parametrize("base", ["replicated", "sharded"])
def test_of_two_processes_one_runs_out_and_both_end_with_a_sentence(base, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    processes = importlib.import_module("processes")
    policy = tiny.policy("sd3", lora={"rank": 2, "alpha": 2})
    asked = processes.words("nft", base, tmp_path / "run", "iterations=2", "batch.micro=16")

    def work():
        cfg = load_config(None, asked)
        made = flowrl.Trainer(cfg, policy=policy, rewards={"spread": processes.spread})
        decode = policy.decode
        last = os.environ["RANK"] == "1"
        policy.decode = lambda *a, **k: (full if last and made.iteration else decode)(*a, **k)
        made.run()

    with pytest.raises(SystemExit) as ended:
        processes.on(2, work)
    said = str(ended.value)
    assert "rank 1: OutOfMemory: memory ran out in the phase decode" in said
    assert "the checkpoint of iteration 1 is intact" in said
    assert "rank 0: Lost: of the 2 processes, rank 1 stopped" in said


def test_a_reward_whose_single_samples_are_too_large_stops_the_run(tmp_path):
    cfg = small.config(tmp_path / "run", **QUICK)
    made = flowrl.Trainer(cfg, rewards=hungry)
    with pytest.raises(OutOfMemory, match=r"in the phase reward .* set batch.decode=2;"):
        made.run()


def test_the_command_exits_with_1_and_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(PipelinePolicy, "decode", full)
    result = small.invoke("train", *small.words(tmp_path / "run", **QUICK))
    said = [line for line in result.output.splitlines() if line.startswith("flowrl: ")]
    assert result.exit_code == 1 and len(said) == 1 and "Traceback" not in result.output
    assert "in the phase decode" in said[0] and "checkpoint of iteration 0 is intact" in said[0]


def test_the_innermost_phase_stands_and_other_errors_are_untouched():
    with pytest.raises(MemoryError) as raised, during("rollout"), during("decode"):
        raise MemoryError
    assert raised.value.phase == "decode"
    with pytest.raises(KeyError) as other, during("rollout"):
        raise KeyError
    assert not hasattr(other.value, "phase")


def test_at_the_start_the_weights_are_what_is_too_large(tmp_path):
    cfg = small.config(tmp_path)
    said = "at the start.*set model.dtype=bf16; nothing was"
    with pytest.raises(OutOfMemory, match=said) as e, explained_start(cfg):
        full()
    assert ran_out(e.value) and advice(e.value) == str(e.value)


@pytest.mark.parametrize(
    "phase, words, fix",
    [
        ("rollout", ["batch.micro=1"], "set model.dtype=bf16"),
        ("update", ["train.gradient_checkpointing=true", "batch.micro=6"], "set batch.micro=3"),
        ("update", ["train.gradient_checkpointing=0.5"], "set train.gradient_checkpointing=true"),
        ("decode", ["batch.decode=1"], "set model.tiling=true"),
        ("reward", ["batch.decode=1"], "serve the reward on another device"),
        ("start-up", ["model.dtype=bf16"], "set model.encoders=leave"),
        (
            "start-up",
            ["model.dtype=bf16", "model.encoders=leave", "train.mode=full"],
            "set optimizer.name=adamw8bit",
        ),
    ],
)
def test_the_next_setting_follows_from_those_there_are(phase, words, fix):
    assert advised(load_config(None, words), phase).startswith(fix)


def test_a_micro_batch_is_not_halved_below_the_rows_of_one_state():
    cfg = load_config(None, ["batch.micro=2"])
    assert advised(cfg, "rollout", state=1).startswith("set batch.micro=1")
    assert advised(cfg, "rollout", state=2).startswith("set model.dtype=bf16")
