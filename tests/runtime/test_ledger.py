"""Time is booked once, FLOPs are those of the matrix products, and the books start anew each
iteration."""

import time

import pytest
import torch

from flowrl.runtime.ledger import Ledger


@pytest.fixture
def sleep(monkeypatch):
    """A clock that only sleeping moves."""
    now = [100.0]
    monkeypatch.setattr("flowrl.runtime.ledger.time.perf_counter", lambda: now[0])

    def sleep(seconds):
        now[0] += seconds

    return sleep


def test_nested_phases_book_their_own_time_only(sleep):
    ledger = Ledger()
    sleep(1)
    with ledger.phase("rollout"):
        sleep(2)
        with ledger.phase("decode"):
            sleep(4)
        sleep(8)
    books = ledger.iteration()
    assert [books[f"time/{name}"] for name in ("rollout", "decode", "iteration")] == [10, 4, 15]


def test_overhead_is_what_network_vae_and_reward_leave(sleep):
    ledger = Ledger()
    with ledger.phase("rollout"):
        sleep(1)
        for _ in range(2):
            with ledger.work("network"):
                sleep(3)
    with ledger.phase("decode"), ledger.work("vae"):
        sleep(4)
    with ledger.phase("reward"), ledger.work("reward"):
        sleep(5)
    sleep(4)
    books = ledger.iteration()  # 1 + 4 of 20 s are neither
    assert books["time/overhead_fraction"] == pytest.approx(0.25)
    assert books["time/network_work"] == 6


def test_on_a_gpu_phases_are_timed_by_events_and_nothing_waits_for_it(sleep, monkeypatch):
    """A stand-in for torch.cuda, whose clock is the same."""
    waited = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.at = time.perf_counter()

        def elapsed_time(self, end):
            assert len(waited) == 2  # when the books are begun and when they are read
            return 1000 * (end.at - self.at)

    for name, value in {
        "Event": Event,
        "synchronize": waited.append,
        "current_stream": lambda device: None,
        "get_device_name": lambda device: "NVIDIA H100",
        "max_memory_allocated": lambda device: 2**30,
        "reset_peak_memory_stats": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    ledger = Ledger("cuda")
    with ledger.phase("update"):
        sleep(1)
        for _ in range(3):
            with ledger.phase("reference"), ledger.work("network"):
                sleep(2)
        sleep(4)
    assert len(waited) == 1
    books = ledger.iteration()
    assert (books["time/update"], books["time/reference"]) == (5, 6)
    assert books["time/network_work"] == 6 and books["memory/reference_gb"] == 1
    assert len(waited) == 3  # the last one begins the next books


def test_an_iteration_closes_the_books():
    ledger = Ledger()
    ledger.nfe["rollout"] += 128
    ledger.nfe["rollout"] += 64
    ledger.nfe["update"] += 8
    books = ledger.iteration()
    assert books["nfe/rollout"] == 192 and books["nfe/update"] == 8 and books["memory/peak_gb"] > 0
    assert not any(key.startswith("nfe/") for key in ledger.iteration())


def test_flops_are_measured_once_per_phase_and_scaled_by_rows():
    """A linear layer of 5 x 7: 2 * 5 * 7 = 70 a row forward; the backward adds one product of that
    size for the weight's gradient."""
    layer, ledger = torch.nn.Linear(5, 7), Ledger(peak=1e3)
    with ledger.phase("rollout"):
        for rows in (4, 6):
            with ledger.work("network", rows=rows), torch.no_grad():
                layer(torch.randn(rows, 5))
    books = ledger.iteration()
    assert books["flops"] == 10 * 70
    assert books["mfu"] == pytest.approx(700 / (1e3 * books["time/iteration"]))
    with ledger.phase("update"):
        for rows in (3, 5):
            with ledger.work("network", rows=rows):
                layer(torch.randn(rows, 5)).sum().backward()
    books = ledger.iteration()
    assert books["flops"] == books["flops/update"] == 8 * 140
    assert ledger.flops_per_row == {
        ("rollout", "network", "forward"): 70,
        ("update", "network", "forward"): 140,
    }


def test_forward_and_backward_can_be_counted_apart():
    """Weight 5 x 7, 2 rows: 140 forward; its gradient alone costs as much, because the input needs
    none."""
    layer, ledger = torch.nn.Linear(5, 7), Ledger()
    for _ in range(2):
        with ledger.work("network", rows=2):
            loss = layer(torch.randn(2, 5)).sum()
        with ledger.work("network", rows=2, call="backward"):
            loss.backward()
    assert ledger.iteration()["flops"] == 2 * (140 + 140)


def test_counting_changes_no_bit():
    """torch's own counter decomposes silu_backward."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))

    def gradient(rows):
        leaf = x.clone().requires_grad_()
        with Ledger().work("network", rows=rows):
            torch.nn.functional.silu(leaf @ x).sum().backward()
        return leaf.grad

    assert torch.equal(gradient(rows=64), gradient(rows=0))


def test_flops_and_mfu_are_left_out_when_unknown():
    ledger = Ledger()
    with ledger.work("network"):
        torch.randn(3, 3) @ torch.randn(3, 3)
    assert not {"flops", "mfu"} & ledger.iteration().keys()


def test_an_error_inside_leaves_the_books_usable():
    ledger = Ledger()
    with pytest.raises(RuntimeError), ledger.phase("rollout"), ledger.work("network", rows=2):
        raise RuntimeError
    assert ledger.stack == [] and not ledger.flops_per_row and "time/rollout" in ledger.iteration()


def test_bookkeeping_costs_microseconds():
    ledger, costs = Ledger(), []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(200):
            with ledger.phase("rollout"), ledger.work("network"):
                pass
        costs.append((time.perf_counter() - began) / 200)
    assert min(costs) < 1e-4
