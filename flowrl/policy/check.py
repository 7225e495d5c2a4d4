"""Proof that comes with a policy: its replay against the pipeline itself, able to fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowrl.policy.replay.arguments import Cond
from flowrl.policy.replay.call import Replay, Request
from flowrl.policy.replay.coords import Coords
from flowrl.policy.replay.decode import tail
from flowrl.policy.replay.probe import RECORD, Prober
from flowrl.policy.replay.record import Iteration, UnreplayableError

MEANING = {
    "prediction": "predictions at the recorded latents and times",
    "loop": "latents after the whole loop, stepped by the pipeline's own scheduler",
    "rows": "rows [1, 0, 1] of two encoded prompts, against a run on these three prompts",
    "reentry": "velocity at a sigma that no run visited, against the pipeline's own loop body",
    "mixed": "rows at different sigmas in one call, against one call a row",
    "euler": "one step of the pipeline's scheduler, against an Euler step in flow coordinates",
    "decode": "media, against the pipeline's own decoding",
}


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """The largest relative error of each comparison; wrong_rows: how much swapped prompts show."""

    pipeline: str
    errors: dict[str, float]
    wrong_rows: float
    tolerance: float
    steps: int
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.pipeline}: replayed at {self.steps} steps, tolerance {self.tolerance:g}"]
        lines += [f"  {key:<11}{value:9.1e}  {MEANING[key]}" for key, value in self.errors.items()]
        lines += [
            f"  wrong rows {self.wrong_rows:9.1e}  (swapped prompts must differ)",
            *(f"  note: {n}" for n in self.notes),
        ]
        return "\n".join(lines)


class Replayed(Protocol):
    """A policy that replays a pipeline."""

    replay: Replay
    prober: Prober
    coords: Coords
    steps: int
    modules: dict[str, nn.Module]
    latent_shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def decoder(self) -> Callable[[Tensor], Tensor]: ...

    def encode(self, prompts: list[str]) -> Cond: ...

    def velocity(self, x: Tensor, sigma: Tensor | float, cond: Cond, rows: Tensor) -> Tensor: ...

    def reentry(self, x: Tensor, sigma: float | Tensor, prompts: list[str]) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """A run of the pipeline with its own networks; sigmas as Coords.sigmas_of gives them."""

    iterations: list[Iteration]  # without their calls
    sigmas: Tensor
    final: Tensor  # latents after the loop
    scheduler: Any  # as it was before the loop


def relative(a: Tensor, b: Tensor) -> float:
    """max |a - b| / max |b|."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-12)).item()


@torch.no_grad()
def self_check(policy: Replayed) -> SelfCheck:
    """Run the pipeline for real and compare. Costs about four short runs of the pipeline."""
    cond, swapped = policy.encode(RECORD), [RECORD[1], RECORD[0], RECORD[1]]
    real = _run(policy, RECORD)
    policy.coords.time.add(real.sigmas[:-1], torch.stack([it.time for it in real.iterations]))
    errors = {"prediction": _worst(policy, real, cond, [0, 1])}
    again = _run(policy, swapped)
    errors["rows"] = _worst(policy, again, cond, [1, 0, 1])
    wrong_rows = _worst(policy, again, cond, [0, 1, 0])
    errors["reentry"], errors["mixed"] = _referee(policy, real.sigmas, cond)
    errors |= _steps(policy, real, cond)
    if "decode" not in policy.prober.runner.hints:
        x = real.final[: len(RECORD)].float()
        errors["decode"] = relative(policy.decoder(x), tail(policy.prober, policy.steps, x))
    result = SelfCheck(
        pipeline=policy.replay.pipeline,
        errors=errors,
        wrong_rows=wrong_rows,
        tolerance=_tolerance(policy),
        steps=policy.steps,
        notes=_notes(real.scheduler, noisy="euler" not in errors),
    )
    return _judge(result)


def _notes(scheduler: Any, *, noisy: bool) -> list[str]:
    """What a reader of the comparisons should know."""
    name = type(scheduler).__name__
    out = []
    if noisy:
        out.append(f"{name} draws noise in its step: neither its loop nor its step was compared")
    if clips := _clips(scheduler):
        out.append(
            f"{name} limits its estimate of the clean latents in each step ({', '.join(clips)});"
            " flowrl's samplers do not, and one step was compared without"
        )
    return out


def _clips(scheduler: Any) -> list[str]:
    """Settings by which a scheduler's step limits its estimate of the clean latents."""
    return [key for key in ("clip_sample", "thresholding") if scheduler.config.get(key)]


def _tolerance(policy: Replayed) -> float:
    """1e-4 in fp32; in lower precision its rounding times the guidance that multiplies it."""
    recorded = policy.replay.regimes[0].calls[0].slots[0].dtype  # of latents at the network
    lowest = max(policy.dtype, recorded, key=lambda dtype: torch.finfo(dtype).eps)
    if lowest == torch.float32:
        return 1e-4
    weight = max(sum(map(abs, regime.guidance.weights)) for regime in policy.replay.regimes)
    return torch.finfo(lowest).eps * max(4.0, weight)


def _judge(result: SelfCheck) -> SelfCheck:
    """The result; UnreplayableError if a comparison failed, or could not have."""
    for key, value in result.errors.items():
        if not value <= result.tolerance:  # also NaN
            raise UnreplayableError(
                f"{result.pipeline}: the replay differs in {MEANING[key]} by {value:.1e} (allowed"
                f" {result.tolerance:.0e}); see policy.describe() and"
                " flowrl.policy.replay.hints.register for what can be declared"
            )
    if not result.wrong_rows > max(1e-3, 10 * result.errors["rows"]):
        raise UnreplayableError(
            f"{result.pipeline}: swapping the two prompts changes predictions by only"
            f" {result.wrong_rows:.1e}, so the check of prompt rows says nothing"
        )
    return result


def _run(policy: Replayed, prompts: list[str]) -> RealRun:
    """The pipeline as it is, on these prompts."""
    runner = policy.prober.runner
    done: list[Iteration] = []
    fresh: list[Any] = []

    def on_times(scheduler) -> None:
        clean = copy.copy(scheduler)
        clean.__class__ = type(scheduler).__mro__[1]
        fresh[:] = [copy.deepcopy(clean)]

    def on_step(prediction, time, sample) -> None:
        at = torch.as_tensor(time).detach().cpu().double().reshape(())
        done.append(Iteration([], at, sample.clone(), prediction.clone()))

    final = runner.run([*prompts, *runner.pad], policy.steps, on_step=on_step, on_times=on_times)
    sigmas = policy.coords.sigmas_of(fresh[0], torch.stack([it.time for it in done]))
    return RealRun(iterations=done, sigmas=sigmas, final=final, scheduler=fresh[0])


def _predict(
    policy: Replayed, sample: Tensor, sigma: Tensor, cond: Cond, rows: list[int]
) -> Tensor:
    """The replay's prediction at the pipeline's own latents."""
    x = sample.float() / policy.coords.scale(sigma).item()
    at = torch.tensor(rows, device=x.device)
    return policy.replay.predict(
        policy.modules, Request(x=x, sigma=sigma.cpu(), cond=cond, rows=at)
    )[0]


def _worst(policy: Replayed, run: RealRun, cond: Cond, rows: list[int]) -> float:
    """Largest error of predictions for `rows` of cond at the latents of a run."""
    n = len(rows)  # what follows are the prompts that fix the text length
    return max(
        relative(_predict(policy, it.sample[:n], sigma, cond, rows), it.prediction[:n].float())
        for it, sigma in zip(run.iterations, run.sigmas[:-1], strict=True)
    )


def _steps(policy: Replayed, real: RealRun, cond: Cond) -> dict[str, float]:
    """Errors of the scheduler's step and of the loop of steps; {} when its step draws noise."""
    euler = _euler(policy, real)
    if euler is None:
        return {}
    kept = real.final[: len(RECORD)].float()
    return {"euler": euler, "loop": relative(_loop(policy, real, cond), kept)}


def _loop(policy: Replayed, real: RealRun, cond: Cond) -> Tensor:
    """Latents after replayed predictions are stepped by the pipeline's own scheduler."""
    scheduler = _started(real.scheduler)
    x = real.iterations[0].sample[: len(RECORD)]
    for j, sigma in enumerate(real.sigmas[:-1]):
        time = scheduler.timesteps[j]
        if hasattr(scheduler, "scale_model_input"):
            scheduler.scale_model_input(x, time)
        prediction = _predict(policy, x, sigma, cond, [0, 1])
        x = scheduler.step(prediction.to(x.dtype), time, x, return_dict=False)[0]
    return x.float()


def _started(scheduler: Any) -> Any:
    """A copy of a scheduler, at its first step."""
    own = copy.deepcopy(scheduler)
    if hasattr(own, "set_begin_index"):
        own.set_begin_index(0)
    return own


def _referee(policy: Replayed, sigmas: Tensor, cond: Cond) -> tuple[float, float]:
    """Unvisited sigmas, one in each regime: against re-entry, and all of them in one call."""
    picks = [
        (0.45 * sigmas[j] + 0.55 * sigmas[j + 1]).item()
        for j in range(1, policy.steps - 1, max(1, policy.steps // 4))
    ]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(len(RECORD), *policy.latent_shape, generator=generator).to(policy.device)
    rows = torch.arange(len(RECORD), device=x.device)
    alone = [policy.velocity(x, s, cond, rows) for s in picks]
    worst = max(
        relative(v, policy.reentry(x, s, RECORD)) for v, s in zip(alone, picks, strict=True)
    )
    many = torch.tensor(picks, dtype=torch.float64).repeat_interleave(len(RECORD)).to(x.device)
    repeated = x.repeat(len(picks), *[1] * (x.ndim - 1))
    together = policy.velocity(repeated, many, cond, rows.repeat(len(picks)))
    return worst, relative(together, torch.cat(alone))


def _euler(policy: Replayed, real: RealRun) -> float | None:
    """First step of the scheduler (first order even in multistep solvers) against x' + v (s1 - s0),
    without its limits. None when it draws noise."""
    first, steps = real.iterations[0], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        own = _started(real.scheduler)
        own.register_to_config(**dict.fromkeys(_clips(own), False))
        time = own.timesteps[0]
        if hasattr(own, "scale_model_input"):
            own.scale_model_input(first.sample, time)
        steps.append(own.step(first.prediction, time, first.sample, return_dict=False)[0])
    if not torch.equal(*steps):
        return None
    s0, s1 = real.sigmas[0], real.sigmas[1]
    x = first.sample.float() / policy.coords.scale(s0).item()
    v = policy.coords.velocity(first.prediction.float(), x, s0)
    stepped = (x + v * (s1 - s0).item()) * policy.coords.scale(s1).item()
    return relative(stepped, steps[0].float())
