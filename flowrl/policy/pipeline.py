"""A diffusers pipeline as a policy: its Replay, decoder and schedules behind one interface."""

from __future__ import annotations

import copy
import difflib
import dis
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flowrl.policy.lora_read as lora_read
import flowrl.policy.weights.lora as lora
from flowrl.policy.base import Policy
from flowrl.policy.check import SelfCheck, relative, self_check
from flowrl.policy.replay.arguments import Cond
from flowrl.policy.replay.bind import bind
from flowrl.policy.replay.blame import blaming
from flowrl.policy.replay.body import BodyReplay, body_replay
from flowrl.policy.replay.call import LastRows, Request
from flowrl.policy.replay.coords import Schedule
from flowrl.policy.replay.decode import (
    DECODING,
    Decoder,
    TailDecoder,
    infer_decoder,
    round_alike,
    tails,
)
from flowrl.policy.replay.describe import describe
from flowrl.policy.replay.embedded import embedded
from flowrl.policy.replay.errors import CallError, UnreplayableError
from flowrl.policy.replay.guidance import SAME_TEXT
from flowrl.policy.replay.hints import hints_for
from flowrl.policy.replay.infer import find_coords, infer
from flowrl.policy.replay.items import PromptItem, is_own, items_of
from flowrl.policy.replay.places import Places, unlike
from flowrl.policy.replay.probe import Prober
from flowrl.policy.replay.reach import Reader, cut, readers, surely_read
from flowrl.policy.replay.record import DenoiserCall, Encoding, Runner, denoisers_of, prediction_of
from flowrl.policy.replay.reentry import reenter
from flowrl.policy.text import Encodings, check_encoded, check_staying, text_encoders
from flowrl.policy.weights.merged import save_merged
from flowrl.policy.weights.parts import standing
from flowrl.policy.weights.waiting import Waiting
from flowrl.runtime.log import logger
from flowrl.runtime.memory import ran_out
from flowrl.runtime.text import printable
from flowrl.types import expand

LOOKED = 50_000  # most prompts whose length is looked at in one call


class PipelinePolicy(Policy):
    """A diffusers pipeline as a policy.

    adapter: options of the LoRA, the file of one, or None to train all weights. kwargs: arguments
    of the pipeline's own call, which hold for the policy's life. example: conditions of one prompt,
    for the recording of the loop. parts: names of the trained parts, "denoiser", "text_encoder" or
    both. encoding: how prompts are encoded. waiting: networks that wait in host memory to be split.
    """

    def __init__(
        self,
        pipe: Any,
        adapter: dict[str, Any] | Path | None,
        kwargs: dict[str, Any],
        example: Mapping[str, Any] | None = None,
        parts: Sequence[str] = ("denoiser",),
        encoding: Encoding | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        # find the trained parts, and make checks that need no run of the pipeline
        self.pipe, file = pipe, adapter
        if isinstance(adapter, Path):
            adapter, parts = lora_read.fitting(pipe, denoisers_of(pipe, hints_for(pipe)), adapter)
        text = text_encoders(pipe) if "text_encoder" in parts else {}
        if text:
            check_encoded([*kwargs, *(example or {})])
            check_staying(encoding or Encoding())
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval().requires_grad_(False)
                if hasattr(part, "peft_config"):
                    save_merged(part)
        # record the loop and infer its call
        self._schedules: dict[int, Schedule] = {}  # number of steps -> schedule
        self._readers: list[Reader] | None = None
        self._looked: set[str] = set()  # prompts whose length was looked at
        self._sized: dict[tuple[int | None, ...], Policy] = {}  # size -> policy, see `sized`
        runner = Runner(pipe, kwargs, hints_for(pipe), encoding, waiting)
        self.turns = runner.turns
        # random numbers drawn here must not change the first values of adapters
        with torch.random.fork_rng(), self.turns.running(pipe):
            self._infer(runner, example)
        # bring the weights back: adapters are made on the device of their layers
        self.turns.summon()
        # record calls to networks that came with adapters, and their outputs before ours are added
        calls = self._calls() if adapter is not None else []
        self.came = list(zip(calls, self._answered(calls), strict=True))
        trained = {**(runner.denoisers if "denoiser" in parts else {}), **text}
        super().__init__(runner.denoisers, adapter, self.replay.shape, trained, self.turns)
        if waiting is not None:
            waiting.bring_adapters()
        self.encodings: Encodings | None = None
        if text:
            self.encodings = Encodings(self.trainable, text, self._bind)
            self.encodings.check(self.prober.record[:1])
        # whether the loop starts from a noisy picture, below sigma 1
        self.late = self._picture(self.prober.record[0]) is not None
        if isinstance(self.replay, BodyReplay):
            self._check_body(self.replay.why)
        if isinstance(file, Path):
            self.load_lora(file)

    def _infer(self, runner: Runner, example: Mapping[str, Any] | None) -> None:
        self.prober = Prober(runner, example)
        self.coords = find_coords(self.prober)
        self.places = Places(self.prober, self.coords)
        try:
            self.replay, self.steps = infer(self.prober, self.coords)
        except UnreplayableError as error:
            if {"guidance", "boundary"} & set(runner.hints):
                raise
            self.replay, self.steps = body_replay(self.places, str(error))
        body = self.replay if isinstance(self.replay, BodyReplay) else None
        try:
            self._schedules[self.steps], _ = self._scheduled(self.steps)
        except UnreplayableError as error:
            raise UnreplayableError(f"{body.why}; {error}" if body else str(error)) from error
        self.replay.combine = self._combine
        self.decoder: Decoder | TailDecoder | partial[Tensor]
        if "decode" in runner.hints:
            self.decoder = partial(runner.hints["decode"], runner.pipe)
        else:
            self.decoder = infer_decoder(self.prober, self.steps, self.replay.shape)

    def sized(self, height: int | None = None, width: int | None = None) -> Policy:
        asked = {"height": height, "width": width}
        given = {side: size for side, size in asked.items() if size is not None}
        if not given:
            return self
        if (size := tuple(asked.values())) not in self._sized:
            other = copy.copy(self)
            other._schedules, other._rows, other._embedded = {}, LastRows(), None
            runner, example = self.prober.runner.with_arguments(given), self.prober.example
            try:
                with torch.random.fork_rng(), torch.no_grad(), self.turns.running(self.pipe):
                    other._infer(runner, example)
            except CallError as error:
                raise CallError(f"the size (eval.height, eval.width): {error}") from error
            self.turns.summon()
            other.latent_shape = tuple(other.replay.shape)
            if self.encodings:
                other.encodings = Encodings(self.trainable, self.encodings.modules, other._bind)
            if getattr(self.decoder, "dtype", None) != getattr(other.decoder, "dtype", None):
                other.narrow_decoder()
            self._sized[size] = other
        return self._sized[size]

    def _calls(self) -> list[DenoiserCall]:
        """Record a call to each network of the loop that came with adapters."""
        own = self.prober.runner.denoisers
        adapted = [name for name, network in own.items() if standing([network])]
        iterations = self.prober.run(self.prober.rows(1), self.steps) if adapted else []
        calls = {call.module: call for it in iterations for call in it.calls}
        return [calls[name] for name in adapted if name in calls]

    def _answered(self, calls: Iterable[DenoiserCall]) -> list[Tensor]:
        runner = self.prober.runner
        with torch.no_grad(), self.turns.running(self.pipe):
            each = [runner.denoisers[call.module](**call.args) for call in calls]
        return [prediction_of(output, runner.streams).float() for output in each]

    def untouched(self) -> float | None:
        """Return the relative error of networks that came with adapters, without the trained
        parts, against their outputs before; None if no network came with adapters."""
        if not self.came:
            return None
        with self.view("reference"):
            now = self._answered(call for call, _ in self.came)
        return max(map(relative, now, (was for _, was in self.came)))

    def _check_body(self, why: str) -> None:
        """Raise `why`, the sentence about what could not be inferred, if the self-check of the
        loop's own body fails as well."""
        try:
            self.self_check()
        except UnreplayableError as error:
            raise UnreplayableError(why) from error

    def branches(self, guidance: float | str) -> int:
        if isinstance(self.replay, BodyReplay):
            self.replay.check(guidance)
            return self.replay.branches
        return max(regime.guidance.branches(guidance) for regime in self.replay.regimes)

    def encode(
        self, prompts: list[str], conditions: Sequence[Mapping[str, Any]] | None = None
    ) -> Cond:
        items = items_of(prompts, conditions)
        for item in items:
            self._check_own(item.conditions)
        # bind takes some prompts one by one, so check here that all have the same conditions
        self.prober.runner.conditions_of(items)
        with self.turns.running(self.pipe, instead=True):
            cond = self.encodings.new(items) if self.encodings else self._bind(items)
            if self.late:
                cond.starts = torch.stack([self._picture(item) for item in items]).to(self.device)
            if isinstance(self.decoder, Decoder) and self.decoder.own:
                cond.tails = tails(self.prober, self.steps, self.decoder, items)
        return cond

    def _bind(self, items: Sequence[PromptItem], grad: bool = False) -> Cond:
        return bind(self.prober, self.replay, self.steps, items, grad=grad)

    def _check_own(self, conditions: Mapping[str, Any]) -> None:
        """ValueError for conditions that the pipeline's call does not take, and for a guidance
        scale, which belongs to the sampler."""
        if self.encodings:
            check_encoded(conditions)
        parameters = self.prober.runner.parameters
        self.prober.runner.check_names(conditions)
        mixed = "true_cfg_scale" if "true_cfg_scale" in parameters else "guidance_scale"
        if mixed in conditions and self.branches("pipeline") > 1:
            raise ValueError(
                f"{mixed} is one for all prompts: the sampler combines the branches; use"
                " guidance= (sampler.guidance in a config)"
            )

    def unread(self, guidances: Sequence[float | str], names: Iterable[str] = ()) -> list[str]:
        runner = self.prober.runner
        given = sorted({*runner.given, *names} & set(runner.parameters))
        if hasattr(self.pipe, "reads"):  # a modular pipeline
            read = self.pipe.reads({"prompt", *given})
        else:
            code = dis.get_instructions(runner.undecorated)
            loaded = [i.argval for i in code if "LOAD" in i.opname]
            read = {n for own in loaded for n in (own if isinstance(own, tuple) else (own,))}
        sentences = [
            f"{name} has no effect: the call of {self.replay.pipeline} never reads it"
            for name in given
            if name not in read
        ]
        alike = any(regime.guidance.alike for regime in self.replay.regimes)
        if alike and "pipeline" in guidances:
            sentences.append(f"the pipeline's own guidance {SAME_TEXT}")
        negative = [name for name in given if name.startswith("neg") and name in read]
        if negative and all(self.branches(guidance) == 1 for guidance in guidances):
            how = " and ".join(dict.fromkeys(map(str, guidances)))
            sentences.append(
                f"{', '.join(negative)} has no effect: with guidance {how} the network is asked for"
                " the prompt alone; set a guidance above 1"
            )
        return sentences

    def check_columns(self, names: Iterable[str]) -> None:
        """ValueError if the name of a column of prompts looks like a misspelt condition."""
        taken = [name for name in self.prober.runner.parameters if is_own(name)]
        for name in names:
            near = difflib.get_close_matches(name.strip().lower(), taken, 1, cutoff=0.8)
            if near and name not in taken:
                raise ValueError(
                    f'the prompts have "{printable(name, 60)}", which is no argument of'
                    f' {self.replay.pipeline}; "{near[0]}" is one: rename it, or leave it out'
                )

    def say_cut(self, prompts: Iterable[str | None]) -> None:
        new = [p for p in dict.fromkeys(prompts) if p and p not in self._looked][:LOOKED]
        self._looked.update(new)
        if surely_read(self.prober, new):
            return
        if (sentence := cut(self.readers(), new)) is not None:
            logger.warning(sentence)

    def readers(self) -> Sequence[Reader]:
        if self._readers is None:
            self._readers = []
            try:
                with torch.random.fork_rng(), self.turns.running(self.pipe, instead=True):
                    self._readers = readers(self.prober)
            # a cut may remove the marks that stand for pictures in a text
            except ValueError as error:
                logger.warning(f"how much is read of a long prompt is not known: {error}")
        return self._readers

    def _picture(self, item: PromptItem) -> Tensor | None:
        """Return x0 (*L) of the picture that the loop starts from; None if it starts from noise."""
        sigma = self._schedules[self.steps].sigmas[0]
        mean = self.prober.start(item, self.steps).mean
        if mean is None or not self.prober.runner.single or sigma > 1 - 1e-3:
            return None
        return mean / (self.coords.scale(sigma) * (1 - sigma)).item()

    def schedule(self, steps: int) -> Schedule:
        if steps not in self._schedules:
            self._schedules[steps], why = self._scheduled(steps)
            if why is not None:
                logger.warning(
                    f"{self.replay.pipeline}: {why}; from now on the loop's own body is run, which"
                    " is slower"
                )
        self.places.runs[steps] = self.places.runs.pop(steps)  # it was asked for last
        return self._schedules[steps]

    def _scheduled(self, steps: int) -> tuple[Schedule, str | None]:
        """Read a schedule from a stubbed run, and compare the run with the replay. Where it does
        otherwise, the loop's own body takes the replay's place, or an UnreplayableError says that
        it cannot -> (the schedule, why the body does; None if it does not)."""
        # a replay is compared with what the networks are given
        unseen = not self.replay.regimes
        found, run = self.prober.schedule(steps, self.coords, unseen=unseen)
        self.coords.time.add(found.sigmas[:-1], found.times)
        seen, why = self.places.add(steps, run), None
        if self.replay.regimes:
            j = unlike(self.replay, run, seen[1])
            if j is not None:
                why = f"at {steps} steps, iteration {j} does otherwise than the inferred call"
                self.replay, _ = body_replay(self.places, why)
        rules = {regime.guidance.rule for regime in self.replay.regimes}
        if not rules or "pipeline" in rules:
            self.places.check(steps, run, *seen)
        return found, why

    def init(
        self,
        noise: Tensor,
        sigma: float,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        x = noise * self.coords.start(sigma, self._schedules[self.steps])
        if not self.late:
            return x
        if cond is None or cond.starts is None or rows is None:
            raise ValueError(
                f"{self.replay.pipeline} starts from pictures: init needs cond and rows"
            )
        return x + (1 - sigma) * cond.starts[rows.to(cond.starts.device)].to(x)

    def _embed(self, cond: Cond) -> Tensor | None:
        return embedded(self.replay, cond)

    def _velocity(self, request: Request) -> tuple[Tensor, int]:
        # a BodyReplay encodes the prompts itself
        if self.encodings and not isinstance(self.replay, BodyReplay):
            request = self.encodings.request(request)
        prediction, network_rows = self.replay.predict(self.modules, request)
        return self.coords.velocity(prediction, request.x, request.sigma), network_rows

    def _combine(self, which: int, outs: list[Tensor], request: Request) -> Tensor:
        """Combine real outputs by the pipeline's own loop body, once for each sigma: a loop has one
        time for all its rows."""
        x, sigma, cond, rows = request.x, request.sigma, request.cond, request.rows
        levels = sigma.unique()
        if len(levels) == 1:
            items = [cond.items[i] for i in rows.tolist()]
            place, answers = self.places.of(levels[0].item()), self._answers(which, outs)
            return reenter(self.prober, self.coords, place, x, levels[0].cpu(), items, answers)
        mixed = torch.zeros_like(x)
        for level in levels:
            at = (sigma == level).nonzero().flatten()
            part = self._combine(which, [out[at] for out in outs], request.take(at))
            mixed = mixed.index_copy(0, at, part)
        return mixed

    def _answers(self, which: int, outs: list[Tensor]) -> dict[tuple[str, int], Tensor]:
        """Arrange raw outputs of a regime's branches in the order in which its networks give them:
        (component, n-th call) -> (blocks, n, repeats, ...)."""
        left = list(outs)
        answers: dict[tuple[str, int], Tensor] = {}
        for plan in self.replay.regimes[which].calls:
            own, left = left[: plan.blocks], left[plan.blocks :]
            nth = sum(name == plan.module for name, _ in answers)
            answers[(plan.module, nth)] = torch.stack(own).to(self.dtype)
        return answers

    def clean(self, x: Tensor, sigma: Tensor | float) -> Tensor:
        scale = self.coords.scale(torch.as_tensor(sigma, dtype=torch.float64))
        return x.float() * expand(scale.to(x.device, torch.float32), x)

    def decode(
        self,
        x: Tensor,
        sigma: float = 0.0,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        own = () if isinstance(self.decoder, partial) else (cond, rows)
        with blaming(self.pipe, {}, DECODING):
            return self.decoder(self.clean(x, sigma), *own)

    def narrow_decoder(self) -> None:
        """Run the VAE in the networks' own type, as diffusers does: it takes half the memory. It
        stays wider than fp16 if its config says that it overflows (force_upcast)."""
        vae = getattr(self.pipe, "vae", None)
        config = getattr(vae, "config", {})
        if vae is None:
            return
        upcast = self.dtype == torch.float16 and config.get("force_upcast")
        own = torch.float32 if upcast else self.dtype
        # two casts, because the pipeline's own weights were rounded to the networks' type first
        for kind in (self.dtype, own):
            nn.Module.to(vae, kind)
        if isinstance(self.decoder, Decoder):
            self.decoder.dtype = own  # pipelines convert latents to their VAE's type before the map
            round_alike(self.decoder, self.prober, self.steps)

    def tile_decoder(self) -> None:
        vae = getattr(self.pipe, "vae", None)
        if not hasattr(vae, "enable_tiling"):
            return super().tile_decoder()
        vae.enable_tiling()

    def encode_media(self, media: Tensor) -> Tensor:
        if not isinstance(self.decoder, Decoder):
            raise ValueError("encode_media: this pipeline is decoded by a hint, without inverse")
        return self.decoder.encode(media)

    def reentry(
        self,
        x: Tensor,
        sigma: float | Tensor,
        prompts: list[str],
        conditions: Sequence[Mapping[str, Any]] | None = None,
    ) -> Tensor:
        """Compute the velocity (P, *L) by the pipeline's own loop body, row i of x with prompts[i]
        and its conditions, one sigma for all: slow, but the replay can be compared with it."""
        s = torch.as_tensor(sigma, dtype=torch.float64).reshape(()).cpu()
        items = items_of(prompts, conditions)
        prediction = reenter(self.prober, self.coords, self.places.of(s.item()), x, s, items)
        return self.coords.velocity(prediction, x, s)

    def self_check(self) -> SelfCheck:
        """Compare the replay with the pipeline itself; an UnreplayableError names the first
        comparison that fails."""
        try:
            return self_check(self)
        except Exception as error:
            if isinstance(error, CallError | UnreplayableError) or ran_out(error):
                raise
            raise UnreplayableError(
                f"{self.replay.pipeline}: its replayed call, whose networks are given a time for"
                f" each row, (n,), fails with {type(error).__name__}: {error}"
            ) from error

    def describe(self) -> str:
        """Write the inferred call as Python source."""
        why = self.replay.why if isinstance(self.replay, BodyReplay) else None
        return describe(self.replay, why)

    @property
    def has_lora_format(self) -> bool:
        # the pipeline's LoRA files need a place for all trained parts
        text = self.trainable.modules.keys() - self.networks.keys()
        return hasattr(self.pipe, "save_lora_weights") and text <= lora.placed_in(self.pipe)

    def save_lora(self, folder: str | Path) -> Path:
        if not self.has_lora_format:
            return super().save_lora(folder)
        self.trainable.needs_lora()
        return lora.save(self.pipe, self.trainable, folder)
