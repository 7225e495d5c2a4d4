"""Two machines, here two launchers on one that meet at an address of their own: they train what one
process trains, and neither outlives the other."""

import os
import signal
import subprocess
import sys
import time

import launchers
import psutil
import pytest
import small

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process learns."""
    return launchers.train([[]], tmp_path_factory.mktemp("alone") / "run", [])


@pytest.mark.parametrize("words", [[], ["train.shard=[denoiser]"]], ids=["replicated", "sharded"])
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_two_machines_learn_what_one_process_learns(alone, tmp_path, launcher, words):
    machines = launchers.launchers(launchers.free_port())[f"{launcher}, two machines"]
    learned = launchers.train(machines, tmp_path / "run", words)
    assert launchers.apart({"": alone}, {"": learned})[""] <= 1e-6
    assert [line["iteration"] for line in small.lines(tmp_path / "run")] == [1, 2]


def start(machines, run):
    """Both machines at work, past the first iteration."""
    words = [*launchers.RUN, "iterations=1000", "guard.rank_seconds=60", f"output={run}"]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", *launcher, *words],
            env=os.environ | launchers.ENV,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for launcher in machines
    ]
    until = time.monotonic() + 600
    while not small.lines(run):
        assert all(process.poll() is None for process in started), started[0].communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.1)
    return started


def power_cut(process):
    """A machine with all its processes, at once."""
    everyone = [*psutil.Process(process.pid).children(recursive=True), process]
    for one in everyone:
        os.kill(one.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_machine_that_dies_ends_the_other_with_a_sentence(tmp_path, launcher, dead):
    run = tmp_path / "run"
    started = start(launchers.launchers(launchers.free_port())[f"{launcher}, two machines"], run)
    power_cut(started[dead])
    said = started[1 - dead].communicate(timeout=300)[0]
    assert started[1 - dead].returncode != 0
    assert f"of the 2 processes, rank {dead} stopped, or did not come" in " ".join(said.split())
    done = len(small.lines(run))
    gone_on = small.start("train", "--resume", run, f"iterations={done + 1}")
    out, err = gone_on.communicate(timeout=600)
    assert gone_on.returncode == 0, out + err
    assert [line["iteration"] for line in small.lines(run)] == [*range(1, done + 2)]
