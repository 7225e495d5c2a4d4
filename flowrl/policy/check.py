"""The proof that comes with every policy: replay against the pipeline itself, and that the
comparison could have failed."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrl.policy.replay.decode import tail
from flowrl.policy.replay.probe import RECORD
from flowrl.policy.replay.record import Iteration, UnreplayableError

if TYPE_CHECKING:
    from flowrl.policy.pipeline import PipelinePolicy

MEANING = {
    "prediction": "predictions at the recorded latents and times",
    "loop": "latents after the whole loop, stepped by the pipeline's own scheduler",
    "rows": (
        "rows [1, 0, 1] gathered from two encoded prompts, against a run on these three prompts"
    ),
    "reentry": "velocity at a sigma that no run visited, against the pipeline's own loop body",
    "mixed": "rows at different sigmas in one call, against one call a row",
    "euler": "one step of the pipeline's scheduler, against an Euler step in flow coordinates",
    "decode": "media, against the pipeline's own decoding",
}


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """The largest relative error of each comparison. wrong_rows: how much swapped prompts show.
    `policy.describe()`: what was inferred."""

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


def relative(a: Tensor, b: Tensor) -> float:
    """max |a - b| / max |b|."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-12)).item()


@torch.no_grad()
def self_check(policy: PipelinePolicy) -> SelfCheck:
    """Run the pipeline for real and compare. Costs about four short runs of the pipeline."""
    lowest = max(policy.dtype, policy.replay.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    tolerance = (
        1e-4 if lowest == torch.float32 else torch.finfo(lowest).eps * max(4.0, _weight(policy))
    )  # rounding times guidance
    cond, pad = policy.encode(RECORD), len(policy.prober.runner.pad)
    real, final, scheduler = _record(policy, RECORD)
    sigmas = policy.coords.sigmas_of(scheduler, torch.stack([i.time for i in real]))
    policy.coords.time.add(sigmas[:-1], torch.stack([i.time for i in real]))
    errors: dict[str, float] = {}
    keep = slice(0, len(RECORD))
    replayed = [
        _predict(policy, it.sample[keep], sigmas[j], cond, [0, 1]) for j, it in enumerate(real)
    ]
    errors["prediction"] = max(
        relative(p, it.prediction[keep].float()) for p, it in zip(replayed, real, strict=True)
    )
    again, _, _ = _record(policy, [RECORD[1], RECORD[0], RECORD[1]])
    rows = [
        [
            _predict(policy, it.sample[: len(it.sample) - pad], sigmas[j], cond, order)
            for j, it in enumerate(again)
        ]
        for order in ([1, 0, 1], [0, 1, 0])
    ]
    truth = [it.prediction[: len(it.prediction) - pad].float() for it in again]
    errors["rows"] = max(map(relative, rows[0], truth))
    wrong = max(map(relative, rows[1], truth))
    errors["reentry"], errors["mixed"] = _referee(policy, sigmas, cond)
    notes: list[str] = []
    euler = _euler(policy, sigmas, scheduler, real[0])
    if euler is None:
        notes.append(
            f"{type(scheduler).__name__} draws noise in its step: neither its loop nor its step was"
            " compared"
        )
    else:
        errors["euler"] = euler
        errors["loop"] = relative(_loop(policy, real, sigmas, scheduler, cond), final[keep].float())
    if "decode" not in policy.prober.runner.hints:
        x = final[keep].float()
        errors["decode"] = relative(policy.decoder(x), tail(policy.prober, policy.steps, x))
    result = SelfCheck(
        pipeline=policy.replay.pipeline,
        errors=errors,
        wrong_rows=wrong,
        tolerance=tolerance,
        steps=policy.steps,
        notes=notes,
    )
    return _judge(result)


def _judge(result: SelfCheck) -> SelfCheck:
    for key, value in result.errors.items():
        if not value <= result.tolerance:  # also NaN
            raise UnreplayableError(
                f"{result.pipeline}: the replay differs in {MEANING[key]} by {value:.1e} (allowed"
                f" {result.tolerance:.0e}); see policy.describe() and flowrl.policy.replay.hints.register"
                " for what can be declared"
            )
    if not result.wrong_rows > max(1e-3, 10 * result.errors["rows"]):
        raise UnreplayableError(
            f"{result.pipeline}: swapping the two prompts changes predictions by only"
            f" {result.wrong_rows:.1e}, so the check of prompt rows says nothing"
        )
    return result


def _weight(policy: PipelinePolicy) -> float:
    return max(sum(abs(w) for w in r.guidance.weights) for r in policy.replay.regimes)


def _predict(
    policy: PipelinePolicy, sample: Tensor, sigma: Tensor, cond: Any, rows: list[int]
) -> Tensor:
    """The replay's prediction at the pipeline's own latents."""
    x = sample.float() / policy.coords.scale(sigma).item()
    return policy.predict(x, sigma.cpu(), cond, torch.tensor(rows, device=x.device))


def _record(policy: PipelinePolicy, prompts: list[str]) -> tuple[list[Iteration], Tensor, Any]:
    """A real run: iterations without calls, final latents, and the scheduler as it was before the
    loop."""
    runner = policy.prober.runner
    done: list[Iteration] = []
    fresh: list[Any] = []

    def on_times(scheduler) -> None:
        clean = copy.copy(scheduler)
        clean.__class__ = type(scheduler).__mro__[1]
        fresh[:] = [copy.deepcopy(clean)]

    def on_step(prediction, time, sample) -> None:
        done.append(
            Iteration(
                [],
                torch.as_tensor(time).detach().cpu().double().reshape(()),
                sample.clone(),
                prediction.clone(),
            )
        )

    final = runner.run([*prompts, *runner.pad], policy.steps, on_step=on_step, on_times=on_times)
    return done, final, fresh[0]


def _loop(
    policy: PipelinePolicy, real: list[Iteration], sigmas: Tensor, scheduler: Any, cond: Any
) -> Tensor:
    scheduler = copy.deepcopy(scheduler)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    x = real[0].sample[: len(RECORD)]
    for j in range(len(real)):
        time = scheduler.timesteps[j]
        if hasattr(scheduler, "scale_model_input"):
            scheduler.scale_model_input(x, time)
        prediction = _predict(policy, x, sigmas[j], cond, [0, 1])
        x = scheduler.step(prediction.to(x.dtype), time, x, return_dict=False)[0]
    return x.float()


def _referee(policy: PipelinePolicy, sigmas: Tensor, cond: Any) -> tuple[float, float]:
    """Unvisited sigmas, one in each regime: against re-entry, and all of them in one call."""
    picks = [
        (0.45 * sigmas[j] + 0.55 * sigmas[j + 1]).item()
        for j in range(1, policy.steps - 1, max(1, policy.steps // 4))
    ]
    x = torch.randn(
        len(RECORD), *policy.latent_shape, generator=torch.Generator().manual_seed(3)
    ).to(policy.device)
    rows = torch.arange(len(RECORD), device=x.device)
    alone = [policy.velocity(x, s, cond, rows) for s in picks]
    worst = max(
        relative(v, policy.reentry(x, s, RECORD)) for v, s in zip(alone, picks, strict=True)
    )
    many = torch.tensor(picks, dtype=torch.float64).repeat_interleave(len(RECORD)).to(x.device)
    together = policy.velocity(
        x.repeat(len(picks), *[1] * (x.ndim - 1)), many, cond, rows.repeat(len(picks))
    )
    return worst, relative(together, torch.cat(alone))


def _euler(
    policy: PipelinePolicy, sigmas: Tensor, scheduler: Any, first: Iteration
) -> float | None:
    """First step of the scheduler (first order even in multistep solvers) against x' + v (s1 - s0).
    None when it draws noise."""
    steps = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        own = copy.deepcopy(scheduler)
        if hasattr(own, "set_begin_index"):
            own.set_begin_index(0)
        if hasattr(own, "scale_model_input"):
            own.scale_model_input(first.sample, own.timesteps[0])
        steps.append(
            own.step(first.prediction, own.timesteps[0], first.sample, return_dict=False)[0]
        )
    if not torch.equal(*steps):
        return None
    x = first.sample.float() / policy.coords.scale(sigmas[0]).item()
    v = policy.coords.velocity(first.prediction.float(), x, sigmas[0])
    return relative(
        (x + v * (sigmas[1] - sigmas[0]).item()) * policy.coords.scale(sigmas[1]).item(),
        steps[0].float(),
    )
