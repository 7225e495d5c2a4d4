"""Stubbed runs of a pipeline: network outputs and latents after each step are what we choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.arguments import map_tensors
from flowrl.policy.replay.coords import Coords, Schedule
from flowrl.policy.replay.record import (
    Call,
    Halt,
    Iteration,
    Runner,
    UnreplayableError,
    first_tensor,
    like_output,
)

RECORD = ["a red circle", "two blue squares left of a green triangle"]
Key = tuple[str, int]  # component, n-th call to it within an iteration


@dataclass(eq=False)
class Copies:
    """Clones of recorded tensors, one for each version of a tensor: a loop may edit its own in
    place."""

    # by id: source (kept, or its id would be another's), version, clone
    made: dict[int, tuple[Tensor, int, Tensor]] = field(default_factory=dict)

    def __call__(self, value: Tensor) -> Tensor:
        if value.is_inference():
            return value.clone()
        source, version, copy = self.made.get(id(value), (None, -1, value))
        if source is not value or version != value._version:
            copy = value.clone()
            self.made[id(value)] = (value, value._version, copy)
        return copy


@dataclass(eq=False)
class StubbedRun:
    """Callbacks of one run: what networks and scheduler are answered, and what was seen."""

    templates: dict[Key, tuple[Any, int]]
    rows: int
    latents: Callable[[int], Tensor] | None
    outputs: Callable[[Key, tuple[int, ...]], Tensor] | None
    stop: Callable[[int, Iteration], bool] | None
    done: list[Iteration] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # of the iteration that is running
    copied: Copies = field(default_factory=Copies)

    def on_call(self, name: str, args: dict[str, Any], real: Callable[[], Any]) -> Any:
        key = (name, sum(call.module == name for call in self.calls))
        if key not in self.templates:
            self.templates[key] = (real(), self.rows)
        template, rows = self.templates[key]
        first = first_tensor(template)
        shape = (first.shape[0] * self.rows // rows, *first.shape[1:])
        if self.outputs is None:
            value = torch.ones(shape, dtype=first.dtype)
        else:
            value = self.outputs(key, shape)
        self.calls.append(Call(name, map_tensors(self.copied, args)))
        return like_output(template, value.to(first.device, copy=True))

    def on_step(self, prediction: Tensor, time: Any, sample: Tensor) -> Tensor | None:
        if not self.calls:
            raise UnreplayableError(
                "scheduler.step is called twice between two denoiser calls (parallel streams or a"
                " conversion step), which cannot be replayed"
            )
        at = torch.as_tensor(time).detach().cpu().double().reshape(()).clone()
        seen = Iteration(list(self.calls), at, self.copied(sample), self.copied(prediction))
        self.calls.clear()
        j = len(self.done)
        self.done.append(seen)
        if self.stop is not None and self.stop(j, seen):
            raise Halt
        if self.latents is None:
            return None
        return self.latents(j).to(sample.device, sample.dtype, copy=True)


class Prober:
    """templates[key] = (output of one real call, rows of the batch it came from): the only network
    calls that probing makes."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.templates: dict[Key, tuple[Any, int]] = {}
        self.result: Any = None

    def run(
        self,
        prompts: list[str],
        steps: int,
        *,
        latents: Callable[[int], Tensor] | None = None,
        outputs: Callable[[Key, tuple[int, ...]], Tensor] | None = None,
        stop: Callable[[int, Iteration], bool] | None = None,
        start: Tensor | None = None,
        output_type: str = "latent",
    ) -> list[Iteration]:
        """Iterations of one run; self.result is what the call returned.

        After iteration j the loop goes on with latents(j). outputs(key, shape) answers a network
        (default: ones). stop(j, iteration) ends the run early. start: initial latents (P, *L), for
        pipelines that take them.
        """
        prompts = [*prompts, *self.runner.pad]
        stub = StubbedRun(self.templates, len(prompts), latents, outputs, stop)
        given: dict[str, Any] = {} if start is None else {"latents": start}
        self.result = self.runner.run(
            prompts,
            steps,
            on_call=stub.on_call,
            on_step=stub.on_step,
            output_type=output_type,
            **given,
        )
        if not stub.done:
            raise UnreplayableError(
                f"{type(self.runner.pipe).__name__} never called scheduler.step after a denoiser:"
                " there is no loop to replay"
            )
        return stub.done

    def schedule(self, steps: int, coords: Coords) -> Schedule:
        """Sigmas and exact times of a stubbed run at the real number of steps and resolution, so
        that dynamic shifts are included."""
        iterations = self.run(RECORD, steps)
        times = torch.stack([it.time for it in iterations])
        sigmas = coords.sigmas_of(self.runner.pipe.scheduler, times)
        # PNDM asks for its second time twice
        keep = torch.cat([sigmas[:-1] > sigmas[1:], torch.tensor([True])])
        factor = self._start_factor(steps, iterations[0].sample)
        return Schedule(
            sigmas=sigmas[keep],
            times=times[keep[:-1]],
            start=factor / coords.scale(sigmas[0]).item(),
        )

    def _start_factor(self, steps: int, like: Tensor) -> float:
        """What the pipeline multiplies initial noise by, as its scheduler says it, or as it shows
        when ones are given; like: latents (P, *L)."""
        told = float(getattr(self.runner.pipe.scheduler, "init_noise_sigma", 1.0))
        if "latents" not in self.runner.parameters or "latents" in self.runner.kwargs:
            return told
        first = self.run(RECORD, steps, start=torch.ones_like(like), stop=lambda j, it: True)[0]
        seen = first.sample.double().mean().item()
        # seen is rounded in low precision
        return told if abs(seen - told) < 1e-2 * abs(told) else seen
