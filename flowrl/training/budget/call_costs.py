"""Find the cost of one call of a policy by running it on the meta device: FLOPs, seconds of a
device, and bytes.

Costs are affine in the number of rows (a test checks this), so that two sizes tell the cost of all
others; a single row is run by itself, since axes of length 1 save copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.config.schema import Config
from flowrl.policy.replay.encoders import LARGEST
from flowrl.policy.weights.recompute import recompute
from flowrl.training.budget.line import on_line
from flowrl.training.budget.meter import POINTWISE, Attention, Meter
from flowrl.training.budget.modelled import META
from flowrl.training.budget.modelled_tokens import Modelled
from flowrl.training.budget.rehearsal import PolicyCall
from flowrl.training.budget.roofline import Device

# Ratio of the seconds of pointwise operators and norms with compiled blocks to those without: one
# factor for every network and device, which was not measured on a GPU. A model of inductor's
# kernels gave it for SD3.5-Medium, less for FLUX.1-dev and more for SD 1.5 (docs/LOG.md).
COMPILED = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a forward or a backward on the device."""

    flops: float = 0.0  # FLOPs by torch's formulas
    seconds: float = 0.0  # seconds on the device, without the host's time to issue operators
    operators: float = 0.0  # number of operators that the host issues
    peak: float = 0.0  # bytes at the highest moment, above those that live when the call begins
    # bytes that live on after it, without its result: tensors that a backward reads, or an
    # encoder's answers; a backward frees those of its forward, so that its number is below 0
    left: float = 0.0
    # kind of operator -> its part of the seconds
    kinds: dict[str, float] = field(default_factory=dict)


class Costs:
    """Costs of a policy's calls on a device; each kind of call is run once. low: the precision of
    autocast; None: there is no autocast."""

    def __init__(self, policy: Modelled, device: Device, *, low: torch.dtype | None) -> None:
        self.policy, self.device, self.low = policy, device, low
        self.known: dict[tuple[PolicyCall, Any], tuple[Cost, Cost]] = {}
        self.answers = 0  # bytes of encoders' answers to a prompt; known once one was encoded
        for weight in policy.trainable.named().values():
            # the gradient exists already: micro-batches add to it
            weight.grad = torch.empty_like(weight)

    def of(self, call: PolicyCall, cfg: Config) -> tuple[Cost, Cost]:
        """Return the costs of a call's forward and backward, under a config's settings."""
        settings = {
            "velocity": (cfg.train.gradient_checkpointing, cfg.train.compile),
            "decode": cfg.model.tiling,
        }.get(call.what)
        if (call, settings) not in self.known:
            near = self._near(call, settings)
            found = self._run(call, cfg) if len(near) < 2 else _on_line(call, *near)
            self.known[call, settings] = found
        return self.known[call, settings]

    def _near(self, call: PolicyCall, settings: Any) -> list[tuple[int, tuple[Cost, Cost]]]:
        """Find runs of the same network call at other numbers of rows above 1."""
        if call.what != "velocity" or call.rows == 1:
            return []
        alike = [
            (other.rows, costs)
            for (other, others), costs in self.known.items()
            if (replace(other, rows=call.rows), others) == (call, settings) and other.rows > 1
        ]
        return alike[:2]

    def _run(self, call: PolicyCall, cfg: Config) -> tuple[Cost, Cost]:
        if call.what == "encode":
            return self._encode(call.rows), Cost()
        policy = self.policy
        x = torch.empty(call.rows, *policy.latent_shape, dtype=policy.state_dtype, device=META)
        if call.what == "decode":
            if call.grad:
                x.requires_grad_()
            policy.tile_decoder(cfg.model.tiling)
            return self._traced(call, lambda: policy.decode(x))
        cond = policy.encode(["a", "b"])
        rows = torch.zeros(call.rows, dtype=torch.int64, device=META)
        options: dict[str, Any] = {
            "guidance": "none" if call.guidance == "none" else "pipeline",
            "detach_uncond": call.detach_uncond,
        }
        recompute(policy.networks.values(), cfg.train.gradient_checkpointing)
        lora = policy.trainable.lora is not None
        with policy.view("default" if call.adapted or not lora else "reference"):
            return self._traced(
                call,
                lambda: policy.velocity(x, 0.5, cond, rows, **options),
                low=self.low,
                compiled=cfg.train.compile == "blocks",
            )

    def _traced(
        self,
        call: PolicyCall,
        run: Any,
        *,
        low: torch.dtype | None = None,
        compiled: bool = False,
    ) -> tuple[Cost, Cost]:
        meter, cuda = Meter(self.device), self.device.cuda
        with torch.set_grad_enabled(call.grad), meter, Attention(low, cuda=cuda):
            out: Tensor = run()
        forward = booked(meter, compiled=compiled)
        if not call.grad:
            return forward, Cost()
        left = meter.live - out.numel() * out.element_size()
        grad, before = torch.empty_like(out), meter.live
        meter.reset_peak()
        with meter, Attention(low, cuda=cuda, keep=False):
            # the function behind backward(), which itself would leave the mode Attention, so that
            # recomputed blocks would run other operators
            torch.autograd.Variable._execution_engine.run_backward(
                (out,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        whole = booked(meter, before, compiled=compiled)
        backward = replace(
            whole,  # the meter's books hold the forward, too
            flops=whole.flops - forward.flops,
            seconds=whole.seconds - forward.seconds,
            operators=whole.operators - forward.operators,
            left=-left,
            kinds={kind: took - forward.kinds.get(kind, 0.0) for kind, took in whole.kinds.items()},
        )
        return replace(forward, left=left), backward

    @torch.no_grad()
    def _encode(self, prompts: int) -> Cost:
        """Return the cost of encoding prompts one by one; encoders' answers wait in host memory,
        and are joined on the device."""
        meter = Meter(self.device)
        with meter, Attention(self.low, cuda=self.device.cuda):
            answers = self.policy.encode_one()
        one = booked(meter)
        self.answers = sum(answer.nbytes for answer in answers)
        sizes = [prompts * answer.nbytes for answer in answers]
        joined, kept = max(sizes, default=0), min(sum(sizes), LARGEST)
        # on a CPU, host memory and device memory are the same
        host, left = (0, 0) if self.device.cuda else (kept + joined, kept)
        return Cost(
            flops=prompts * one.flops,
            seconds=prompts * one.seconds,
            operators=prompts * one.operators,
            peak=one.peak + host + joined,
            left=left,
            kinds={kind: prompts * took for kind, took in one.kinds.items()},
        )


def booked(meter: Meter, before: int = 0, *, compiled: bool = False) -> Cost:
    """Return the costs that a meter has booked so far, with its peak above `before` bytes.
    compiled: whether the network's blocks are, which changes only seconds on the device."""
    kinds = dict(meter.by_kind)
    if compiled:
        kinds |= {kind: COMPILED * kinds[kind] for kind in POINTWISE if kind in kinds}
    return Cost(
        flops=meter.flops,
        seconds=sum(kinds.values()),
        operators=meter.operators,
        peak=meter.peak - before,
        kinds=kinds,
    )


def _on_line(
    call: PolicyCall, low: tuple[int, tuple[Cost, Cost]], high: tuple[int, tuple[Cost, Cost]]
) -> tuple[Cost, Cost]:
    """Extend the costs of forward and backward on the lines through two other numbers of rows. The
    number of operators is the second's: a network's first call may have a few more."""
    share = (call.rows - low[0]) / (high[0] - low[0])
    names = ("flops", "seconds", "peak", "left", "kinds")
    forward, backward = (on_line(a, b, share, *names) for a, b in zip(low[1], high[1], strict=True))
    return forward, backward
