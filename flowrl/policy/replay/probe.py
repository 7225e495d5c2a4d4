"""Stubbed runs of a pipeline: networks answer with what we choose, and the loop goes on with
latents that we choose."""

from __future__ import annotations

from collections.abc import Callable
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


class Copies:
    """Clones of recorded tensors, one for each version of a tensor: a loop may edit its own in
    place."""

    def __init__(self) -> None:
        self._made: dict[
            int, tuple[Tensor, int, Tensor]
        ] = {}  # by id: source (kept, or its id would be another's), version, clone

    def __call__(self, value: Tensor) -> Tensor:
        if value.is_inference():
            return value.clone()
        source, version, copy = self._made.get(id(value), (None, -1, value))
        if source is not value or version != value._version:
            copy = value.clone()
            self._made[id(value)] = (value, value._version, copy)
        return copy


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
        """Iterations of one run. After iteration j the loop goes on with latents(j); outputs(key,
        shape) answers a network (default: ones); stop(j, iteration) ends the run early; start:
        initial latents (P, *L), for pipelines that take them. self.result is what the call
        returned."""
        prompts = [*prompts, *self.runner.pad]
        done: list[Iteration] = []
        calls: list[Call] = []
        copied = Copies()

        def on_call(name: str, args: dict[str, Any], real: Callable[[], Any]) -> Any:
            key = (name, sum(c.module == name for c in calls))
            if key not in self.templates:
                self.templates[key] = (real(), len(prompts))
            template, rows = self.templates[key]
            first = first_tensor(template)
            shape = (first.shape[0] * len(prompts) // rows, *first.shape[1:])
            value = torch.ones(shape, dtype=first.dtype) if outputs is None else outputs(key, shape)
            calls.append(Call(name, map_tensors(copied, args)))
            return like_output(template, value.to(first.device, copy=True))

        def on_step(prediction: Tensor, time: Any, sample: Tensor) -> Tensor | None:
            if not calls:
                raise UnreplayableError(
                    "scheduler.step is called twice between two denoiser calls (parallel streams or"
                    " a conversion step), which cannot be replayed"
                )
            at = torch.as_tensor(time).detach().cpu().double().reshape(()).clone()
            done.append(Iteration(list(calls), at, copied(sample), copied(prediction)))
            calls.clear()
            if stop is not None and stop(len(done) - 1, done[-1]):
                raise Halt
            return (
                None
                if latents is None
                else latents(len(done) - 1).to(sample.device, sample.dtype, copy=True)
            )

        given: dict[str, Any] = {} if start is None else {"latents": start}
        self.result = self.runner.run(
            prompts, steps, on_call=on_call, on_step=on_step, output_type=output_type, **given
        )
        if not done:
            raise UnreplayableError(
                f"{type(self.runner.pipe).__name__} never called scheduler.step after a denoiser:"
                " there is no loop to replay"
            )
        return done

    def schedule(self, steps: int, coords: Coords) -> Schedule:
        """Sigmas and exact times of a stubbed run at the real number of steps and resolution, so
        that dynamic shifts are included."""
        iterations = self.run(RECORD, steps)
        times = torch.stack([i.time for i in iterations])
        sigmas = coords.sigmas_of(self.runner.pipe.scheduler, times)
        factor = float(getattr(self.runner.pipe.scheduler, "init_noise_sigma", 1.0))
        if (
            "latents" in self.runner.parameters and "latents" not in self.runner.kwargs
        ):  # better than asking: give ones and look
            ones = torch.ones_like(iterations[0].sample)
            seen = (
                self.run(RECORD, steps, start=ones, stop=lambda j, it: True)[0]
                .sample.double()
                .mean()
                .item()
            )
            factor = (
                factor if abs(seen - factor) < 1e-2 * abs(factor) else seen
            )  # seen is rounded in low precision
        keep = torch.cat(
            [sigmas[:-1] > sigmas[1:], torch.tensor([True])]
        )  # PNDM asks for its second time twice
        return Schedule(
            sigmas=sigmas[keep],
            times=times[keep[:-1]],
            start=factor / coords.scale(sigmas[0]).item(),
        )
