"""A diffusers pipeline as a policy: the inferred Replay, its decoder and schedules behind one
interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.policy import lora
from flowrl.policy.base import Policy
from flowrl.policy.check import SelfCheck, self_check
from flowrl.policy.replay.bind import bind
from flowrl.policy.replay.call import Cond
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
    """See Policy. `kwargs` are arguments of the pipeline's own call; they hold for recording and so
    for everything after it."""

    def __init__(self, pipe: Any, adapter: dict[str, Any] | None, kwargs: dict[str, Any]) -> None:
        self.pipe = pipe
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval().requires_grad_(False)
        runner = Runner(pipe, kwargs, hints_for(pipe))
        self.prober, self.coords = Prober(runner), Coords(pipe.scheduler)
        self.replay, self.steps = infer(self.prober, self.coords)
        decode = runner.hints.get("decode")
        self.decoder = (
            infer_decoder(self.prober, self.steps, self.replay.shape)
            if decode is None
            else (lambda x: decode(pipe, x))
        )
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

    def predict(
        self,
        x: Tensor,
        s: Tensor,
        cond: Cond,
        rows: Tensor,
        guidance: float | str = "pipeline",
        detach_uncond: bool = False,
    ) -> Tensor:
        """The pipeline's own combined prediction (n, *L) fp32, at flow coordinates x, sigma s (n,)
        fp64 or () on the CPU; networks
        split by time where there are several."""
        boundaries = self.replay.boundaries
        if s.ndim == 0:
            t = self.coords.time.at(s.item())
            return self._predict(
                sum(t < b for b in boundaries),
                x,
                s,
                torch.tensor(t, dtype=torch.float64),
                cond,
                rows,
                guidance,
                detach_uncond,
            )
        times = self.coords.time(s)
        if not boundaries:
            return self._predict(0, x, s, times, cond, rows, guidance, detach_uncond)
        which = torch.stack([times < b for b in boundaries]).sum(0)
        used = which.unique().tolist()
        if len(used) == 1:
            return self._predict(used[0], x, s, times, cond, rows, guidance, detach_uncond)
        out = torch.zeros_like(x)
        for k in used:
            at = (which == k).nonzero().flatten()
            out = out.index_copy(
                0,
                at,
                self._predict(k, x[at], s[at], times[at], cond, rows[at], guidance, detach_uncond),
            )
        return out

    def _predict(self, which: int, x, s, t, cond, rows, guidance, detach_uncond) -> Tensor:
        out, count = self.replay.predict(
            self.modules,
            which,
            x,
            s,
            t,
            cond,
            rows,
            guidance=guidance,
            detach_uncond=detach_uncond,
            combine=self._combine,
        )
        self.calls += count
        return out

    def _velocity(
        self,
        x: Tensor,
        s: Tensor,
        cond: Cond,
        rows: Tensor,
        guidance: float | str,
        detach_uncond: bool,
    ) -> Tensor:
        return self.coords.velocity(self.predict(x, s, cond, rows, guidance, detach_uncond), x, s)

    def _combine(
        self, which: int, outs: list[Tensor], x: Tensor, s: Tensor, cond: Cond, rows: Tensor
    ) -> Tensor:
        """Feed real outputs through the pipeline's own combination, once for each sigma: a loop has
        one time for all its rows."""
        levels = s.unique()
        if len(levels) > 1:
            mixed = torch.zeros_like(x)
            for level in levels:
                at = (s == level).nonzero().flatten()
                mixed = mixed.index_copy(
                    0, at, self._combine(which, [o[at] for o in outs], x[at], level, cond, rows[at])
                )
            return mixed
        regime, pad, k = self.replay.regimes[which], len(self.prober.runner.pad), 0
        answers: dict[tuple[str, int], Tensor] = {}
        for plan in regime.calls:
            blocks = [
                torch.cat([o, o[:1].expand(pad, *o.shape[1:])]) for o in outs[k : k + plan.blocks]
            ]
            k += plan.blocks
            nth = sum(name == plan.module for name, _ in answers)
            answers[(plan.module, nth)] = torch.cat(blocks).to(self.dtype)
        return reenter(
            self.prober,
            self.coords,
            self.steps,
            x,
            levels[0],
            [cond.prompts[i] for i in rows.tolist()],
            answers,
        )

    def clean(self, x: Tensor, sigma: Tensor | float) -> Tensor:
        scale = self.coords.scale(torch.as_tensor(sigma, dtype=torch.float64))
        return x.float() * expand(scale.to(x.device, torch.float32), x)

    def decode(self, x: Tensor, sigma: float = 0.0) -> Tensor:
        return self.decoder(self.clean(x, sigma))

    def encode_media(self, media: Tensor) -> Tensor:
        if not isinstance(self.decoder, Decoder):
            raise ValueError(
                "encode_media: this pipeline is decoded by a hint, which has no inverse"
            )
        return self.decoder.encode(media)

    def reentry(self, x: Tensor, sigma: float | Tensor, prompts: list[str]) -> Tensor:
        """Slow referee: velocity (P, *L) from the pipeline's own loop body, row i of x with
        prompts[i], one sigma for all."""
        s = torch.as_tensor(sigma, dtype=torch.float64).reshape(())
        return self.coords.velocity(
            reenter(self.prober, self.coords, self.steps, x, s, list(prompts)), x, s
        )

    def self_check(self) -> SelfCheck:
        """Replay against the pipeline itself; raises UnreplayableError naming the first comparison
        that fails."""
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
        self.load_state(
            "default", lora.read(self.pipe, self.trainable.modules, path, self.trainable.options)
        )
