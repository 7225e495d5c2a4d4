"""The books of a run: time, network evaluations, FLOPs and memory of each phase.

Phases (rollout, decode, reward, reference, update) divide the iteration; inside them `work` marks
the three kinds that cannot be avoided: network, vae, reward. What is left over is our overhead.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flowrl.runtime.memory import note_phase

# (latents, rollout, samples, noise level of the latents) -> rewards (n,)
RewardOf = Callable[[Tensor, Any, Tensor, float], Tensor]
# Dense bf16 FLOP/s, summed in fp32 and without sparsity, by NVIDIA's data sheets of H100 SXM, H200
# SXM, HGX B200, A100 SXM and L40S and its whitepapers of GA102 (RTX 3090, RTX A6000), Ada and RTX
# Blackwell; roofline.py has bandwidth and memory from there, too
PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A6000": 154.8e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165.2e12,
    "RTX 5090": 209.5e12,
}


_ATEN = torch.ops.aten
# attention on a CPU -> the GPU's kernel of the same FLOPs: torch 2.11 has no formula for the CPU's
GPU_KERNEL = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        _ATEN._scaled_dot_product_flash_attention_backward
    ),
}


def formula_of(operator: Any) -> Any:
    """Find torch's formula of an operator's FLOPs; None: it has none."""
    packet = operator._overloadpacket
    return flop_registry.get(GPU_KERNEL.get(packet, packet))


class FlopCounter(TorchDispatchMode):
    """Counts FLOPs by torch's own formulas and runs every operator unchanged.

    torch's FlopCounterMode decomposes some operators, silu_backward among them. They round
    differently, and the first iteration of a resumed run would differ from the one it repeats.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.uncompiled: Any = nullcontext()

    def __enter__(self) -> FlopCounter:
        # a compiled block whose first call is in a mode is never compiled by torch 2.11
        if "torch._dynamo" in sys.modules:
            self.uncompiled = torch.compiler.set_stance("force_eager")
        self.uncompiled.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.uncompiled.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = formula_of(func)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)
        return out


class Ledger:
    """Books one iteration at a time. device: the device to synchronise with; peak: FLOP/s for the
    mfu, None: looked up in PEAK_FLOPS by the device's name."""

    def __init__(self, device: torch.device | str = "cpu", *, peak: float | None = None) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        if peak is None and self.cuda:
            device_name = torch.cuda.get_device_name(self.device)
            peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
        self.peak = peak
        # (phase, kind, call) -> FLOPs per network row, measured at the first call
        self.flops_per_row: dict[tuple[str, str, str], float] = {}
        self.stack: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Forget what was booked and start an iteration's clock; not inside a phase."""
        assert not self.stack, f"phase {self.stack} is open"
        # phase -> seconds, without the phases inside it
        self.time: dict[str, float] = defaultdict(float)
        self.kinds: dict[str, float] = defaultdict(float)  # kind of work -> seconds
        self.nfe: dict[str, int] = defaultdict(int)
        self.memory: dict[str, int] = defaultdict(int)  # phase -> peak bytes
        self.flops: dict[str, float] = defaultdict(float)  # phase -> FLOPs
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        if self.cuda:
            torch.cuda.synchronize(self.device)
        self.graphs = compiled_graphs()
        self.began = time.perf_counter()
        self.mark: Any = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book time and peak memory to a phase; nested phases are booked to themselves only."""
        self._close_span()
        self.stack.append(name)
        try:
            yield
        except Exception as error:
            note_phase(error, name)
            raise
        finally:
            self._close_span()
            self.stack.pop()

    @contextmanager
    def work(self, kind: str, *, rows: int = 0, call: str = "forward") -> Iterator[None]:
        """Book time to a kind: network, vae or reward. Not nested.

        rows: network rows, for the FLOPs: the first call of a (phase, kind, call) is counted
        operator by operator, later ones are scaled by their rows.
        """
        key = (self.stack[-1] if self.stack else "", kind, call)
        counter = FlopCounter() if rows and key not in self.flops_per_row else None
        began = self._now()
        try:
            if counter is None:
                yield
            else:
                with counter:
                    yield
                self.flops_per_row[key] = counter.total / rows
        finally:
            if self.cuda:
                self.events.append((kind, began, self._now()))
            else:
                self.kinds[kind] += self._now() - began
        if rows:
            self.flops[key[0]] += rows * self.flops_per_row.get(key, 0.0)

    def count(self, kind: str, run: Callable[[], Any], *, rows: int) -> None:
        """Count the FLOPs of a call, if they are unknown, by a run of its own: inside a counter
        nothing compiled is used, and other kernels round otherwise."""
        key = (self.stack[-1] if self.stack else "", kind, "forward")
        if key not in self.flops_per_row:
            with FlopCounter() as counter, torch.no_grad():
                run()
            self.flops_per_row[key] = counter.total / rows

    def add_time(self, name: str, seconds: float) -> None:
        """Book seconds that passed elsewhere, in another thread, as time/<name>; they do not belong
        to the iteration."""
        self.time[name] += seconds

    def iteration(self) -> dict[str, float]:
        """Close the books and start anew: time/<phase>, time/iteration, time/overhead_fraction,
        nfe/<phase>, flops/<phase>, flops, mfu, compile/graphs, memory/...

        overhead_fraction = 1 - (network + vae + reward) / iteration. mfu is there when the device's
        peak is known. memory/<phase>_gb, on a GPU: what is allocated at the phase's highest moment.
        """
        if self.cuda:
            torch.cuda.synchronize(self.device)
        for booked, spans in ((self.kinds, self.events), (self.time, self.spans)):
            for name, start, end in spans:
                booked[name] += start.elapsed_time(end) / 1000
        wall = time.perf_counter() - self.began
        worked = sum(self.kinds[kind] for kind in ("network", "vae", "reward"))
        out = {f"time/{name}": seconds for name, seconds in self.time.items()}
        out["time/iteration"] = wall
        out |= {f"time/{kind}_work": seconds for kind, seconds in self.kinds.items()}
        out["time/overhead_fraction"] = max(0.0, 1 - worked / wall)
        out |= {f"nfe/{phase}": float(rows) for phase, rows in self.nfe.items()}
        total = sum(self.flops.values())
        if total:
            out |= {f"flops/{phase}": flops for phase, flops in self.flops.items() if phase}
            out["flops"] = total
            out |= {"mfu": total / (wall * self.peak)} if self.peak else {}
        if new := compiled_graphs() - self.graphs:
            out["compile/graphs"] = float(new)
        out |= {f"memory/{name}_gb": size / 2**30 for name, size in self.memory.items()}
        # peak memory of the device; on a CPU, the process's highest resident size so far
        if self.cuda:
            highest = max([torch.cuda.max_memory_allocated(self.device), *self.memory.values()])
        else:
            unit = 1 if sys.platform == "darwin" else 1024  # number of bytes in a unit of ru_maxrss
            highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        out["memory/peak_gb"] = highest / 2**30
        self.reset()
        return out

    def _close_span(self) -> None:
        """Book the time since the last change of phase to the innermost open phase."""
        now = self._now()
        if self.cuda:
            if self.stack:
                phase, highest = self.stack[-1], torch.cuda.max_memory_allocated(self.device)
                self.memory[phase] = max(self.memory[phase], highest)
                self.spans.append((phase, self.mark, now))
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.stack:
            self.time[self.stack[-1]] += now - self.mark
        self.mark = now

    def _now(self) -> Any:
        """Return the present moment. On a GPU it is an event, read at the end of the iteration: the
        GPU would stall if each change of phase waited for it."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def compiled_graphs() -> int:
    """Count the graphs that torch has compiled in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["stats"]["unique_graphs"]


class CountedPolicy:
    """A policy whose network calls are booked; objectives and sampling engines call it.

    policy: a flowrl.policy.Policy. autocast: makes the context of its forward. backward: adds up
    gradients. phase: where calls count; None: "update" with gradient, "reference" without.
    """

    def __init__(
        self,
        policy: Any,
        ledger: Ledger,
        *,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        backward: Callable[[Tensor], None] = Tensor.backward,
        phase: str | None = None,
    ) -> None:
        self.policy, self.ledger, self.phase = policy, ledger, phase
        self.autocast, self.add_gradient = autocast, backward
        self.rows = 0  # number of network rows in the newest forward
        self.backwards = False  # true while a gradient is being added up
        # reward of this iteration's samples, for methods that climb it
        self.reward_of: RewardOf | None = None

    def velocity(self, x: Tensor, sigma: Tensor, cond: Any, rows: Tensor, **options: Any) -> Tensor:
        """See Policy.velocity."""
        if self.backwards:  # recomputed inside a backward, whose cost is booked already
            with self.autocast():
                return self.policy.velocity(x, sigma, cond, rows, **options)
        if getattr(self.policy, "compiled", None):
            with self.autocast():
                run = partial(self.policy.velocity, x, sigma, cond, rows, **options)
                self.ledger.count("network", run, rows=len(x))
        before = self.policy.calls
        with self.ledger.work("network", rows=len(x)), self.autocast():
            v = self.policy.velocity(x, sigma, cond, rows, **options)
        phase = self.phase or ("update" if torch.is_grad_enabled() else "reference")
        self.ledger.nfe[phase] += self.policy.calls - before
        self.rows = len(x)
        return v

    def taught(self, x: Tensor, sigma: Tensor, cond: Any, rows: Tensor) -> Tensor:
        """Return the velocity (n, *L) of each row's teacher, without gradient."""
        velocity: Tensor = self.policy.teachers.velocity(self, x, sigma, cond, rows)
        return velocity

    def step_std(self, *place: Any) -> Tensor:
        """See Policy.step_std."""
        return self.policy.step_std(*place)

    def initial(self, *place: Any) -> Any:
        """See Policy.initial."""
        return self.policy.initial(*place)

    def reward(self, x: Tensor, rollout: Any, samples: Tensor, sigma: float = 0.0) -> Tensor:
        """Return the rewards (n,), with a gradient, of latents x (n, *L) at sigma that replace
        those of these samples (n,)."""
        assert self.reward_of is not None, "this method was not given rewards to climb"
        with self.ledger.work("reward"), self.autocast():
            return self.reward_of(x, rollout, samples, sigma)

    @contextmanager
    def view(self, name: str) -> Iterator[None]:
        """Switch to another view of the weights, whose calls are booked as the phase
        "reference"."""
        with self.ledger.phase("reference"), self.policy.view(name):
            yield

    def same(self, a: str, b: str) -> bool:
        return self.policy.same(a, b)

    def backward(self, loss: Tensor) -> None:
        self.backwards = True
        try:
            with self.ledger.work("network", rows=self.rows, call="backward"):
                self.add_gradient(loss)
        finally:
            self.backwards = False
