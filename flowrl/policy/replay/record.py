"""Run a pipeline with its denoisers and its scheduler's step under our control.

Nothing here infers anything. `Runner.run` calls the pipeline's own `__call__`; every denoiser call
goes through `on_call` and every scheduler step through `on_step`, which may look, answer in place
of the network, replace the latents, or leave the loop by raising `Halt`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.runtime.memory import ran_out
from flowrl.runtime.text import printable

LONGEST_TEXT = 65536  # tokens of a prompt
OURS = frozenset(  # arguments of the pipeline's call that flowrl gives
    {"self", "prompt", "num_inference_steps", "output_type", "return_dict", "latents"}
)
_LOCK = threading.RLock()  # patches live on shared objects: one recording at a time


class UnreplayableError(ValueError):
    """The pipeline's loop is not a function of (x, sigma, prompt rows) that can be inferred; the
    sentence names the inference that failed."""


class Halt(BaseException):
    """Raised by a callback to leave the loop. Not an Exception: pipelines must not catch it."""


@dataclass
class Call:
    """One denoiser call: component name and arguments by parameter name."""

    module: str
    args: dict[str, Any]


@dataclass
class Iteration:
    """The denoiser calls up to one scheduler step, the model time and latents of that step, and the
    prediction given to it."""

    calls: list[Call]
    time: Tensor  # () fp64, on the CPU
    sample: Tensor  # (P, *L)
    prediction: Tensor  # (P, *L)


def first_tensor(output: Any) -> Tensor:
    """The prediction in what a denoiser returns: a tensor, a tuple or a ModelOutput."""
    out = output if isinstance(output, Tensor) else output[0]
    if not isinstance(out, Tensor):
        raise UnreplayableError(
            f"a denoiser returned {type(out).__name__} where a tensor was expected; only tensor"
            " predictions can be replayed"
        )
    return out


def like_output(output: Any, tensor: Tensor) -> Any:
    """`output` with its prediction replaced by `tensor`; other entries are dropped."""
    if isinstance(output, Tensor):
        return tensor
    if isinstance(output, tuple) and type(output) is tuple:
        return (tensor,)
    return type(output)(**{next(iter(output.keys())): tensor})


def by_name(signature: inspect.Signature, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments of a call by parameter name, **kwargs flattened into them."""
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for name, p in signature.parameters.items():
        if p.kind is p.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


class Runner:
    """A pipeline, its call arguments, and the names of its denoisers."""

    def __init__(self, pipe: Any, kwargs: dict[str, Any], hints: dict[str, Any]) -> None:
        self.pipe, self.hints = pipe, hints
        call = type(pipe).__call__
        self.parameters = inspect.signature(call).parameters
        self.kwargs = self._checked(kwargs)
        self.undecorated = getattr(call, "__wrapped__", call)  # without torch.no_grad
        self.denoisers = self._denoisers()
        # extra prompts that fix the text length; their rows are dropped
        self.pad: tuple[str, ...] = ()

    def _denoisers(self) -> dict[str, nn.Module]:
        """The networks of the loop by component name; a hint may name them."""
        parts = {k: v for k, v in self.pipe.components.items() if isinstance(v, nn.Module)}
        usual = [name for name in parts if name.startswith(("transformer", "unet"))]
        names = self.hints.get("denoisers") or usual
        if not names:
            raise UnreplayableError(
                f"{type(self.pipe).__name__} has no component named transformer* or unet*; name"
                " them with hints denoisers=[...]"
            )
        return {name: parts[name] for name in names}

    def _checked(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Refuse arguments that the pipeline does not take; switch true CFG on where the pipeline's
        default scale asks for it."""
        unknown = sorted(set(kwargs) - (set(self.parameters) - OURS))
        if unknown:
            raise ValueError(
                f"{type(self.pipe).__name__} takes no argument {printable(repr(unknown[0]))}"
                f"{', which flowrl gives' * (unknown[0] in OURS)}; it takes "
                + ", ".join(name for name in self.parameters if name not in OURS)
            )
        scale = self.parameters.get("true_cfg_scale")
        wanted = kwargs.get("true_cfg_scale", scale.default if scale else 1.0)
        if scale is not None and not isinstance(wanted, int | float):
            raise ValueError(f"true_cfg_scale={printable(repr(wanted))} should be a number")
        length = kwargs.get("max_sequence_length", 1)
        if type(length) is not int or not 0 < length <= LONGEST_TEXT:
            raise ValueError(
                f"max_sequence_length={printable(repr(length))} should be a whole number from 1 to"
                f" {LONGEST_TEXT}"
            )
        if scale is not None and wanted > 1 and kwargs.get("negative_prompt") is None:
            kwargs = {**kwargs, "negative_prompt": " "}
        return kwargs

    def arguments(
        self, prompts: list[str], steps: int, output_type: str, **extra: Any
    ) -> dict[str, Any]:
        """Keyword arguments of one call; text arguments become one entry a prompt."""
        out: dict[str, Any] = {
            "prompt": list(prompts),
            "num_inference_steps": steps,
            "output_type": output_type,
            "return_dict": False,
            **extra,
        }
        for key, value in self.kwargs.items():
            repeated = key.startswith("negative_prompt") and isinstance(value, str)
            out[key] = [value] * len(prompts) if repeated else value
        if "generator" in self.parameters:
            device = next(next(iter(self.denoisers.values())).parameters()).device
            out.setdefault("generator", torch.Generator(device).manual_seed(0))
        return out

    def run(
        self,
        prompts: list[str],
        steps: int,
        *,
        on_call: Callable | None = None,
        on_step: Callable | None = None,
        on_times: Callable | None = None,
        output_type: str = "latent",
        grad: bool = False,
        skip_step: bool = False,
        **extra: Any,
    ) -> Any:
        """The pipeline's first output, or None after Halt.

        on_call(name, args, real) -> output. on_step(prediction, time, sample) -> latents to go on
        with, or None to keep the scheduler's. on_times(scheduler) runs after each set_timesteps.
        grad: keep the autograd graph. skip_step: on_step replaces the scheduler's own step.
        """
        given = self.arguments(prompts, steps, output_type, **extra)
        with _LOCK, self._quiet(), contextlib.ExitStack() as stack:
            for name, module in self.denoisers.items():
                stack.enter_context(_patched_forward(name, module, on_call))
            scheduler = self.pipe.scheduler
            stack.enter_context(_patched_scheduler(scheduler, on_step, on_times, skip_step))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(blaming(self.pipe, self.kwargs, but=UnreplayableError))
            try:
                return self.undecorated(self.pipe, **given)[0]
            except Halt:
                return None

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """No progress bar and no truncation warnings; no safety checker or watermark: they are not
        part of the policy and not differentiable."""
        from diffusers.utils import logging

        pipe, level = self.pipe, logging.get_verbosity()
        bar = dict(getattr(pipe, "_progress_bar_config", {}))
        extras = {k: getattr(pipe, k, None) for k in ("safety_checker", "watermark")}
        extras = {k: v for k, v in extras.items() if v is not None}
        pipe.set_progress_bar_config(**{**bar, "disable": True})
        logging.set_verbosity_error()
        for k in extras:
            setattr(pipe, k, None)
        try:
            yield
        finally:
            pipe._progress_bar_config = bar
            logging.set_verbosity(level)
            for k, v in extras.items():
                setattr(pipe, k, v)


@contextlib.contextmanager
def blaming(pipe: Any, kwargs: Mapping[str, Any], *, but: type[ValueError]) -> Iterator[None]:
    """An error inside, other than `but`, becomes a ValueError that names the arguments of the call,
    if the user chose any."""
    try:
        yield
    except Exception as error:
        if isinstance(error, but) or ran_out(error) or not kwargs:
            raise
        given = printable(", ".join(f"{k}={v!r}" for k, v in kwargs.items()))
        raise ValueError(
            f"{type(pipe).__name__} fails with the arguments {given}: {type(error).__name__}:"
            f" {printable(error)}; correct or leave out what model.pipeline gives it"
        ) from error


@contextlib.contextmanager
def _patched_forward(name: str, module: nn.Module, on_call: Callable | None) -> Iterator[None]:
    """Route module.forward through on_call, on the instance: a hook cannot suppress the call."""
    had, real = module.__dict__.get("forward"), module.forward
    signature = inspect.signature(real)
    if on_call is not None:
        module.forward = lambda *args, **kwargs: on_call(
            name, by_name(signature, args, kwargs), lambda: real(*args, **kwargs)
        )
    try:
        yield
    finally:
        module.__dict__.pop("forward", None)
        if had is not None:
            module.forward = had


@contextlib.contextmanager
def _patched_scheduler(
    scheduler: Any, on_step: Callable | None, on_times: Callable | None, skip_step: bool
) -> Iterator[None]:
    """Swap the scheduler's class for a throw-away subclass; copies of the scheduler stay patched,
    its signatures stay readable."""
    cls = type(scheduler)
    signature = inspect.signature(cls.step)

    @functools.wraps(cls.step)
    def step(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        new = None
        if on_step is not None:
            new = on_step(given["model_output"], given["timestep"], given["sample"])
        if skip_step:
            as_tuple = given.get("return_dict") is False
            return (new,) if as_tuple else SimpleNamespace(prev_sample=new)
        result = cls.step(self, *args, **kwargs)  # step counters and multistep buffers stay valid
        if new is None:
            return result
        if isinstance(result, tuple) and type(result) is tuple:
            return (new, *result[1:])
        result.prev_sample = new
        return result

    @functools.wraps(cls.set_timesteps)
    def set_timesteps(self, *args, **kwargs):
        result = cls.set_timesteps(self, *args, **kwargs)
        if on_times is not None:
            on_times(self)
        return result

    scheduler.__class__ = type(cls.__name__, (cls,), {"step": step, "set_timesteps": set_timesteps})
    try:
        yield
    finally:
        scheduler.__class__ = cls


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """owner.name = value on the instance, inside the block only."""
    with _LOCK:
        had = owner.__dict__.get(name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            delattr(owner, name)
            if had is not None:
                setattr(owner, name, had)
