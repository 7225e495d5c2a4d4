"""Re-entry: run the pipeline's own loop body for one step.

It infers nothing but output shapes, so it can referee the Replay, and it combines outputs if
guidance has no closed form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.coords import Coords
from flowrl.policy.replay.errors import Halt
from flowrl.policy.replay.items import PromptItem
from flowrl.policy.replay.probe import Key, Prober
from flowrl.policy.replay.record import like_output, prediction_of


def reenter(
    prober: Prober,
    coords: Coords,
    steps: int,
    x: Tensor,
    s: Tensor,
    items: Sequence[PromptItem],
    outputs: dict[Key, Tensor] | None = None,
) -> Tensor:
    """Return the pipeline's combined prediction at flow coordinates x (P, *L), one sigma s () fp64
    for all rows, row i with items[i].

    outputs: answers in place of the networks (differentiable, like the networks' own), each
    (blocks, P, repeats, ...).
    """
    if prober.runner.single and len(items) > 1:  # one at a time, because the pipeline takes one
        made = []
        for i, item in enumerate(items):
            answers = outputs and {key: value[:, i : i + 1] for key, value in outputs.items()}
            made.append(reenter(prober, coords, steps, x[i : i + 1], s, [item], answers))
        return torch.cat(made)
    pad = prober.runner.pad
    latents = (x * coords.scale(s).to(x)).to(x.dtype)
    latents = torch.cat([latents, latents[:1].expand(len(pad), *x.shape[1:])])
    if outputs is not None:
        # add outputs for the rows that fix the text length
        outputs = {
            key: torch.cat([v, v[:, :1].expand(-1, len(pad), *v.shape[2:])], 1).flatten(0, 2)
            for key, v in outputs.items()
        }
    body = LoopBody(prober, coords, s, coords.time(s.reshape(1)).item(), latents, outputs)
    prober.runner.run(
        [*items, *pad],
        steps,
        on_call=body.on_call,
        on_step=body.on_step,
        following=lambda: latents,
        on_times=body.on_times,
        grad=torch.is_grad_enabled(),
        doing="while its loop body is run",
        # such a scheduler looks integer times up in a table, and our time may be a float
        skip_step=coords.kind == "vp",
    )
    assert body.prediction is not None
    return body.prediction[: len(items)].float()


@dataclass(eq=False)
class LoopBody:
    """Callbacks of a run whose second iteration is ours: after set_timesteps its time is set, and
    the first step returns its latents."""

    prober: Prober  # its templates give the shapes of outputs
    coords: Coords  # flow coordinates of the pipeline's scheduler
    sigma: Tensor  # () fp64 noise level of our iteration
    time: float  # model time of sigma
    latents: Tensor  # latents of all rows, in the pipeline's units
    # answers of the networks in our iteration; None: they answer themselves
    outputs: dict[Key, Tensor] | None
    ours: bool = False  # whether the second iteration has begun
    # component -> number of its calls in this iteration
    calls: Counter[str] = field(default_factory=Counter)
    prediction: Tensor | None = None  # prediction that the scheduler gets in our iteration

    def on_times(self, scheduler: Any) -> None:
        times, t = scheduler.timesteps, self.time
        i = self.prober.begin  # loops that start from a picture start late
        middle = times[i] + times[i + 1]
        middle = middle / 2 if times.is_floating_point() else middle // 2
        if t != int(t) and not times.is_floating_point():
            times = times.double()
        times = times.clone()
        if abs(times[i].item() - t) < 1e-6:
            # schedulers look their index up by time, so the two times must differ
            times[i] = middle
        times[i + 1] = t
        scheduler.timesteps = times
        sigmas, s = getattr(scheduler, "sigmas", None), self.sigma
        if isinstance(sigmas, Tensor) and sigmas.numel() == times.numel() + 1:
            sigmas = sigmas.clone()
            sigmas[i + 1] = self.coords.level(s).item()
            scheduler.sigmas = sigmas

    def on_call(self, name: str, args: dict[str, Any], real: Callable[[], Any]) -> Any:
        key = (name, self.calls[name])
        self.calls[name] += 1
        if self.ours and self.outputs is None:
            return real()
        template, rows = self.prober.templates[key]
        if self.ours and self.outputs is not None:
            return like_output(template, self.outputs[key], self.prober.runner.streams)
        first = prediction_of(template, self.prober.runner.streams)
        shape = (first.shape[0] * len(self.latents) // rows, *first.shape[1:])
        return like_output(template, first.new_ones(shape), self.prober.runner.streams)

    def on_step(self, prediction: Tensor, time: Any, sample: Tensor) -> None:
        if self.ours:
            self.prediction = prediction
            raise Halt
        self.ours = True
        self.calls.clear()
