"""Run a pipeline with its denoisers and its scheduler's step under our control.

Nothing here infers anything. `Runner.run` calls the pipeline's own `__call__`; every denoiser call
goes through `on_call` and every iteration's scheduler steps through `on_step`, which may look,
answer in place of the network, replace the latents, or leave the loop by raising `Halt`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flowrl.policy.replaced import LOCK, replaced
from flowrl.policy.replay.blame import blaming
from flowrl.policy.replay.encoders import Answers
from flowrl.policy.replay.errors import Halt, UnreplayableError
from flowrl.policy.replay.items import PromptItem, is_media, is_text
from flowrl.policy.replay.prompt_cache import PromptCache
from flowrl.policy.replay.steps import StepPattern, Stepper, patched_scheduler
from flowrl.policy.replay.unread import plain
from flowrl.policy.weights.offload import Turns
from flowrl.policy.weights.waiting import Waiting
from flowrl.runtime.registry import did_you_mean
from flowrl.runtime.text import printable

LONGEST_TEXT = 65536  # most tokens of a prompt
SIZES = ("height", "width", "num_frames")
COUNTS = ("num_images_per_prompt", "num_videos_per_prompt")
MEANT = {
    "num_frames": ": it makes images, or videos of a length of its own",
    "image": ": it starts from the text alone",
    "video": ": it takes no video",
}
OURS = frozenset(  # arguments of the pipeline's call that flowrl gives
    {"self", "prompt", "num_inference_steps", "output_type", "return_dict", "latents", *COUNTS}
)


@dataclass
class DenoiserCall:
    """One recorded call of a denoiser."""

    module: str  # name of the component
    args: dict[str, Any]  # parameter name -> argument


@dataclass
class RecordedStep:
    """One iteration of the loop: its denoiser calls, and the arguments of its scheduler step."""

    calls: list[DenoiserCall]  # denoiser calls since the step before
    time: Tensor  # () fp64 model time, on the CPU
    sample: Tensor  # (P, *L) latents
    prediction: Tensor  # (P, *L) prediction that the scheduler gets


def prediction_of(output: Any, streams: int = 1) -> Tensor:
    """Return the prediction in a denoiser's output: the tensor itself, or the first of a tuple or
    ModelOutput; a list of tensors, one for each row, is stacked. streams: how many tensors are
    predictions; several are put side by side, (n, D)."""
    if _several(output, streams):
        return torch.cat([output[k].flatten(1) for k in range(streams)], 1)
    out = output if isinstance(output, Tensor) else output[0]
    if isinstance(out, list) and all(isinstance(row, Tensor) for row in out):
        return torch.stack(out)
    if not isinstance(out, Tensor):
        raise UnreplayableError(
            f"a denoiser returned {type(out).__name__} where a tensor was expected; only tensor"
            " predictions can be replayed"
        )
    return out


def _several(output: Any, streams: int) -> bool:
    """Whether a network has an output for each of several latents."""
    if streams < 2 or isinstance(output, Tensor) or len(output) < streams:
        return False
    return all(isinstance(output[k], Tensor) for k in range(streams))


def like_output(output: Any, tensor: Tensor, streams: int = 1) -> Any:
    """Replace the prediction in `output` by `tensor`, which may have any number of rows."""
    if isinstance(output, Tensor):
        return tensor
    if _several(output, streams):
        old = [output[k] for k in range(streams)]
        sizes = [part[0].numel() for part in old]
        made = [
            part.reshape(-1, *like.shape[1:])
            for part, like in zip(tensor.split(sizes, 1), old, strict=True)
        ]
    else:
        made = [list(tensor) if isinstance(output[0], list) else tensor]
    if isinstance(output, tuple) and type(output) is tuple:
        return (*made, *output[len(made) :])
    names = list(output.keys())
    return type(output)(**dict(zip(names, made, strict=False)))


def by_name(signature: inspect.Signature, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Map parameter names to the arguments of a call, with **kwargs flattened into them."""
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for name, p in signature.parameters.items():
        if p.kind is p.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How prompts are encoded (model.encoders, model.offload, model.prompt_cache)."""

    leave: bool = False  # text encoders are on the device only while a prompt is new
    offload: bool = False  # denoisers leave the device while text encoders are there
    # answers of text encoders on disk; None: they are not stored
    cache: PromptCache | None = None


def denoisers_of(pipe: Any, hints: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Find the networks of a pipeline's loop by component name; a hint may name them."""
    own = type(pipe).__name__
    if getattr(pipe, "scheduler", None) is None:
        raise UnreplayableError(
            f'{own} has no component named "scheduler", whose step ends each iteration; a loop that'
            " moves its latents itself cannot be replayed"
        )
    parts = {k: v for k, v in pipe.components.items() if isinstance(v, nn.Module)}
    usual = [
        name
        for name in parts
        if name.startswith(("transformer", "unet")) or name.endswith("_transformer")
    ]
    names = hints.get("denoisers") or usual
    if not names:
        raise UnreplayableError(
            f"{own} has no component named transformer* or unet*; name its networks, among"
            f" {', '.join(parts)}, with hints (model.hints) denoisers=[...]"
        )
    for name in names:
        if name not in parts:
            near = did_you_mean(str(name), parts)
            raise ValueError(f'hint denoisers: {own} has no network "{name}"{near}')
    return {name: parts[name] for name in names}


class Runner:
    """A pipeline, its call arguments, and the names of its denoisers.

    form: how the pipeline is asked for several rows: "batch" a list of prompts; "copies" one prompt
    and num_images_per_prompt; "repeated" a prompt several times and its conditions once; "lists"
    both several times; "alone" not at all. Except for "batch", the rows of a run are copies of one
    item: prompts are bound one at a time.
    """

    def __init__(
        self,
        pipe: Any,
        kwargs: dict[str, Any],
        hints: dict[str, Any],
        encoding: Encoding | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        self.pipe, self.hints = pipe, hints
        call = type(pipe).__call__
        self.parameters = inspect.signature(call).parameters
        self.given = frozenset(kwargs)
        kwargs = self._checked(kwargs)
        # conditions of all items that have none of their own
        self.always = {k: v for k, v in kwargs.items() if is_media(v)}
        self.kwargs = {k: v for k, v in kwargs.items() if k not in self.always}
        self.undecorated = getattr(call, "__wrapped__", call)  # the call without its torch.no_grad
        self.denoisers = denoisers_of(pipe, hints)
        # attention of the networks as it was given; empty once a loop has been seen to keep it
        self.attention = {k: _attention(net) for k, net in self.denoisers.items()}
        encoding = encoding or Encoding()
        self.answers = Answers(encoding.cache)
        first = next(next(iter(self.denoisers.values())).parameters()).device
        self.turns = Turns(waiting.device if waiting else first, waiting)
        self.apart = encoding.leave and encoding.offload
        if encoding.leave:
            self.turns.send_encoders(self._text_encoders())
        if self.apart:
            self.turns.send_denoisers(self.denoisers)
        self.form = "batch"
        self.pattern = StepPattern()
        # components that are switched off: they are not part of the policy, and not differentiable
        self.off: tuple[str, ...] = ("safety_checker", "watermark")
        # extra prompts that fix the text length; their rows are dropped
        self.pad: tuple[PromptItem, ...] = ()

    def with_arguments(self, given: dict[str, Any]) -> Runner:
        """Make a runner of the same pipeline with other arguments of its call."""
        other = copy.copy(self)
        other.given = self.given | given.keys()
        other.kwargs = self._checked({**self.kwargs, **given})
        other.form, other.pattern, other.pad = "batch", StepPattern(), ()
        return other

    @property
    def device(self) -> torch.device:
        """The device on which the pipeline computes."""
        if self.turns.used:
            return self.turns.device
        return next(next(iter(self.denoisers.values())).parameters()).device

    @property
    def single(self) -> bool:
        """Whether a run takes one item, or copies of it."""
        return self.form != "batch"

    def _text_encoders(self) -> list[nn.Module]:
        """List the networks of transformers beside the denoisers; none -> ValueError."""
        others = (v for k, v in self.pipe.components.items() if k not in self.denoisers)
        if found := [network for network in others if isinstance(network, PreTrainedModel)]:
            return found
        raise ValueError(
            f"model.encoders=leave: {type(self.pipe).__name__} has no text encoder that could leave"
            " the device; use model.encoders=stay"
        )

    def check_names(self, names: Iterable[str]) -> None:
        """ValueError if the pipeline's call takes no such argument, or flowrl gives it."""
        unknown = sorted(set(names) - (set(self.parameters) - OURS))
        if unknown:
            name = unknown[0]
            taken = [k for k in self.parameters if k not in OURS and not k.startswith("callback")]
            more = MEANT.get(name) or did_you_mean(name, taken)
            if name in ("guidance_scale", "true_cfg_scale") and hasattr(self.pipe, "guider"):
                more = ": its guider has the scale; use guidance= (sampler.guidance in a config)"
            raise ValueError(
                f"{type(self.pipe).__name__} takes no argument {printable(repr(name))}"
                f"{', which flowrl gives' if name in OURS else more}"
            )

    def unlike_asked(self, size: Sequence[int]) -> str | None:
        """Write a sentence about media of (height, width) = size if another size was asked for;
        None if not. Pipelines round sizes, and some ignore one that is given without the other."""
        made = tuple(size)
        chosen = tuple(self.kwargs.get(side) or own for side, own in zip(SIZES, made, strict=False))
        if chosen == made:
            return None
        wanted, given = (" x ".join(map(str, sides)) for sides in (chosen, made))
        return f"the pipeline makes {given} (height x width), and was asked for {wanted}"

    def _checked(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Refuse arguments that the pipeline does not take; switch true CFG on if the pipeline's
        default scale asks for it."""
        self.check_names(kwargs)
        scale = self.parameters.get("true_cfg_scale")
        wanted = kwargs.get("true_cfg_scale", scale.default if scale else 1.0)
        if scale is not None and not isinstance(wanted, int | float):
            raise ValueError(f"true_cfg_scale={printable(repr(wanted))} should be a number")
        for name in SIZES:
            size = kwargs.get(name)
            if name in self.parameters and size is not None and (type(size) is not int or size < 1):
                raise ValueError(f"{name}={printable(repr(size))} should be a whole number from 1")
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
        self, items: Sequence[PromptItem], steps: int, output_type: str, **extra: Any
    ) -> dict[str, Any]:
        """Make the keyword arguments of one call; texts become lists, an entry for each prompt."""
        out: dict[str, Any] = {
            "num_inference_steps": steps,
            "output_type": output_type,
            "return_dict": False,
            **extra,
        }
        prompts = [item.prompt for item in items]
        alone = self.form in ("copies", "alone")
        if "prompt" in self.parameters:
            out["prompt"] = prompts[0] if alone else prompts
        for key, value in self.kwargs.items():
            repeated = is_text(key) and isinstance(value, str) and not alone
            out[key] = [value] * len(prompts) if repeated else value
        if count := self.count:
            out[count] = len(items) if self.form == "copies" else 1
        given = self.conditions_of(items)
        for key in given[0]:
            each = [own[key] for own in given]
            listed = self.form == "lists" or (is_text(key) and not alone)
            out[key] = [copied(v) for v in each] if listed else copied(each[0])
        if "generator" in self.parameters:
            out.setdefault("generator", torch.Generator(self.device).manual_seed(0))
        return out

    def conditions_of(self, items: Sequence[PromptItem]) -> list[dict[str, Any]]:
        """Return the conditions of each item, with those of all items that have none of their own;
        ValueError if their names differ, because the networks get all of them in one call."""
        given = [{**self.always, **item.conditions} for item in items]
        for own in given[1:]:
            if other := sorted(own.keys() ^ given[0].keys()):
                raise ValueError(
                    f"some of these prompts have the condition {other[0]} and others have not; give"
                    " it to all or to none"
                )
        return given

    @property
    def streams(self) -> int:
        """Count the latents that each iteration moves."""
        return max(1, len(self.pattern.shapes))

    @property
    def count(self) -> str | None:
        """Name the argument that asks for several media of one prompt."""
        return next((name for name in COUNTS if name in self.parameters), None)

    def run(
        self,
        items: Sequence[PromptItem],
        steps: int,
        *,
        on_call: Callable | None = None,
        on_step: Callable[[Tensor, Any, Tensor], None] | None = None,
        following: Callable[[], Tensor | None] | None = None,
        on_done: Callable[[Tensor], None] | None = None,
        on_times: Callable | None = None,
        on_raw: Callable[[dict[str, Any]], None] | None = None,
        output_type: str = "latent",
        grad: bool = False,
        skip_step: bool = False,
        exact: bool = False,
        unseen: Callable[[], bool] | None = None,
        doing: str = "",
        **extra: Any,
    ) -> Any:
        """Run the pipeline -> its first output, or None after Halt.

        on_call(name, args, real) -> output. on_step(prediction, time, sample) sees each iteration's
        step; following() -> the latents with which the loop goes on, or None to keep the
        scheduler's, which on_done(result) sees. on_times(scheduler) runs after each set_timesteps;
        on_raw sees the arguments of every call to step. grad: keep the autograd graph. skip_step:
        following replaces the scheduler's own step. exact: the latents of following keep their
        type. unseen() -> whether nobody looks at what the denoisers are given now, so that networks
        beside them (ControlNet) need not compute it. doing: purpose of the run, for errors;
        default: to record a call. Encoders answer equal calls from memory.
        """
        given = self.arguments(items, steps, output_type, **extra)

        def called(*of: Any) -> Any:
            # the loop has begun, where encoders see other arguments each time
            self.answers.paused, self.answers.unseen = True, unseen
            self._check_attention(of[0])
            return on_call(*of) if on_call else of[-1]()

        networks = {k: v for k, v in self.pipe.components.items() if isinstance(v, nn.Module)}
        encoders = {k: v for k, v in networks.items() if k not in self.denoisers}
        stepper = Stepper(self.pattern, on_step, following, on_done, on_raw, skip_step, exact)
        running = self.turns.running(self.pipe, instead=self.apart and not grad)
        with LOCK, self._quiet(), running, contextlib.ExitStack() as stack:
            self.answers.paused, self.answers.unseen = False, None
            for name, module in self.denoisers.items():
                stack.enter_context(_recorded(name, module, called))
            stack.enter_context(self.answers.of(encoders))
            stack.enter_context(patched_scheduler(self.pipe.scheduler, stepper, on_times))
            stack.enter_context(torch.set_grad_enabled(grad))
            # what a pipeline draws without its generator is the same in every run, too
            stack.enter_context(torch.random.fork_rng(self._gpus()))
            torch.manual_seed(0)
            named = {**self.kwargs, **self.always, **items[0].conditions}
            doing = doing or f"while a call with steps={steps} is recorded"
            stack.enter_context(blaming(self.pipe, named, doing))
            try:
                return self.undecorated(self.pipe, **given)[0]
            except Halt:
                return None

    def _gpus(self) -> list[torch.device]:
        """List the GPU on which the pipeline computes, if it is one of this machine."""
        there = self.device.type == "cuda" and torch.cuda.is_available()
        return [self.device] if there else []

    def _check_attention(self, name: str) -> None:
        """UnreplayableError if the loop gives a network another attention than it has outside:
        perturbed attention acts on branches of guidance by their places in the batch."""
        if self.attention.get(name) not in (None, _attention(self.denoisers[name])):
            raise UnreplayableError(
                f"{type(self.pipe).__name__} changes the attention of its {name} for its loop"
                " (perturbed attention guidance), which a replayed call cannot; use the pipeline"
                " without it"
            )
        self.attention.pop(name, None)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Inside, no progress bar and no warning of truncation or of the pipeline's old lines is
        shown, and parts in `off` are None."""
        from diffusers.utils import logging

        pipe, level = self.pipe, logging.get_verbosity()
        bar = dict(getattr(pipe, "_progress_bar_config", {}))
        extras = {k: getattr(pipe, k, None) for k in self.off}
        extras = {k: v for k, v in extras.items() if v is not None}
        pipe.set_progress_bar_config(**{**bar, "disable": True})
        # modular pipelines log the tracebacks of errors, which we get as well
        logging.set_verbosity(logging.CRITICAL)
        for k in extras:
            setattr(pipe, k, None)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                yield
        finally:
            pipe._progress_bar_config = bar
            logging.set_verbosity(level)
            for k, v in extras.items():
                setattr(pipe, k, v)


def _attention(network: nn.Module) -> dict[str, Any]:
    """Return the attention processors of a network of diffusers by name."""
    return dict(getattr(network, "attn_processors", {}))


def copied(value: Any) -> Any:
    """Copy a list, because some pipelines edit the caller's."""
    return list(value) if isinstance(value, list) else value


def _recorded(name: str, module: nn.Module, on_call: Callable) -> AbstractContextManager[None]:
    """Route module.forward through on_call, on the instance: a hook cannot suppress the call."""
    real = module.forward
    signature = inspect.signature(real)

    @functools.wraps(real)  # wraps, because pipelines read its signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        # networks take plain tensors, so read the answers of encoders
        args, kwargs = plain((args, kwargs))
        return on_call(name, by_name(signature, args, kwargs), lambda: real(*args, **kwargs))

    return replaced(module, forward=forward)
