"""What one call of a policy costs, found by running it on the meta device: FLOPs, seconds of a
device, and bytes.

Costs are affine in the number of rows (a test holds them to it), so that two sizes tell all
others; a single row is run by itself, since axes of length 1 spare copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flowrl.policy.replay.encoders import LARGEST
from flowrl.training.budget.meter import POINTWISE, Attention, Meter
from flowrl.training.budget.modelled import META, ModelledPolicy
from flowrl.training.budget.rehearsal import PolicyCall
from flowrl.training.budget.roofline import Device
from flowrl.training.budget.weight_costs import WeightCosts

# Seconds that pointwise operators and norms take with compiled blocks, over those without: one
# factor for every network and device, which was not measured on a GPU. A model of inductor's
# kernels gave it for SD3.5-Medium, less for FLUX.1-dev and more for SD 1.5 (docs/LOG.md).
COMPILED = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A forward or a backward. seconds: of the device, the host not counted; peak: bytes above
    those that live when it begins."""

    flops: float = 0.0
    seconds: float = 0.0
    operators: float = 0.0
    peak: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict)  # seconds by kind of operator

    def between(self, other: Part, share: float) -> Part:
        """share of the way from this to another, which has the number of operators of all: a
        network's first call may have a few more."""

        def line(a: float, b: float) -> float:
            return a + share * (b - a)

        return Part(
            flops=line(self.flops, other.flops),
            seconds=line(self.seconds, other.seconds),
            operators=other.operators,
            peak=line(self.peak, other.peak),
            kinds={
                kind: line(self.kinds.get(kind, 0.0), other.kinds.get(kind, 0.0))
                for kind in self.kinds | other.kinds
            },
        )

    def paying(
        self, weights: WeightCosts, device: Device, passes: float, *, backward: bool
    ) -> Part:
        """The same with what `passes` over weights take that are not there as they are: unpacked,
        or gathered. backward: whether it is one, in which gradients of split weights are sent."""
        seconds = weights.seconds(device, self.seconds, passes, backward=backward)
        kinds = {"weights": seconds - self.seconds} if seconds > self.seconds else {}
        return replace(
            self,
            seconds=seconds,
            operators=self.operators + round(passes * weights.operators),
            peak=self.peak + (weights.backward if backward else weights.above),
            kinds=self.kinds | kinds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """saved: bytes that live from the forward to the end of the backward, but for the result; of an
    encoding, those of its answers."""

    forward: Part
    backward: Part = Part()
    saved: float = 0.0


class Costs:
    """Of the calls of a policy. low: the precision of autocast, None without; checkpointing:
    whether activations are computed again, or of which share of the blocks; compiled: whether the
    network's blocks are; tiled: whether a tile is decoded at a time. apart: known costs of encoding
    and decoding, which neither checkpointing nor compiling changes."""

    def __init__(
        self,
        policy: ModelledPolicy,
        device: Device,
        *,
        low: torch.dtype | None,
        checkpointing: bool | float,
        compiled: bool = False,
        tiled: bool = False,
        apart: dict[PolicyCall, Cost] | None = None,
    ) -> None:
        self.policy, self.device, self.low = policy, device, low
        self.checkpointing, self.compiled, self.tiled = checkpointing, compiled, tiled
        self.known: dict[PolicyCall, Cost] = {}
        self.apart = {} if apart is None else apart
        for weight in policy.trainable.named().values():
            weight.grad = torch.empty_like(weight)  # micro-batches add to it

    def of(self, asked: PolicyCall) -> Cost:
        """The cost of a call."""
        known = self.known if asked.what == "velocity" else self.apart
        if asked not in known:
            near = self._near(asked) if asked.what == "velocity" and asked.rows > 1 else []
            known[asked] = _line(asked, near) if len(near) == 2 else self._run(asked)
        return known[asked]

    def _near(self, asked: PolicyCall) -> list[tuple[int, Cost]]:
        """The same call at two other numbers of rows, both above 1, that were run."""
        alike = [
            (other.rows, cost)
            for other, cost in self.known.items()
            if replace(other, rows=asked.rows) == asked and other.rows > 1
        ]
        return alike[:2]

    def _run(self, asked: PolicyCall) -> Cost:
        if asked.what == "encode":
            return self._encode(asked.rows)
        policy = self.policy
        x = torch.empty(asked.rows, *policy.latent_shape, device=META)
        if asked.what == "decode":
            x.requires_grad_(asked.grad)
            policy.tile_decoder(self.tiled)
            return self._traced(asked, lambda: policy.decode(x), low=None)
        cond = policy.encode(["a", "b"])
        rows = torch.zeros(asked.rows, dtype=torch.int64, device=META)
        options: dict[str, Any] = {
            "guidance": "none" if asked.guidance == "none" else "pipeline",
            "detach_uncond": asked.detach_uncond,
        }
        policy.gradient_checkpointing(self.checkpointing)
        lora = policy.trainable.lora is not None
        with policy.view("default" if asked.adapted or not lora else "reference"):
            return self._traced(
                asked, lambda: policy.velocity(x, 0.5, cond, rows, **options), low=self.low
            )

    def _traced(self, asked: PolicyCall, call: Any, *, low: torch.dtype | None) -> Cost:
        meter, cuda = Meter(self.device), self.device.cuda
        compiled = self.compiled and asked.what == "velocity"
        with torch.set_grad_enabled(asked.grad), meter, Attention(low, cuda=cuda):
            out: Tensor = call()
        forward = booked(meter, compiled=compiled)
        if not asked.grad:
            return Cost(forward=forward)
        saved = meter.live - out.numel() * out.element_size()
        grad, before = torch.empty_like(out), meter.live
        meter.reset_peak()
        with meter, Attention(low, cuda=cuda, keep=False):
            # what backward() comes down to; by itself it leaves Attention, and what checkpointing
            # computes again would be other operators
            torch.autograd.Variable._execution_engine.run_backward(
                (out,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        whole = booked(meter, before, compiled=compiled)
        backward = Part(
            flops=whole.flops - forward.flops,
            seconds=whole.seconds - forward.seconds,
            operators=whole.operators - forward.operators,
            peak=whole.peak,
            kinds={kind: took - forward.kinds.get(kind, 0.0) for kind, took in whole.kinds.items()},
        )
        return Cost(forward=forward, backward=backward, saved=saved)

    @torch.no_grad()
    def _encode(self, prompts: int) -> Cost:
        """Prompts are asked for one by one; what encoders answer waits in host memory, and is
        joined on the device."""
        meter = Meter(self.device)
        with meter, Attention(self.low, cuda=self.device.cuda):
            answers = self.policy.encode_one()
        one = booked(meter)
        sizes = [prompts * _bytes(answer) for answer in answers]
        joined, host = max(sizes, default=0), 0
        if not self.device.cuda:  # one memory for both
            host = min(sum(sizes), LARGEST) + joined
        forward = Part(
            flops=prompts * one.flops,
            seconds=prompts * one.seconds,
            operators=prompts * one.operators,
            peak=one.peak + host + joined,
            kinds={kind: prompts * took for kind, took in one.kinds.items()},
        )
        return Cost(forward=forward, saved=0 if self.device.cuda else min(sum(sizes), LARGEST))


def booked(meter: Meter, before: int = 0, *, compiled: bool = False) -> Part:
    """What a meter has booked so far. before: bytes above which its peak is told. compiled: whether
    the network's blocks are, which changes seconds on the device and nothing else."""
    kinds = dict(meter.by_kind)
    if compiled:
        kinds |= {kind: COMPILED * kinds[kind] for kind in POINTWISE if kind in kinds}
    return Part(
        flops=meter.flops,
        seconds=sum(kinds.values()),
        operators=meter.operators,
        peak=meter.peak - before,
        kinds=kinds,
    )


def _line(asked: PolicyCall, near: list[tuple[int, Cost]]) -> Cost:
    """The cost on the line through two others."""
    (a, low), (b, high) = near
    share = (asked.rows - a) / (b - a)
    return Cost(
        forward=low.forward.between(high.forward, share),
        backward=low.backward.between(high.backward, share),
        saved=low.saved + share * (high.saved - low.saved),
    )


def _bytes(answer: Any) -> int:
    """Bytes of the tensors of an answer, each storage counted once."""
    tensors = [t for t in tree_leaves(_plain(answer)) if isinstance(t, Tensor)]
    return sum({t.untyped_storage()._cdata: t.numel() * t.element_size() for t in tensors}.values())


def _plain(answer: Any) -> Any:
    """A model output as a dict, which has leaves."""
    return dict(answer) if isinstance(answer, dict) else answer
