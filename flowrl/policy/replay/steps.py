"""Put the scheduler's step under our control.

A loop may move several latents in an iteration (a video and its sound, the frames of diffusion
forcing): they form one state, side by side. It may also call step only to convert a prediction.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replaced import replaced
from flowrl.policy.replay.errors import UnreplayableError


@dataclass(frozen=True)
class StepPattern:
    """The calls to scheduler.step in an iteration."""

    # for each call to step in an iteration, whether it moves latents
    updates: tuple[bool, ...] = (True,)
    # for each update, shape of a row of its latents; (): there is one update only
    shapes: tuple[tuple[int, ...], ...] = ()

    def join(self, parts: list[Tensor]) -> Tensor:
        """Join the latents (P, *L) of an iteration's updates into its state."""
        return parts[0] if len(parts) == 1 else torch.cat([part.flatten(1) for part in parts], 1)

    def split(self, state: Tensor) -> list[Tensor]:
        """Split a state into the latents of the updates: the inverse of join."""
        if len(self.shapes) < 2:
            return [state]
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        parts = state.split(sizes, 1)
        return [part.reshape(-1, *s) for part, s in zip(parts, self.shapes, strict=True)]


def read_pattern(iterations: list[list[dict[str, Any]]], rows: int) -> StepPattern:
    """Read the pattern from the arguments of step in some iterations. If a later step of the same
    iteration gets the same latents, the earlier one only converts its prediction."""
    found = {tuple(_updates(steps, rows)) for steps in iterations}
    if len(found) != 1:
        raise UnreplayableError(
            f"scheduler.step is called {sorted(map(len, iterations))} times in an iteration; the"
            " number must not change"
        )
    updates = found.pop()
    moved = [step for step, is_update in zip(iterations[0], updates, strict=True) if is_update]
    times = {float(torch.as_tensor(step["timestep"]).reshape(-1)[0]) for step in moved}
    if len(times) > 1:
        raise UnreplayableError(
            f"scheduler.step is called at different times in one iteration, {sorted(times)}: its"
            " latents are not at one noise level"
        )
    shapes = tuple(tuple(step["sample"].shape[1:]) for step in moved)
    return StepPattern(updates, shapes if len(shapes) > 1 else ())


def _updates(steps: list[dict[str, Any]], rows: int) -> Iterator[bool]:
    for k, step in enumerate(steps):
        first = step["sample"][:rows]
        later = (other["sample"][:rows] for other in steps[k + 1 :])
        yield not any(first.shape == o.shape and torch.equal(first, o) for o in later)


@dataclass(eq=False)
class Stepper:
    """Handles each call to scheduler.step in a run, see Runner.run."""

    pattern: StepPattern  # the calls to step of an iteration
    # called with each iteration's (prediction, time, latents)
    on_step: Callable[[Tensor, Any, Tensor], None] | None
    # returns latents with which the loop goes on; None: the scheduler's
    following: Callable[[], Tensor | None] | None
    on_done: Callable[[Tensor], None] | None  # called with the latents after each iteration
    # called with the arguments of every call to step
    on_raw: Callable[[dict[str, Any]], None] | None
    skip: bool  # the scheduler's own step is not called
    exact: bool = False  # latents that replace the scheduler's stay in their own type
    at: int = 0  # number of the next step in its iteration
    # arguments of the iteration's updates so far
    seen: list[dict[str, Any]] = field(default_factory=list)
    # latents after the updates of the iteration so far
    results: list[Tensor] = field(default_factory=list)
    # latents that replace those of the iteration; None: the scheduler's
    new: list[Tensor] | None = None

    def __call__(self, given: dict[str, Any], real: Callable[[], Any]) -> Any:
        if self.on_raw is not None:
            self.on_raw(given)
        is_update = self.pattern.updates[self.at]
        last = self.at == len(self.pattern.updates) - 1
        self.at = 0 if last else self.at + 1
        if not is_update:
            return real()
        place = len(self.seen)
        self.seen.append(given)
        if last and self.on_step is not None:
            joined = [self.pattern.join([s[k] for s in self.seen]) for k in _TENSORS]
            self.on_step(joined[0], given["timestep"], joined[1])
        if place == 0:
            state = self.following() if self.following is not None else None
            self.new = None if state is None else self.pattern.split(state)
        new = None if self.new is None else self._like(given["sample"], self.new[place])
        result = self._result(given, real, new)
        if last:
            self.seen.clear()
            if self.on_done is not None:
                self.on_done(self.pattern.join(self.results))
            self.results.clear()
        return result

    def _like(self, sample: Tensor, new: Tensor) -> Tensor:
        return new.to(sample.device, new.dtype if self.exact else sample.dtype, copy=True)

    def _result(self, given: dict[str, Any], real: Callable[[], Any], new: Tensor | None) -> Any:
        """Return the result of step, with the latents replaced by new."""
        if self.skip:
            moved = given["sample"] if new is None else new
            as_tuple = given.get("return_dict") is False
            both = {"prev_sample": moved, "pred_original_sample": moved}
            return tuple(both.values()) if as_tuple else SimpleNamespace(**both)
        # call it in any case, so that step counters and multistep buffers stay valid
        result = real()
        as_tuple = isinstance(result, tuple) and type(result) is tuple
        moved = result[0] if as_tuple else result.prev_sample
        self.results.append(moved if new is None else new)
        if new is None:
            return result
        if as_tuple:
            # where a run ends at the estimate of its clean latents, loops may decode that one
            return (new, *(new if _is(other, moved) else other for other in result[1:]))
        result.prev_sample = new
        return result


_TENSORS = ("model_output", "sample")


def _is(other: Any, latents: Tensor) -> bool:
    """Whether a further result of step is the latents once more."""
    alike = isinstance(other, Tensor) and other.dtype == latents.dtype
    return alike and torch.equal(other, latents)


@contextlib.contextmanager
def patched_scheduler(
    scheduler: Any, stepper: Stepper, on_times: Callable | None
) -> Iterator[None]:
    """Route step of this scheduler, and of copies of it, through stepper; on_times(scheduler) runs
    after each set_timesteps.

    The class itself is patched, not replaced: some pipelines check a scheduler's type. Schedulers
    of that class that belong to others work as before.
    """
    # pipelines copy their scheduler: copies carry the mark, other schedulers do not
    cls, mark = type(scheduler), uuid.uuid4().hex
    signature = inspect.signature(cls.step)
    real_step, real_times = cls.step, cls.set_timesteps

    @functools.wraps(real_step)
    def step(self, *args, **kwargs):
        if self.__dict__.get("_recorded_by") != mark:
            return real_step(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        return stepper(given, lambda: real_step(self, *args, **kwargs))

    @functools.wraps(real_times)
    def set_timesteps(self, *args, **kwargs):
        result = real_times(self, *args, **kwargs)
        if on_times is not None and self.__dict__.get("_recorded_by") == mark:
            on_times(self)
        return result

    in_class = replaced(cls, step=step, set_timesteps=set_timesteps)
    with in_class, replaced(scheduler, _recorded_by=mark):
        yield
