"""A model of the time that operators take on a device: a roofline of a few constants.

An operator takes the longer of its FLOPs at the rate of its kind and its bytes at the bandwidth of
its kind; the host takes `host` seconds to issue it. On a GPU the host runs ahead, so that a call
takes the longer of both sums; on a CPU it is one worker, and they add up.

The constants of the H100 come from a trial that was compared with published figures (FLUX.1-dev
eager, 301 to 311 TFLOP/s); other GPUs are scaled from it by the vendors' dense bf16 peak and
bandwidth. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flowrl.runtime.ledger import PEAK_FLOPS
from flowrl.runtime.registry import did_you_mean

GIB = 2**30
# kind of operator -> share of the matmul ceiling that it reaches
SHARES = {
    "gemm": 0.80,
    "gemm_fp32": 0.07,  # without TF32, which is torch's default for matmuls
    "attention": 0.60,
    "attention_backward": 0.50,
    "attention_fp32": 0.06,
    "convolution": 0.80,
    "convolution_fp32": 0.25,  # with TF32, which is torch's default for convolutions
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The constants of a device in the roofline."""

    name: str  # name that --device takes
    rates: dict[str, float]  # kind of operator -> FLOP/s
    bandwidth: dict[str, float]  # kind of operator -> bytes/s, read and written; "" for all others
    host: float  # seconds that the host takes to issue an operator
    least: float  # least seconds of a kernel
    ceiling: float  # FLOP/s of large matmuls, of which utilisation is a share
    memory: float | None  # GiB that a process can use; None: not the device's limit
    link: float  # bytes/s of an all-reduce between neighbours, one direction
    network: float  # bytes/s of a device's adapter to other machines, one direction
    upload: float  # bytes/s from pinned host memory
    reserve: float  # GiB that the driver, its libraries and the allocator take
    cuda: bool  # a GPU, to which the host issues operators ahead
    source: str  # source of its times

    def seconds(self, kind: str, flops: float, nbytes: float) -> float:
        """Return the seconds of one operator on the device, without the host."""
        rate = self.rates.get(kind) or self.rates["gemm"]
        moved = nbytes / self.bandwidth.get(kind, self.bandwidth[""])
        if self.cuda:
            return max(self.least, flops / rate, moved)
        return flops / rate if flops else moved

    def call(self, device: float, operators: float) -> float:
        """Return the seconds of a call whose operators take `device` seconds together."""
        issued = operators * self.host
        return max(device, issued) if self.cuda else device + issued

    def over(self, machines: int, processes: int) -> Device:
        """Return the device for processes on several machines: rings cross from one to the next,
        over all adapters of a machine at once."""
        if machines == 1:
            return self
        return replace(self, link=min(self.link, self.network * processes / machines))

    def all_reduce(self, nbytes: float, processes: int, calls: int) -> float:
        """Return the seconds of summing so many bytes over processes in a ring, in `calls` calls: 2
        (N - 1) / N of the bytes pass each link, and each call costs a round of latency."""
        if processes == 1:
            return 0.0
        return 2 * (processes - 1) / processes * nbytes / self.link + 3e-5 * calls


def _gpu(
    name: str, peak: float, bandwidth: float, memory: float, link: float, network: float
) -> Device:
    """Scale a GPU from the H100: peak dense bf16 FLOP/s, bytes/s, GiB, and bytes/s of its link and
    of the network adapter that it has in its vendor's servers."""
    ceiling = 700e12 * peak / PEAK_FLOPS["H100"]  # FLOP/s that large matmuls reach
    return Device(
        name=name,
        rates={kind: share * ceiling for kind, share in SHARES.items()},
        bandwidth={"": bandwidth * 2.6 / 3.35},  # bytes/s that copy kernels reach
        host=8e-6,
        least=3e-6,
        ceiling=ceiling,
        memory=memory,
        link=link,
        network=network,
        upload=20e9,  # bytes/s of PCIe 4.0 with 16 lanes
        reserve=0.8,
        cuda=True,
        source="modelled" if name == "h100" else "modelled, scaled from the h100 by its data sheet",
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", PEAK_FLOPS["H100"], 3.35e12, 79.1, 300e9, 50e9),
        _gpu("h200", PEAK_FLOPS["H200"], 4.8e12, 139.8, 300e9, 50e9),
        _gpu("b200", PEAK_FLOPS["B200"], 8e12, 178.5, 600e9, 50e9),
        _gpu("a100", PEAK_FLOPS["A100"], 2.04e12, 79.1, 200e9, 25e9),
        _gpu("a100-40gb", PEAK_FLOPS["A100"], 1.56e12, 39.4, 200e9, 25e9),
        _gpu("l40s", PEAK_FLOPS["L40S"], 0.864e12, 44.4, 20e9, 12.5e9),
        _gpu("a6000", PEAK_FLOPS["A6000"], 0.768e12, 47.4, 10e9, 1.25e9),
        _gpu("rtx3090", PEAK_FLOPS["RTX 3090"], 0.936e12, 23.5, 10e9, 1.25e9),
        _gpu("rtx4090", PEAK_FLOPS["RTX 4090"], 1.01e12, 23.5, 10e9, 1.25e9),
        _gpu("rtx5090", PEAK_FLOPS["RTX 5090"], 1.79e12, 31.3, 20e9, 1.25e9),
    )
}
NAMES = [*GPUS, "cpu"]
# Other names of the same devices, as `device` reads them: small letters and digits
SYNONYMS = {
    **{name.removeprefix("rtx"): name for name in GPUS},
    **{f"{name}80gb": name for name in ("h100", "a100")},
    **{f"{name}sxm": name for name in ("h100", "h200", "a100")},
    "a10040gb": "a100-40gb",
    "rtxa6000": "a6000",
}


def device(name: str) -> Device:
    """Find a device by its name or a synonym; "cpu" is this machine's, timed in a second.
    ValueError for another."""
    return this_cpu() if name == "cpu" else known_gpu(name)


def known_gpu(name: str) -> Device:
    """Find a GPU by its name or a synonym; ValueError for another."""
    plain = re.sub(r"nvidia|geforce|[\s_-]", "", name.lower())
    known = GPUS.get(SYNONYMS.get(plain, plain))
    if known is None:
        near = did_you_mean(plain, NAMES)
        raise ValueError(f'unknown device "{name}"{near}; known are {", ".join(NAMES)}')
    return known


def of_cuda(name: str, memory: float) -> Device:
    """Return the known GPU whose name is part of torch's name of a device ("NVIDIA H100 80GB
    HBM3"), with its own memory in GiB; the rates of an H100 if none is."""
    plain = name.lower().replace(" ", "").replace("geforce", "")
    known = next((gpu for key, gpu in GPUS.items() if key in plain), GPUS["h100"])
    return replace(known, memory=memory)


# ---------------------------------------------------------------------------
# this machine's CPU, timed


def this_cpu() -> Device:
    """Describe this machine's CPU with torch's present number of threads: a few operators are timed
    in about a second. memory is None: the machine's other programs decide it."""
    # small enough that any CPU needs a second only
    tokens, width = 1024, 384
    x, w = torch.randn(tokens, width), torch.randn(width, 4 * width)
    small, big = torch.randn(64), torch.randn(1 << 19)
    q = torch.randn(2, 6, 256, 64, requires_grad=True)
    image, kernel = torch.randn(2, 32, 64, 64), torch.randn(32, 32, 3, 3)
    nn, product = torch.nn.functional, 2 * 6 * 256**2 * 64
    with torch.no_grad():
        host = _seconds(lambda: small + small)
        gemm = 2 * tokens * width * 4 * width / (_seconds(lambda: x @ w) - host)
        attention = _seconds(lambda: nn.scaled_dot_product_attention(q, q, q))
        convolution = _seconds(lambda: torch.conv2d(image, kernel, padding=1))
        # kind -> (bytes that a call reads and writes, the call)
        pointwise: dict[str, tuple[int, Callable[[], object]]] = {
            "": (12 * big.numel(), lambda: big + big),
            "norm": (8 * x.numel(), lambda: nn.layer_norm(x, (width,))),
            "function": (8 * big.numel(), lambda: nn.gelu(big, approximate="tanh")),
            "random": (4 << 16, lambda: torch.randn(1 << 16)),
        }
        bandwidth = {
            kind: nbytes / max(1e-9, _seconds(call) - host)
            for kind, (nbytes, call) in pointwise.items()
        }
    out = nn.scaled_dot_product_attention(q, q, q)
    g = torch.ones_like(out)
    backward = _seconds(lambda: torch.autograd.grad(out, q, g, retain_graph=True))
    return Device(
        name="cpu",
        rates={
            "gemm": gemm,
            "attention": 4 * product / attention,
            "convolution": 2 * image.numel() * 32 * 9 / convolution,
            "attention_backward": 10 * product / backward,
        },
        bandwidth=bandwidth,
        host=HOST_SHARE * host,
        least=0.0,
        ceiling=gemm,
        memory=None,
        link=2e9,
        network=1.25e9,
        upload=bandwidth[""],
        reserve=0.0,
        cuda=False,
        source="modelled by rates that were measured on this machine",
    )


# An operator costs more than its own call: the module around it, autograd, strided views. The
# factor was fitted once on shapes-sd3, whose tensors are too small to take time themselves.
HOST_SHARE = 3.0


def _seconds(call: Callable[[], object], *, least: float = 0.04) -> float:
    """Return the least time of a call over repeats of at least `least` seconds together; CPU
    seconds if one thread computes, because other programs do not change those."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    best, spent, repeats = float("inf"), 0.0, 1
    while spent < least:
        began = clock()
        for _ in range(repeats):
            call()
        took = clock() - began
        spent += took
        best = min(best, took / repeats)
        if took < least / 8:
            repeats *= 2
    return best
