"""Memory that runs out: one sentence with the phase, what holds memory, the nearest setting and the
checkpoint that stands."""

import importlib
import os
from pathlib import Path

import long
import pytest
import small
import tiny
import torch

import flowrl
from flowrl.config.lighter import ALL, START, Shortage, as_words, changed, next_change
from flowrl.config.load import load_config
from flowrl.policy.pipeline import PipelinePolicy
from flowrl.runtime.memory import OutOfMemory, advice, during, ran_out
from flowrl.runtime.store import checkpoint
from flowrl.training.budget.phases import PHASES
from flowrl.training.out_of_memory import advised, explained_start, of_host
from flowrl.training.update import Learner

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
QUICK = {"guard__check_rewards": "false", "eval__at_start": "false", "iterations": "2"}


def full(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


@flowrl.reward(scale="none: memory always runs out")
def hungry(media, prompts, context=None):
    return full()


FAULTS = {
    "rollout": (PipelinePolicy, "_velocity", "model.dtype=bf16"),
    "update": (Learner, "gradient", "train.gradient_checkpointing=0.5"),
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
    assert f"; set {setting}; flowrl budget says what fits; the checkpoint of iter" in said
    assert "GB weights of the model" in said
    assert "the checkpoint of iteration 1 is intact" in said and f"--resume {tmp_path}" in said
    assert checkpoint.iteration_of(checkpoint.latest(tmp_path / "run")) == 1


@pytest.mark.parametrize("base", long.but(["replicated", "sharded"], {"sharded"}))
def test_of_two_processes_one_runs_out_and_both_end_with_a_sentence(base, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    processes = importlib.import_module("processes")
    policy = tiny.policy("sd3", lora={"rank": 2, "alpha": 2})
    asked = processes.words("nft", base, tmp_path / "run", "iterations=2", "batch.micro=16")

    def work():
        cfg = load_config(None, asked)
        made = flowrl.Trainer(
            cfg, policy=policy, rewards={"spread": processes.spread}, prompts="shapes:train"
        )
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
    said = "at the start.*set model.dtype=bf16; flowrl budget says what fits; nothing was"
    with pytest.raises(OutOfMemory, match=said) as e, explained_start(cfg):
        full()
    assert ran_out(e.value) and advice(e.value) == str(e.value)


LIGHT = ["model.dtype=bf16", "model.quantize=nf4"]
ALL_AWAY = ["reward=preference", "model.offload=all", "model.dtype=bf16"]
AWAY = ["model.encoders=leave", "model.offload=denoiser", "batch.states=host"]
CHECKPOINTED = "train.gradient_checkpointing=true"


@pytest.mark.parametrize(
    "phase, words, fix",
    [
        ("rollout", [], "set model.encoders=leave"),
        ("rollout", AWAY, "set model.dtype=bf16"),
        ("rollout", [*AWAY, "reward=preference"], "set model.offload=all"),
        ("rollout", [*AWAY, "reward=preference", "algorithm=draft"], "set model.dtype=bf16"),
        ("rollout", [*AWAY, *ALL_AWAY], "set model.quantize=int8"),
        ("rollout", [*AWAY, "model.dtype=bf16"], "set model.quantize=int8 model.offload=none"),
        ("rollout", [*AWAY, *LIGHT], "set batch.micro=32"),
        ("rollout", [*AWAY, *LIGHT, "batch.prompts=1", "batch.group=4"], "set batch.micro=2"),
        ("rollout", [*AWAY, *LIGHT, "batch.micro=1"], "set optimizer.name=adamw8bit"),
        ("evaluation", ["model.encoders=leave"], "set batch.states=host"),
        ("update", AWAY, "set train.gradient_checkpointing=0.5"),
        ("update", [*AWAY, "train.gradient_checkpointing=0.5"], f"set {CHECKPOINTED}"),
        ("update", [*AWAY, *LIGHT, CHECKPOINTED, "batch.micro=6"], "set batch.micro=3"),
        ("decode", [], "set batch.decode=8"),
        ("decode", ["batch.decode=1"], "set model.tiling=true"),
        ("decode", ["batch.decode=1", "model.tiling=true"], "set model.encoders=leave"),
        ("reward", ["batch.decode=1", "model.encoders=leave"], "set model.offload=denoiser"),
        ("reward", ["batch.decode=1", *AWAY], "set model.dtype=bf16"),
        (
            "reward",
            ["batch.decode=1", *AWAY, *LIGHT, "optimizer.name=adamw8bit"],
            "serve the reward on another device",
        ),
        (START, [], "set model.encoders=leave"),
        (START, ["model.encoders=leave", *LIGHT], "ask for smaller pictures"),
        (
            START,
            ["model.dtype=bf16", "model.encoders=leave", "train.mode=full"],
            "set train.mode=lora, or train.shard on more GPUs",
        ),
        ("somewhere", [], "ask for smaller pictures"),
    ],
)
def test_the_next_setting_follows_from_those_there_are(phase, words, fix):
    assert advised(load_config(None, words), Shortage(phase=phase)).startswith(fix)


@pytest.mark.parametrize("words", [[], ["train.mode=full"]])
@pytest.mark.parametrize("phase", PHASES)
def test_a_budget_and_a_run_that_is_out_of_memory_name_the_same_settings(phase, words):
    """With bf16, as a budget keeps the model.dtype that it is given."""
    assert phase in ALL
    cfg, short = load_config(None, ["model.dtype=bf16", *words]), Shortage(phase=phase, gpus=2)
    while settings := next_change(cfg, short, modelled=True):
        assert advised(cfg, short) == f"set {as_words(settings)}"
        cfg = changed(cfg, settings)
    assert not advised(cfg, short).startswith(("set model", "set batch"))


def test_host_memory_is_not_freed_by_what_moves_there():
    cfg = load_config(None, ["batch.decode=1", "model.tiling=true"])
    assert advised(cfg, Shortage(phase="decode", cuda=False)) == "set model.dtype=bf16"


def test_host_memory_is_told_from_that_of_a_gpu():
    assert of_host(MemoryError()) and of_host(OSError(12, "Cannot allocate memory"))
    assert of_host(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not of_host(torch.OutOfMemoryError("CUDA out of memory"))


def test_weights_are_split_where_there_are_several_processes():
    cfg = load_config(None, AWAY[:1])
    assert advised(cfg, Shortage(phase="rollout", gpus=2)) == "set train.shard=[denoiser]"
    assert advised(cfg, Shortage(phase="rollout")) == "set model.dtype=bf16"


def test_moments_of_a_checkpoint_do_not_become_those_of_8_bits():
    cfg = load_config(None, ["train.mode=full", *AWAY[:1], "batch.states=host"])
    assert advised(cfg, Shortage(phase="optimizer")) == "set model.dtype=bf16"
    cfg = load_config(None, ["train.mode=full", *AWAY[:1], "batch.states=host", LIGHT[0]])
    assert advised(cfg, Shortage(phase="optimizer")) == "set optimizer.name=adamw8bit"
    started = Shortage(phase="optimizer", moments=True)
    assert advised(cfg, started).startswith("set train.mode=lora, or train.shard")


def test_a_micro_batch_is_not_halved_below_the_rows_of_one_state():
    cfg = load_config(None, ["batch.micro=2", *AWAY, *LIGHT])
    assert advised(cfg, Shortage(phase="rollout", state=1)) == "set batch.micro=1"
    assert advised(cfg, Shortage(phase="rollout", state=2)) == "set optimizer.name=adamw8bit"
