"""Two processes, of which one stops, hangs or gets a signal: the other says so, or ends with it."""

import multiprocessing
import os
import signal
import socket
import time

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

from flowrl.runtime import distributed, signals
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
        world = distributed.World(distributed.start("no", [], folder, SECONDS), SECONDS)
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
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
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


@pytest.mark.parametrize("where", ["at a meeting", "within a sum"])
def test_a_process_that_dies_is_named_at_once(tmp_path, monkeypatch, where):
    def work(world):
        if where == "within a sum":
            world.meet()
        if world.rank == 1:
            os._exit(3)
        return world.sum(torch.ones(1)) if where == "within a sum" else world.agree(None)

    said, _ = together(work, tmp_path, monkeypatch, ranks=1)[0]
    assert said.startswith("Lost: of the 2 processes, rank 1 stopped")


def test_a_process_that_hangs_is_named_after_its_time(tmp_path, monkeypatch):
    def work(world):
        if world.rank == 1:
            time.sleep(60)
        world.gather_rewards(rewards(world))

    said, took = together(work, tmp_path, monkeypatch, ranks=1)[0]
    assert "rank 1 stopped, or did not come within guard.rank_seconds=2 seconds" in said
    assert SECONDS <= took < 4 * SECONDS


def test_a_main_process_that_dies_is_named_too(tmp_path, monkeypatch):
    def work(world):
        if world.rank == 0:
            os._exit(3)
        world.meet()

    said, _ = together(work, tmp_path, monkeypatch, ranks=1)[1]
    assert said.startswith("Lost: of the 2 processes, rank 0 stopped")


def test_a_process_that_dies_while_all_start_is_told(tmp_path, monkeypatch):
    new_group = distributed.dist.new_group

    def dies(**asked):
        if os.environ["RANK"] == "0":
            os._exit(3)
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
