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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlace:
    """A step of a pipeline's loop."""

    steps: int  # number of steps of the pipeline's call
    begin: int  # place in the scheduler's timesteps where the loop starts
    at: int  # number of the iteration, from 1: the first one starts from latents of the loop's own


def reenter(
    prober: Prober,
    coords: Coords,
    place: LoopPlace,
    x: Tensor,
    s: Tensor,
    items: Sequence[PromptItem],
    outputs: dict[Key, Tensor] | None = None,
) -> Tensor:
    """Return the pipeline's combined prediction at flow coordinates x (P, *L), one sigma s () fp64
    for all rows, row i with items[i].

    place: where the loop makes that step. outputs: answers in place of the networks
    (differentiable, like the networks' own), each (blocks, P, repeats, ...).
    """
    if prober.runner.single and len(items) > 1:  # one at a time, because the pipeline takes one
        made = []
        for i, item in enumerate(items):
            answers = outputs and {key: value[:, i : i + 1] for key, value in outputs.items()}
            made.append(reenter(prober, coords, place, x[i : i + 1], s, [item], answers))
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
    body = LoopBody(prober, place.at, latents, outputs)
    prober.runner.run(
        [*items, *pad],
        place.steps,
        on_call=body.on_call,
        on_step=body.on_step,
        following=lambda: latents,
        on_times=timed(coords, place, s),
        grad=torch.is_grad_enabled(),
        unseen=lambda: bool(body.left),
        doing="while its loop body is run",
        # such a scheduler looks integer times up in a table, and our time may be a float
        skip_step=coords.kind == "vp",
    )
    assert body.prediction is not None
    return body.prediction[: len(items)].float()


def timed(coords: Coords, place: LoopPlace, s: Tensor) -> Callable[[Any], None]:
    """Make a callback that gives a scheduler, after set_timesteps, the noise level s () at a
    place."""

    def on_times(scheduler: Any) -> None:
        times, t = scheduler.timesteps, coords.time(s.reshape(1)).item()
        i = place.begin + place.at
        middle = times[i - 1] + times[i]
        middle = middle / 2 if times.is_floating_point() else middle // 2
        if t != int(t) and not times.is_floating_point():
            times = times.double()
        times = times.clone()
        if abs(times[i - 1].item() - t) < 1e-6:
            # schedulers look their index up by time, so the two times must differ
            times[i - 1] = middle
        times[i] = t
        scheduler.timesteps = times
        sigmas = getattr(scheduler, "sigmas", None)
        if isinstance(sigmas, Tensor) and sigmas.numel() == times.numel() + 1:
            sigmas = sigmas.clone()
            sigmas[i] = coords.level(s).item()
            scheduler.sigmas = sigmas

    return on_times


@dataclass(eq=False)
class LoopBody:
    """Callbacks of a run in which one iteration is ours; the steps before it return its latents."""

    prober: Prober  # its templates give the shapes of outputs
    left: int  # number of iterations before ours
    latents: Tensor  # latents of all rows, in the pipeline's units
    # answers of the networks in our iteration; None: they answer themselves
    outputs: dict[Key, Tensor] | None
    # component -> number of its calls in this iteration
    calls: Counter[str] = field(default_factory=Counter)
    prediction: Tensor | None = None  # prediction that the scheduler gets in our iteration

    def on_call(self, name: str, args: dict[str, Any], real: Callable[[], Any]) -> Any:
        key = (name, self.calls[name])
        self.calls[name] += 1
        if not self.left and self.outputs is None:
            return real()
        template, rows = self.prober.templates[key]
        if not self.left and self.outputs is not None:
            return like_output(template, self.outputs[key], self.prober.runner.streams)
        first = prediction_of(template, self.prober.runner.streams)
        shape = (first.shape[0] * len(self.latents) // rows, *first.shape[1:])
        return like_output(template, first.new_ones(shape), self.prober.runner.streams)

    def on_step(self, prediction: Tensor, time: Any, sample: Tensor) -> None:
        if not self.left:
            self.prediction = prediction
            raise Halt
        self.left -= 1
        self.calls.clear()
