"""Run a pipeline on stubs: we choose its networks' outputs, and its latents after each step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.arguments import map_tensors
from flowrl.policy.replay.coords import Coords, Schedule
from flowrl.policy.replay.errors import Halt, TooFewSteps, Unknown, UnreplayableError
from flowrl.policy.replay.items import PromptItem, altered, is_media
from flowrl.policy.replay.noise import StartMap, start_map
from flowrl.policy.replay.record import (
    DenoiserCall,
    RecordedStep,
    Runner,
    like_output,
    prediction_of,
)
from flowrl.policy.replay.steps import StepPattern, read_pattern
from flowrl.runtime.memory import ran_out

RECORD = ["a red circle", "two blue squares left of a green triangle"]
SCANNED = 3  # number of iterations from which the pattern of scheduler steps is read
MANY = 64  # number of steps of a recorded call if the loop makes few of the requested steps
Key = tuple[str, int]  # (component, n-th call to it within an iteration)


@dataclass(eq=False)
class Copies:
    """Clones of recorded tensors, one for each version of a tensor: a loop may edit its own in
    place."""

    # id -> (source, version, clone); the source is kept, or another tensor could get its id
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
    """Callbacks of one run: they answer networks and scheduler, and record the calls."""

    templates: dict[Key, tuple[Any, int]]  # answers by call, see Prober
    rows: int  # number of rows of the run, with those that fix the text length
    streams: int  # number of latents that an iteration moves
    # iteration -> latents with which the loop goes on; None: its own
    latents: Callable[[int], Tensor] | None
    # (key, shape) -> answer in place of a network, see Prober.run; None: noise
    outputs: Callable[[Key, tuple[int, ...]], Tensor] | None
    # (iteration, its record) -> whether the run ends after it; None: never
    stop: Callable[[int, RecordedStep], bool] | None
    real: Collection[int] = ()  # iterations in which the networks answer themselves
    done: list[RecordedStep] = field(default_factory=list)  # iterations so far
    calls: list[DenoiserCall] = field(default_factory=list)  # calls of the iteration in progress
    copied: Copies = field(default_factory=Copies)  # clones the recorded tensors
    moved: int = 0  # number of iterations whose latents were asked for

    def on_call(self, name: str, args: dict[str, Any], real: Callable[[], Any]) -> Any:
        key = (name, sum(call.module == name for call in self.calls))
        self.calls.append(DenoiserCall(name, map_tensors(self.copied, args)))
        if len(self.done) in self.real:
            return real()
        return stubbed(self.templates, key, self.rows, real, self.outputs, self.streams)

    def on_step(self, prediction: Tensor, time: Any, sample: Tensor) -> None:
        if not self.calls:
            raise UnreplayableError(
                "scheduler.step is called without a denoiser call before it, which cannot be"
                " replayed"
            )
        several = torch.as_tensor(time).detach().cpu().double().reshape(-1)  # one for each row
        at = several[0].clone()
        if not (several == at).all():
            raise UnreplayableError("scheduler.step is given rows of several times in one call")
        seen = RecordedStep(list(self.calls), at, self.copied(sample), self.copied(prediction))
        self.calls.clear()
        j = len(self.done)
        self.done.append(seen)
        if self.stop is not None and self.stop(j, seen):
            raise Halt

    def next_latents(self) -> Tensor | None:
        self.moved += 1
        return None if self.latents is None else self.latents(self.moved - 1)


def stubbed(
    templates: dict[Key, tuple[Any, int]],
    key: Key,
    rows: int,
    real: Callable[[], Any],
    outputs: Callable[[Key, tuple[int, ...]], Tensor] | None,
    streams: int,
) -> Any:
    """Make an answer in place of a network: noise, the same in each run, or outputs(key, shape). It
    has the form of the network's real output, for the rows of this run."""
    if key not in templates:
        templates[key] = (real(), rows)
    template, its_rows = templates[key]
    first = prediction_of(template, streams)
    shape = (first.shape[0] * rows // its_rows, *first.shape[1:])
    if outputs is None:  # noise, not ones: some loops divide by an output's variation
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(key[1]))
        value = noise.to(first.dtype)
    else:
        # fp32, so that the loop's operations on outputs are not rounded
        value = outputs(key, shape)
    return like_output(template, value.to(first.device, copy=True), streams)


def _shapes(call: DenoiserCall) -> list[tuple[int, ...]]:
    """List the shapes of the tensors that a network gets."""
    return [tuple(value.shape) for value in call.args.values() if isinstance(value, Tensor)]


def always(x: Tensor) -> Callable[[int], Tensor]:
    """Give the same latents after each iteration."""
    return lambda j: x


class Prober:
    """Runs a pipeline on stubs. example: conditions of one prompt, for the recording of the
    loop."""

    def __init__(self, runner: Runner, example: Mapping[str, Any] | None = None) -> None:
        self.runner = runner
        # call -> (its output in one real call, rows of that batch): the form of stubs' answers
        self.templates: dict[Key, tuple[Any, int]] = {}
        self.result: Any = None  # newest result of the pipeline's call; None after Halt
        self.shape: tuple[int, ...] = ()  # shape of one row of the state
        self.count = 2  # number of rows of a probing run
        self.begin = 0  # place in the scheduler's timesteps where the recorded loop starts
        self.example = example = dict(example or {})
        runner.check_names(example)
        media = {k: v for k, v in {**runner.always, **example}.items() if is_media(v)}
        other = {**example, **{k: altered(v) for k, v in media.items()}}
        # two items that differ in the prompt and in all conditions
        self.record = [PromptItem(RECORD[0], example), PromptItem(RECORD[1], other)]
        self.overlong = PromptItem(" ".join(["word"] * (self.longest + 8)), example)
        self.steps = 8  # number of steps of the recorded calls
        try:
            self._settle(bool(media))
        except TooFewSteps:
            self.steps = MANY
            self._settle(bool(media))

    def rows(self, count: int) -> list[PromptItem]:
        """Make the items of a probing run: the record's two in turn, or copies of the first."""
        return [self.record[0 if self.runner.single else k % 2] for k in range(count)]

    @property
    def longest(self) -> int:
        """Count the tokens of the longest text that the pipeline says it takes."""
        default = self.runner.parameters.get("max_sequence_length")
        given = self.runner.kwargs.get("max_sequence_length")
        return int(given or (default and default.default) or 512)

    def apart(self, items: Sequence[PromptItem]) -> list[list[PromptItem]]:
        """Split items into one group for each run that they need."""
        return [[item] for item in items] if self.runner.single else [list(items)]

    # ---------------------------------------------------------------------------
    # the form in which this pipeline takes several rows

    def _settle(self, media: bool) -> None:
        """Find the runner's form and the steps of an iteration: the first form in which the loop
        holds as many latents as there are requested rows."""
        runner = self.runner
        prompted = "prompt" in runner.parameters
        together = prompted and not media and not runner.hints.get("apart")
        forms = ["batch"] if together else []
        forms += ["copies"] if runner.count else []
        forms += ["repeated", "lists"] if prompted else []
        first: Exception | None = None
        present = tuple(name for name in runner.off if getattr(runner.pipe, name, None) is not None)
        for form in [*forms, "alone"]:
            self.count = 1 if form == "alone" else 2
            for runner.off in dict.fromkeys(
                (present, ())
            ):  # some pipelines insist on their safety checker
                runner.form = form
                try:
                    if self._scanned():
                        return self._fix_text_length() if form == "batch" else None
                except Exception as error:
                    if isinstance(error, TooFewSteps) or ran_out(error):
                        raise
                    first = first or error
        if first is not None:
            raise first
        raise UnreplayableError(
            f"{type(runner.pipe).__name__}: a call for two media does not hold two latents in its"
            f" loop, {self.shape}"
        )

    def _scanned(self) -> bool:
        """Whether runs of two and three rows (of one, if there is no other form) hold as many
        latents; it also reads the step pattern."""
        alike = []
        self.templates.clear()
        for rows in sorted({self.count, min(3, 2 * self.count - 1)}):
            items = self.rows(rows)
            # the overlong prompt gives texts the length that later runs give them
            if not self.runner.single:
                items[-1] = self.overlong
            iterations = self._scan(items)
            self.runner.pattern = read_pattern(iterations, rows)
            shapes = [tuple(step["sample"].shape) for step in iterations[0]]
            alike.append(all(shape[0] == rows for shape in self._moved(shapes)))
            if not alike[-1]:
                break
        if all(alike):
            pattern: StepPattern = self.runner.pattern
            moved = self._moved(shapes)
            sizes = [torch.Size(shape[1:]).numel() for shape in moved]
            self.shape = moved[0][1:] if len(moved) == 1 else (sum(sizes),)
            assert len(pattern.updates) >= len(moved)
        return all(alike)

    def _fix_text_length(self) -> None:
        """Add one overlong and one short prompt to every run, if the text length follows the
        longest prompt of the batch: then there is one length, always masked.

        It does so if an encoder, or the denoisers, would get other shapes without the overlong
        prompt.
        """
        short, answers = self.record[0], self.runner.answers
        # the short prompt must be shorter than half of the longest text
        if self.longest < 2 * len(RECORD[0]):
            short = PromptItem("", short.conditions)
        pad = (self.overlong, short)
        answers.closed = True
        try:
            usual, long = (
                self.run(items, self.steps, stop=lambda j, it: True)[0]
                for items in (self.record, [self.record[0], self.overlong])
            )
        except Unknown:
            self.runner.pad = pad
            return
        finally:
            answers.closed = False
        if [_shapes(call) for call in usual.calls] != [_shapes(call) for call in long.calls]:
            self.runner.pad = pad

    def _moved(self, shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        updates = self.runner.pattern.updates
        return [shape for shape, moves in zip(shapes, updates, strict=True) if moves]

    def _scan(self, items: list[PromptItem]) -> list[list[dict[str, Any]]]:
        """Return the arguments of scheduler.step in each of the first iterations of a run."""
        found: list[list[dict[str, Any]]] = []
        calls: list[str] = []

        def on_call(name: str, args: dict[str, Any], real: Callable[[], Any]) -> Any:
            if not calls:  # a network call after a step begins the next iteration
                if len(found) == SCANNED:
                    raise Halt
                found.append([])
            calls.append(name)
            key = (name, calls.count(name) - 1)
            return stubbed(self.templates, key, len(items), real, None, 1)

        def on_raw(given: dict[str, Any]) -> None:
            calls.clear()
            if found:
                found[-1].append(map_tensors(lambda t: t.clone(), dict(given)))

        self.runner.pattern = StepPattern()
        self.runner.run(items, self.steps, on_call=on_call, on_raw=on_raw)
        whole = [steps for steps in found if steps]
        if len(whole) < SCANNED and self.steps < MANY:
            raise TooFewSteps(f"{len(whole)} iterations of {self.steps} steps")
        if not whole:
            raise UnreplayableError(
                f"{type(self.runner.pipe).__name__} never called scheduler.step after a denoiser:"
                " there is no loop to replay"
            )
        return whole

    # ---------------------------------------------------------------------------

    def run(
        self,
        items: Sequence[PromptItem],
        steps: int,
        *,
        latents: Callable[[int], Tensor] | None = None,
        outputs: Callable[[Key, tuple[int, ...]], Tensor] | None = None,
        stop: Callable[[int, RecordedStep], bool] | None = None,
        real: Collection[int] = (),
        pad: Sequence[PromptItem] | None = None,
        output_type: str = "latent",
        unseen: bool = False,
        **how: Any,
    ) -> list[RecordedStep]:
        """Run the pipeline on stubs -> its iterations; self.result is the result of the call.

        After iteration j the loop goes on with latents(j). outputs(key, shape) answers a network
        (default: noise), but in the iterations `real` the networks do. stop(j, iteration) ends the
        run early. pad: items that fix the text length (default: runner.pad). unseen: the
        arguments of the networks are not looked at, but in the first iteration. how: further
        options of Runner.run.
        """
        # rows of the run: its items, and further ones whose only use is to give texts one length
        items = [*items, *(self.runner.pad if pad is None else pad)]
        answers = (latents, outputs, stop, real)
        stub = StubbedRun(self.templates, len(items), self.runner.streams, *answers)
        self.result = self.runner.run(
            items,
            steps,
            on_call=stub.on_call,
            on_step=stub.on_step,
            following=stub.next_latents,
            output_type=output_type,
            unseen=(lambda: len(stub.done) not in stub.real) if unseen else None,
            **how,
        )
        if not stub.done:
            raise UnreplayableError(
                f"{type(self.runner.pipe).__name__} never called scheduler.step after a denoiser:"
                " there is no loop to replay"
            )
        return stub.done

    def schedule(
        self, steps: int, coords: Coords, **how: Any
    ) -> tuple[Schedule, list[RecordedStep]]:
        """Read sigmas and exact times from a stubbed run at the real number of steps and
        resolution, so that dynamic shifts are included -> (they, the run). how: options of run."""
        iterations = self.run(self.rows(self.count), steps, **how)
        times = torch.stack([it.time for it in iterations])
        sigmas = coords.sigmas_of(self.runner.pipe.scheduler, times)
        # PNDM repeats its second time
        keep = torch.cat([sigmas[:-1] > sigmas[1:], torch.tensor([True])])
        factor = self.start(self.record[0], steps).factor
        start = factor / coords.scale(sigmas[0]).item()
        return Schedule(sigmas=sigmas[keep], times=times[keep[:-1]], start=start), iterations

    def start(self, item: PromptItem, steps: int) -> StartMap:
        """Find how the loop's first latents follow its noise."""
        usual = float(getattr(self.runner.pipe.scheduler, "init_noise_sigma", 1.0))
        items = [item] if self.runner.single else [item, item]

        def first() -> Tensor:
            return self.run(items, steps, stop=lambda j, it: True)[0].sample[:1]

        return start_map(first, usual)
