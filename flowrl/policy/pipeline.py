"""A diffusers pipeline as a policy: its Replay, decoder and schedules behind one interface."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.policy import lora
from flowrl.policy.base import Policy
from flowrl.policy.check import SelfCheck, self_check
from flowrl.policy.replay.arguments import Cond
from flowrl.policy.replay.bind import bind
from flowrl.policy.replay.call import Request
from flowrl.policy.replay.coords import Coords, Schedule
from flowrl.policy.replay.decode import Decoder, infer_decoder
from flowrl.policy.replay.describe import describe
from flowrl.policy.replay.hints import hints_for
from flowrl.policy.replay.infer import infer
from flowrl.policy.replay.probe import Prober
from flowrl.policy.replay.record import Runner
from flowrl.policy.replay.reentry import reenter
from flowrl.types import expand


class PipelinePolicy(Policy):
    """See Policy. kwargs: arguments of the pipeline's own call, for recording and all after it."""

    def __init__(self, pipe: Any, adapter: dict[str, Any] | None, kwargs: dict[str, Any]) -> None:
        self.pipe = pipe
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval().requires_grad_(False)
        runner = Runner(pipe, kwargs, hints_for(pipe))
        self.prober, self.coords = Prober(runner), Coords(pipe.scheduler)
        self.replay, self.steps = infer(self.prober, self.coords)
        self.replay.combine = self._combine
        self.decoder: Decoder | partial[Tensor]
        if "decode" in runner.hints:
            self.decoder = partial(runner.hints["decode"], pipe)
        else:
            self.decoder = infer_decoder(self.prober, self.steps, self.replay.shape)
        self._schedules: dict[int, Schedule] = {}
        super().__init__(runner.denoisers, adapter, self.replay.shape)

    def branches(self, guidance: float | str) -> int:
        rules = [regime.guidance for regime in self.replay.regimes]
        if guidance == "none" or guidance == 1:
            return 1
        if not isinstance(guidance, str):
            for rule in rules:
                rule.check(guidance)
        return max(len(rule.weights) for rule in rules)

    def encode(self, prompts: list[str]) -> Cond:
        return bind(self.prober, self.replay, self.steps, list(prompts))

    def schedule(self, steps: int) -> Schedule:
        if steps not in self._schedules:
            found = self.prober.schedule(steps, self.coords)
            self.coords.time.add(found.sigmas[:-1], found.times)
            self._schedules[steps] = found
        return self._schedules[steps]

    def init(self, noise: Tensor, sigma: float) -> Tensor:
        return noise * self.coords.start(sigma, self.schedule(self.steps))

    def _velocity(self, request: Request) -> tuple[Tensor, int]:
        return self.replay.velocity(self.modules, request)

    def _combine(self, which: int, outs: list[Tensor], request: Request) -> Tensor:
        """Feed real outputs through the pipeline's own combination, once for each sigma: a loop has
        one time for all its rows."""
        x, sigma, cond, rows = request.x, request.sigma, request.cond, request.rows
        levels = sigma.unique()
        if len(levels) == 1:
            prompts = [cond.prompts[i] for i in rows.tolist()]
            answers = self._answers(which, outs)
            return reenter(self.prober, self.coords, self.steps, x, levels[0], prompts, answers)
        mixed = torch.zeros_like(x)
        for level in levels:
            at = (sigma == level).nonzero().flatten()
            part = self._combine(which, [out[at] for out in outs], request.take(at))
            mixed = mixed.index_copy(0, at, part)
        return mixed

    def _answers(self, which: int, outs: list[Tensor]) -> dict[tuple[str, int], Tensor]:
        """Outputs of a regime's branches as its networks give them: (component, n-th call) ->
        blocks of the batch, with the rows that fix the text length."""
        pad, left = len(self.prober.runner.pad), list(outs)
        answers: dict[tuple[str, int], Tensor] = {}
        for plan in self.replay.regimes[which].calls:
            own, left = left[: plan.blocks], left[plan.blocks :]
            blocks = [torch.cat([out, out[:1].expand(pad, *out.shape[1:])]) for out in own]
            nth = sum(name == plan.module for name, _ in answers)
            answers[(plan.module, nth)] = torch.cat(blocks).to(self.dtype)
        return answers

    def clean(self, x: Tensor, sigma: Tensor | float) -> Tensor:
        scale = self.coords.scale(torch.as_tensor(sigma, dtype=torch.float64))
        return x.float() * expand(scale.to(x.device, torch.float32), x)

    def decode(self, x: Tensor, sigma: float = 0.0) -> Tensor:
        return self.decoder(self.clean(x, sigma))

    def encode_media(self, media: Tensor) -> Tensor:
        if not isinstance(self.decoder, Decoder):
            raise ValueError("encode_media: this pipeline is decoded by a hint, without inverse")
        return self.decoder.encode(media)

    def reentry(self, x: Tensor, sigma: float | Tensor, prompts: list[str]) -> Tensor:
        """Slow referee: velocity (P, *L) of the pipeline's own loop body, row i of x with
        prompts[i], one sigma for all."""
        s = torch.as_tensor(sigma, dtype=torch.float64).reshape(())
        prediction = reenter(self.prober, self.coords, self.steps, x, s, list(prompts))
        return self.coords.velocity(prediction, x, s)

    def self_check(self) -> SelfCheck:
        """Replay against the pipeline itself; the first comparison that fails is named in an
        UnreplayableError."""
        return self_check(self)

    def describe(self) -> str:
        """The inferred call as Python source."""
        return describe(self.replay)

    def save_lora(self, folder: str | Path) -> Path:
        if not hasattr(self.pipe, "save_lora_weights"):
            return super().save_lora(folder)
        self._needs_lora()
        return lora.save(self.pipe, self.trainable.modules, folder)

    def load_lora(self, path: str | Path) -> None:
        if not hasattr(self.pipe, "lora_state_dict"):
            return super().load_lora(path)
        self._needs_lora()
        parts = self.trainable
        self.load_state("default", lora.read(self.pipe, parts.modules, path, parts.options))
