"""Two processes, of which one stops, hangs or gets a signal: the other says so, or ends with it."""

import multiprocessing
import os
import signal
import socket
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import tiny
import torch
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flowrl.runtime import signals
from flowrl.runtime.processes import launcher
from flowrl.runtime.processes import world as distributed
from flowrl.runtime.processes.in_step import Together
from flowrl.training.split import shard
from flowrl.types import Rewards

SECONDS = 2.0  # that a process waits for the other
FORK = multiprocessing.get_context("fork")


def rank(work, number, folder, told):
    """One of two processes: `work` on its World; told: what came of it, or of its start."""
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in place.items()})
    began = time.monotonic()
    try:
        world = distributed.World(distributed.start("no", SECONDS), SECONDS)
        world.meet()
        began = time.monotonic()
        said = work(world)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    told.put((number, said, time.monotonic() - began))
    told.close()
    told.join_thread()
    os._exit(0)


def together(work, folder, monkeypatch, ranks=2):
    """What the first `ranks` processes to end say of themselves: rank -> (result, seconds)."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)  # torchrun sets no such variable
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    told = FORK.Queue()
    started = [FORK.Process(target=rank, args=(work, i, folder, told)) for i in range(2)]
    for process in started:
        process.start()
    try:
        ended = [told.get(timeout=90) for _ in range(ranks)]
        return {number: (said, took) for number, said, took in ended}
    finally:
        for process in started:
            process.kill()


def rewards(world):
    """Two samples of this process; those of rank 1 failed."""
    value = torch.full((2,), float(world.rank))
    kinds, errors = ({"nan": 2}, ["rank 1 broke"]) if world.rank else ({}, [])
    return Rewards(
        raw={"a": value},
        counted={"a": -value},
        weights={"a": 1.0},
        total=value,
        valid=value == 0,
        errors=errors,
        kinds=kinds,
    )


def test_rewards_errors_and_kinds_of_all_are_known_to_all(tmp_path, monkeypatch):
    def work(world):
        found = world.gather_rewards(rewards(world))
        return found.total.tolist(), found.terms["a"].tolist(), found.errors, found.kinds

    found = together(work, tmp_path, monkeypatch)
    expected = ([0, 0, 1, 1], [0, 0, -1, -1], ["rank 1 broke"], {"nan": 2})
    assert found[0][0] == found[1][0] == expected


class Dying(nn.Module):
    """Two blocks; rank 1 stops in the second."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        x = self.blocks[0](x)
        die(1)
        return self.blocks[1](x)


def die(rank):
    if os.environ["RANK"] == str(rank):
        os._exit(3)


def at_a_meeting(world):
    die(1)
    world.agree(None)


def within_a_sum(world):
    world.meet()
    die(1)
    world.sum(torch.ones(1))


def within_a_split_network(world):
    root = shard.split(Dying(), init_device_mesh("cpu", (2,)))
    in_step = world.keep_in_step([lambda: root(torch.ones(1, 4))])
    Together(root, 0, in_step)(torch.ones(1, 4))


def within_a_shared_call(world):
    from flowrl.training.split.sequence import share_calls

    policy = tiny.policy("flux", lora={"rank": 2})
    world = distributed.World(world.accelerator, SECONDS, members=2)
    prompts = [{"prompt": tiny.PROMPTS[0]}]
    share_calls(policy, world, prompts, guidance="none", autocast=nullcontext)
    die(1)
    noise = torch.zeros((1, *policy.latent_shape))
    cond, rows = policy.encode(tiny.PROMPTS[:1]), torch.zeros(1, dtype=torch.int64)
    policy.velocity(noise, 0.5, cond, rows, guidance="none")


@pytest.mark.parametrize(
    "work", [at_a_meeting, within_a_sum, within_a_split_network, within_a_shared_call]
)
def test_a_process_that_dies_is_named_at_once(tmp_path, monkeypatch, work):
    said, _ = together(work, tmp_path, monkeypatch, ranks=1)[0]
    assert said.startswith("Lost: of the 2 processes, rank 1 stopped")


def test_a_main_process_that_dies_is_named_too(tmp_path, monkeypatch):
    def work(world):
        die(0)
        world.meet()

    said, _ = together(work, tmp_path, monkeypatch, ranks=1)[1]
    assert said.startswith("Lost: of the 2 processes, rank 0 stopped")


def test_an_error_within_a_split_network_is_its_own_where_nobody_is_gone(tmp_path, monkeypatch):
    def work(world):
        in_step = world.keep_in_step([])
        in_step.forward(0, lambda: torch.ones(2) @ torch.ones(3))

    found = together(work, tmp_path, monkeypatch)
    expected = "RuntimeError: inconsistent tensor size"
    assert all(said.startswith(expected) for said, _ in found.values())


def test_of_a_team_the_first_members_value_counts(tmp_path, monkeypatch):
    def work(world):
        world = distributed.World(world.accelerator, SECONDS, members=2)
        told = world.alike(rewards(SimpleNamespace(rank=world.process)))
        mine = torch.full((1,), float(world.process))
        return told.total.tolist(), world.gather(mine).tolist(), world.sum(mine + 1).tolist()

    found = together(work, tmp_path, monkeypatch)
    assert found[0][0] == found[1][0] == ([0, 0], [0], [1])


def test_processes_that_are_not_alike_are_refused_by_all_of_them(tmp_path, monkeypatch):
    def work(world):
        world.check_alike({"seed": 7})
        world.check_alike({"seed": world.rank})

    found = together(work, tmp_path, monkeypatch)
    expected = "ValueError: processes of one run are alike, and rank 0 has seed=0, rank 1 seed=1"
    assert all(said.startswith(expected) for said, _ in found.values())


@pytest.mark.parametrize("flag", ["fsdp", "deepspeed", "megatron_lm", "parallelism_config"])
def test_plugins_of_the_launcher_are_refused_with_what_does_it_here(flag):
    with pytest.raises(ValueError, match=f"--use_{flag} wraps .* set train.shard"):
        launcher.check_launcher({f"ACCELERATE_USE_{flag.upper()}": "true"})
    launcher.check_launcher({f"ACCELERATE_USE_{flag.upper()}": "false"})


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("GRADIENT_ACCUMULATION_STEPS", "4", "set batch.micro"),
        ("GRADIENT_CLIPPING", "0.5", "set optimizer.max_grad_norm"),
        ("MIXED_PRECISION", "bf16", "set train.precision=bf16"),
        ("MIXED_PRECISION", "fp8", "launch with --mixed_precision no"),
        ("DYNAMO_BACKEND", "eager", "set train.compile=blocks"),
        ("DYNAMO_BACKEND", "INDUCTOR", "compiles models"),
    ],
)
def test_what_the_environment_would_change_is_refused_with_the_setting(name, value, instead):
    named = f"--{name.lower()}={value.lower()} .ACCELERATE_{name} .*{instead}"
    with pytest.raises(ValueError, match=named):
        launcher.check_launcher({f"ACCELERATE_{name}": value}, "no")


def test_what_the_launcher_sets_by_itself_and_what_the_config_says_too_is_accepted():
    usual = {"MIXED_PRECISION": "bf16", "DYNAMO_BACKEND": "no", "DYNAMO_MODE": "default"}
    usual |= {"GRADIENT_ACCUMULATION_STEPS": "1", "GRADIENT_CLIPPING": "none", "USE_CPU": "true"}
    launcher.check_launcher({f"ACCELERATE_{k}": v for k, v in usual.items()}, "bf16")


def test_precision_that_the_launcher_names_for_an_evaluation_is_said_to_have_no_effect(caplog):
    launcher.check_launcher({"ACCELERATE_MIXED_PRECISION": "fp16"})
    assert "ACCELERATE_MIXED_PRECISION" in caplog.text and "has no effect" in caplog.text


def test_tensors_are_sent_in_few_pieces_of_one_type():
    small, large = torch.zeros(3), torch.zeros(9)
    half = torch.zeros(2, dtype=torch.bfloat16)
    found = distributed.buckets([small, half, small, large, half, small], most=8)
    sizes = [[(len(t), t.dtype) for t in some] for some in found]
    assert sizes == [
        [(3, torch.float32)] * 2,
        [(2, torch.bfloat16)] * 2,
        [(9, torch.float32)],
        [(3, torch.float32)],
    ]


def test_gradients_are_summed_in_one_piece_and_missing_ones_count_as_zero(tmp_path, monkeypatch):
    def work(world):
        a, b = (nn.Parameter(torch.zeros(2, n)) for n in (1, 3))
        a.grad = torch.full((2, 1), 1.0 + world.rank)
        if world.rank:
            b.grad = torch.arange(6.0).view(2, 3)
        count, total = [], world._add_up
        world._add_up = lambda value: count.append(1) or total(value)
        world.sum_gradients([a, b])
        return a.grad.tolist(), b.grad.tolist(), len(count)

    found = together(work, tmp_path, monkeypatch)
    expected = [[3.0], [3.0]], [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], 1
    assert found[0][0] == found[1][0] == expected


def test_a_process_that_hangs_is_named_after_its_time(tmp_path, monkeypatch):
    def work(world):
        if world.rank == 1:
            time.sleep(60)
        world.gather_rewards(rewards(world))

    said, took = together(work, tmp_path, monkeypatch, ranks=1)[0]
    assert "rank 1 stopped, or did not come within guard.rank_seconds=2 seconds" in said
    assert SECONDS <= took < 4 * SECONDS


def test_a_process_that_dies_while_all_start_is_told(tmp_path, monkeypatch):
    new_group = distributed.dist.new_group

    def dies(**asked):
        die(0)
        return new_group(**asked)

    monkeypatch.setattr(distributed.dist, "new_group", dies)
    said, _ = together(lambda world: None, tmp_path, monkeypatch, ranks=1)[1]
    assert said.startswith("Lost: another process of this run stopped while all of them were")


class Trainer:
    """What a signal looks at."""

    def __init__(self, world, touched):
        self.parts = self.source = self.learner = self
        self.world, self.touched = world, touched


@pytest.mark.parametrize("touched", [False, True])
def test_a_signal_to_one_process_ends_all_of_them(tmp_path, monkeypatch, touched):
    """After the iteration, which is given up where the signal does not wait and no weight moved."""
    monkeypatch.setattr(signals, "GRACE", 0.05)

    def work(world):
        with signals.StopRequest(Trainer(world, touched)):
            if world.rank == 1:
                signal.raise_signal(signal.SIGTERM)
                time.sleep(0.2)
            world.gather_rewards(rewards(world))
            return world.agree(None)

    found = together(work, tmp_path, monkeypatch)
    expected = "SIGTERM received" if touched else "Aborted: SIGTERM received"
    assert [found[0][0], found[1][0]] == [expected] * 2
