"""The self-check of a pipeline's policy: its replay is compared with the pipeline itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowrl.policy.replay.arguments import SCALE, Cond
from flowrl.policy.replay.call import Request
from flowrl.policy.replay.coords import LIMITS, FirstStep, first_order, started
from flowrl.policy.replay.decode import TailDecoder, tail
from flowrl.policy.replay.errors import UnreplayableError
from flowrl.policy.replay.items import PromptItem
from flowrl.policy.replay.record import RecordedStep

MEANING = {
    "prediction": "predictions for swapped prompts at the latents and times of a run on these",
    "loop": "latents at every step, from the prediction before, by the pipeline's own scheduler",
    "reentry": "velocity at a sigma that no run visited, against the pipeline's own loop body",
    "mixed": "rows at different sigmas in one call, against one call a sigma and a row alone",
    "euler": "one step of the pipeline's scheduler, against an Euler step in flow coordinates",
    "decode": "media, against the pipeline's own decoding",
    "came": "networks without what is trained, against those that the pipeline came with",
}
Replayed = Any  # type of a PipelinePolicy, whose file imports this one
BLOCK = 1 << 24  # number of values that are compared at once, to save memory
LOOSE = 8.0  # sum of guidance weights that is assumed if guidance is not known
# predictions and media may differ by this many times the effect of rounding the latents
ROUNDED = 30.0


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """The result of a self-check: relative errors, and their limits."""

    # key of an error -> sentence about what is compared
    meaning: ClassVar[Mapping[str, str]] = MEANING
    # first words of the text, with a place for `steps`
    tried: ClassVar[str] = "replayed at {} steps"
    # verb of the sentence about swapped prompts: they "must" or "should" differ
    swapped: ClassVar[str] = "must"

    pipeline: str  # name of the class of the pipeline or module
    errors: dict[str, float]  # comparison -> its largest relative error
    wrong_rows: float  # relative change when prompts are swapped; NaN without conditions
    tolerance: float  # limit of each error
    steps: int  # sampling steps of the run that was compared
    media: float = 0.0  # limit for media if the decoder is less precise; 0: `tolerance`
    notes: list[str] = field(default_factory=list)  # sentences for people who read the comparisons

    def allowed(self, key: str) -> float:
        """Return the limit of a comparison."""
        return max(self.tolerance, self.media) if key == "decode" else self.tolerance

    @property
    def holds(self) -> bool:
        """Whether every error is within its limit; NaN is not."""
        return all(value <= self.allowed(key) for key, value in self.errors.items())

    def __str__(self) -> str:
        tried = self.tried.format(self.steps)
        lines = [f"{self.pipeline}: {tried}, tolerance {self.tolerance:g}"]
        if self.media > self.tolerance:
            lines[0] += f", of media {self.media:g}"
        for key, value in self.errors.items():
            lines += [f"  {key:<11}{value:9.1e}  {self.meaning[key]}"]
        if not math.isnan(self.wrong_rows):
            lines += [
                f"  wrong rows {self.wrong_rows:9.1e}  (swapped prompts {self.swapped} differ)"
            ]
        return "\n".join([*lines, *(f"  note: {n}" for n in self.notes)])


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """A run of the pipeline on the swapped record, in some iterations with its own networks."""

    iterations: list[RecordedStep]  # iterations without their calls; latents (P, *L)
    own: list[int]  # numbers of iterations in which the networks answered; in all others stubs did
    sigmas: Tensor  # (steps + 1,) fp64, from Coords.sigmas_of
    final: Tensor  # latents after the loop
    scheduler: Any  # the scheduler before the loop


def relative(a: Tensor, b: Tensor) -> float:
    """Compute max |a - b| / max |b|, a block of values at a time, because media are large."""
    off, size = [], []
    for x, y in _blocks(a, b):
        off.append((x.double() - y.double()).abs().max())
        size.append(y.double().abs().max())
    return (torch.stack(off).max() / torch.stack(size).max().clamp(min=1e-12)).item()


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same block of values of two tensors of one shape."""
    assert a.shape == b.shape
    yield from zip(a.reshape(-1).split(BLOCK), b.reshape(-1).split(BLOCK), strict=True)


@torch.no_grad()
def self_check(policy: Replayed) -> SelfCheck:
    """Run the pipeline for real and compare. It costs about twice the network rows of a run with
    four steps and two prompts."""
    record = policy.prober.record
    cond = policy.encode([i.prompt for i in record], [i.conditions for i in record])
    real = _run(policy, record[::-1])
    policy.coords.time.add(real.sigmas[:-1], torch.stack([it.time for it in real.iterations]))
    ours = {j: _predict(policy, real, j, cond, [1, 0]) for j in real.own}
    errors = {
        "prediction": max(
            relative(ours[j], real.iterations[j].prediction.float()) for j in real.own
        )
    }
    early = real.own[0]
    wrong = _predict(policy, real, early, cond, [0])
    wrong_rows = relative(wrong, real.iterations[early].prediction[:1].float())
    errors["reentry"], errors["mixed"] = _referee(policy, real, cond)
    euler = _euler(policy, real)
    if euler is not None:
        errors |= {"euler": euler, "loop": _loop(policy, real, ours, _read(policy, cond)[[1, 0]])}
    size: tuple[int, ...] = ()
    if "decode" not in policy.prober.runner.hints:
        x = real.final.float()
        decoded = tail(policy.prober, policy.steps, x, record[::-1])
        media = _decode(policy, x, cond)
        decoded = decoded.to(media.device)  # some pipelines return media on the CPU
        errors["decode"], size = _beside(media, decoded), tuple(media.shape[-2:])
    if (came := policy.untouched()) is not None:
        errors["came"] = came
    result = SelfCheck(
        pipeline=policy.replay.pipeline,
        errors=errors,
        wrong_rows=wrong_rows,
        tolerance=_tolerance(policy),
        steps=policy.steps,
        media=_media_tolerance(policy),
        notes=_notes(policy, real.scheduler, size, noisy=euler is None),
    )
    if not result.holds:
        rounded = ROUNDED * _sensitivity(policy, real, cond, ours)
        result = replace(result, tolerance=max(result.tolerance, rounded))
    if not errors.get("decode", 0.0) <= result.allowed("decode"):
        rounded = ROUNDED * relative(_decode(policy, _rounded(x), cond), media)
        result = replace(result, media=max(result.media, rounded))
    return _judge(result)


def _decode(policy: Replayed, x: Tensor, cond: Cond) -> Tensor:
    """Decode latents x (2, *L) of the swapped record, a row at a time."""
    parts = zip(x.split(1), torch.tensor([1, 0]).split(1), strict=True)
    return torch.cat([policy.decoder(latents, cond, row) for latents, row in parts])


def _beside(ours: Tensor, decoded: Tensor) -> float:
    """Compute the relative error of media. Pipelines that round media to 8 bits may differ by one
    of 255 levels."""
    off = []
    for a, b in _blocks(ours, decoded):
        levels = b * 255
        if (levels - levels.round()).abs().max() > 1e-3:
            return relative(ours, decoded)
        off.append((a - b).abs().max() - 1 / 255)
    return torch.stack(off).max().clamp(min=0).item()


def _sensitivity(policy: Replayed, real: RealRun, cond: Cond, ours: dict[int, Tensor]) -> float:
    """Return how far predictions move when latents are rounded, relative to their size."""
    j = real.own[-1]
    it = real.iterations[j]
    rounded = replace(it, sample=_rounded(it.sample.float()))
    moved = replace(real, iterations=[*real.iterations[:j], rounded, *real.iterations[j + 1 :]])
    return relative(_predict(policy, moved, j, cond, [1, 0]), ours[j])


def _rounded(x: Tensor) -> Tensor:
    """Move each number of latents (n, *L) fp32 up or down by half a unit in the last place."""
    eps = torch.finfo(torch.float32).eps / 2
    generator = torch.Generator().manual_seed(4)
    signs = torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1
    return x * (1 + eps * signs)


def _notes(policy: Replayed, scheduler: Any, size: tuple[int, ...], *, noisy: bool) -> list[str]:
    """Write notes for readers of the comparisons. size: (H, W) of media; () if none were made."""
    name, out = type(scheduler).__name__, []
    if size and (unlike := policy.prober.runner.unlike_asked(size)):
        out.append(unlike)
    if noisy:
        out.append(f"{name} draws noise in its step: neither its loop nor its step was compared")
    if clips := [key for key in LIMITS if scheduler.config.get(key)]:
        out.append(
            f"{name} limits its estimate of the clean latents in each step ({', '.join(clips)});"
            " flowrl's samplers do not, and one step was compared without"
        )
    if isinstance(policy.decoder, TailDecoder):
        out.append("media are decoded by the pipeline's own tail, a row at a time")
    if not policy.replay.regimes:
        out.append("the loop's own body is run in every call, one noise level at a time")
    if any(regime.guidance.rule == "pipeline" for regime in policy.replay.regimes):
        out.append("outputs are combined by the pipeline's own loop body, in every call")
    return out


def _tolerance(policy: Replayed) -> float:
    """Return the limit of errors: 1e-4 in fp32; in lower precision, its rounding times the guidance
    that multiplies it."""
    slots = [slot for r in policy.replay.regimes for c in r.calls for slot in c.slots]
    # types of the networks, and of the latents that they get
    dtypes = {policy.dtype, *(slot.dtype for slot in slots)}
    lowest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    if lowest == torch.float32:
        return 1e-4
    weights = [sum(map(abs, regime.guidance.weights)) for regime in policy.replay.regimes]
    weight = max(weights, default=LOOSE)
    return torch.finfo(lowest).eps * max(4.0, weight)


def _media_tolerance(policy: Replayed) -> float:
    """Return the limit for media that a VAE of lower precision rounds; 0 in fp32."""
    vae = getattr(policy.prober.runner.pipe, "vae", None)
    kinds = {p.dtype for p in vae.parameters()} if isinstance(vae, nn.Module) else set()
    eps = max((torch.finfo(kind).eps for kind in kinds if kind.is_floating_point), default=0.0)
    return 4.0 * eps if eps > torch.finfo(torch.float32).eps else 0.0


def _judge(result: SelfCheck) -> SelfCheck:
    """Return the result; UnreplayableError if a comparison failed, or could not have failed."""
    for key, value in result.errors.items():
        if not value <= result.allowed(key):  # `not <=`, because NaN must fail, too
            raise UnreplayableError(
                f"{result.pipeline}: the replay differs in {MEANING[key]} by {value:.1e} (allowed"
                f" {result.allowed(key):.0e}); see policy.describe() and"
                " flowrl.policy.replay.hints.register for what can be declared"
            )
    if not result.wrong_rows > max(1e-3, 10 * result.errors["prediction"]):
        raise UnreplayableError(
            f"{result.pipeline}: swapping the two prompts changes predictions by only"
            f" {result.wrong_rows:.1e}, so the check of prompt rows says nothing"
        )
    return result


def _run(policy: Replayed, items: Sequence[PromptItem]) -> RealRun:
    """Run the pipeline as it is on these items, one by one if it takes one at a time."""
    parts = [_run_together(policy, group) for group in policy.prober.apart(items)]
    if len(parts) == 1:
        return parts[0]
    merged = [
        RecordedStep(
            [],
            same[0].time,
            torch.cat([it.sample for it in same]),
            torch.cat([it.prediction for it in same]),
        )
        for same in zip(*(part.iterations for part in parts), strict=True)
    ]
    return replace(parts[0], iterations=merged, final=torch.cat([part.final for part in parts]))


def _run_together(policy: Replayed, items: list[PromptItem]) -> RealRun:
    prober, rows, first = policy.prober, len(items), FirstStep()
    final: list[Tensor] = []

    def on_done(result: Tensor) -> None:
        final[:] = [result[:rows].clone()]

    probed = prober.run(items, policy.steps, unseen=True)
    real = _own(policy, torch.stack([it.time for it in probed]))
    # these prompts are short, so the overlong one alone fixes the length of the text
    pad = prober.runner.pad[:1]
    ran = prober.run(items, policy.steps, pad=pad, real=real, on_raw=first, on_done=on_done)
    done = [RecordedStep([], it.time, it.sample[:rows], it.prediction[:rows]) for it in ran]
    scheduler = first.scheduler
    sigmas = policy.coords.sigmas_of(scheduler, torch.stack([it.time for it in done]))
    return RealRun(iterations=done, own=real, sigmas=sigmas, final=final[0], scheduler=scheduler)


def _own(policy: Replayed, times: Tensor) -> list[int]:
    """Choose two iterations or more in which the networks answer: an early one of each regime."""
    regime = _regimes(policy, times)
    early = {regime.index(which, 1) for which in set(regime[1:])}
    return sorted(early) if len(early) > 1 else [*early, len(times) - 1]


def _regimes(policy: Replayed, times: Tensor) -> list[int]:
    """Find the regime that each model time of a run belongs to."""
    lows = [*policy.replay.boundaries, float("-inf")]
    return torch.stack([times >= low for low in lows]).float().argmax(0).tolist()


def _predict(policy: Replayed, run: RealRun, j: int, cond: Cond, rows: list[int]) -> Tensor:
    """Replay the prediction at the first latents of a run's iteration j, with rows of cond."""
    it, sigma = run.iterations[j], run.sigmas[j]
    x = it.sample[: len(rows)].float() / policy.coords.scale(sigma).item()
    at = torch.tensor(rows, device=x.device)
    return policy.replay.predict(
        policy.modules, Request(x=x, sigma=sigma.cpu(), cond=cond, rows=at)
    )[0]


def _loop(policy: Replayed, real: RealRun, ours: dict[int, Tensor], read: Tensor) -> float:
    """Return the largest error of the latents that the pipeline's own scheduler makes from each
    prediction, relative to the latents or to the step, whichever is larger. read (P, D): the
    entries that networks read, which alone count."""
    pattern, begin = policy.prober.runner.pattern, policy.prober.begin
    schedulers = [started(real.scheduler, begin) for _ in range(policy.prober.runner.streams)]
    following = [it.sample for it in real.iterations[1:]] + [real.final]
    worst = 0.0
    for j, (it, later) in enumerate(zip(real.iterations, following, strict=True)):
        time = schedulers[0].timesteps[begin + j]
        prediction = ours.get(j, it.prediction).to(it.sample.dtype)
        parts = zip(schedulers, pattern.split(prediction), pattern.split(it.sample), strict=True)
        made = []
        for own, part, sample in parts:
            if hasattr(own, "scale_model_input"):
                own.scale_model_input(sample, time)
            made.append(own.step(part, time, sample, return_dict=False)[0])
        x = pattern.join(made)
        gap, moved = (x - later).flatten(1)[read].abs(), (later - it.sample).flatten(1)[read].abs()
        size = torch.maximum(moved.max(), later.flatten(1)[read].abs().max()).clamp(min=1e-12)
        worst = max(worst, (gap.max() / size).item())
    return worst


def _read(policy: Replayed, cond: Cond) -> Tensor:
    """Mark entries of the latents that a network reads, (P, D) bool; loops may overwrite others."""
    numel = torch.Size(policy.latent_shape).numel()
    if not policy.replay.regimes:
        return torch.ones(len(cond), numel, dtype=torch.bool)
    out = torch.zeros(len(cond), numel, dtype=torch.bool)
    for row, (group, place) in enumerate(cond.places):
        for which, regime in enumerate(policy.replay.regimes):
            for k, call in enumerate(regime.calls):
                for slot in call.slots:
                    index = torch.arange(numel) if slot.map.index is None else slot.map.index
                    scale = slot.map.scale
                    if slot.own:
                        kept = cond.groups[group].kept[which][k]
                        scale = kept[(SCALE, *slot.path)][0, place].cpu()
                    out[row, index.cpu()[scale.expand(len(index)) != 0]] = True
    return out


def _referee(policy: Replayed, real: RealRun, cond: Cond) -> tuple[float, float]:
    """Return errors at sigmas that no run visited, one in each regime: (against the pipeline's own
    loop body, of two sigmas in one call against a call each)."""
    record, device = policy.prober.record, policy.device
    prompts, conditions = [i.prompt for i in record], [i.conditions for i in record]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, *policy.latent_shape, generator=generator).to(device)
    rows = torch.arange(2, device=device)
    picks = _unvisited(policy, real)
    several = max(1, len(policy.replay.regimes))
    alone = [policy.velocity(x, s, cond, rows) for s in picks[:several]]
    worst = max(
        relative(v, policy.reentry(x, s, prompts, conditions))
        for v, s in zip(alone, picks, strict=False)
    )
    together = policy.velocity(x, torch.tensor(picks[:2], dtype=torch.float64), cond, rows)
    other = policy.velocity(x[1:], picks[1], cond, rows[1:])
    return worst, relative(together, torch.cat([alone[0][:1], other]))


def _unvisited(policy: Replayed, real: RealRun) -> list[float]:
    """Choose two sigmas or more that the run did not visit, at least one in every regime."""
    times, sigmas = torch.stack([it.time for it in real.iterations]), real.sigmas
    regime = _regimes(policy, times)
    places = [j for j in range(1, len(times) - 1) if regime[j] == regime[j + 1]]
    first = {regime[j]: j for j in reversed(places)}
    picked = sorted({*first.values(), places[-1]})
    if len(picked) == 1:
        picked = [picked[0], picked[0]]
    mixes = [0.45 + 0.1 * k for k in range(len(picked))]
    out = [
        ((1 - m) * sigmas[j] + m * sigmas[j + 1]).item() for j, m in zip(picked, mixes, strict=True)
    ]
    slots = [slot for r in policy.replay.regimes for c in r.calls for slot in c.slots]
    if policy.coords.kind == "flow" or not (policy.late or any(slot.moving for slot in slots)):
        return out
    # such loops noise pictures by a table that holds whole model times only
    return [policy.coords.time.whole(s) for s in out]


def _euler(policy: Replayed, real: RealRun) -> float | None:
    """Return the error of the scheduler's first step, without its limits, against x' + v (s1 - s0);
    multistep solvers, too, take a first step of first order. None when it draws noise."""
    first, begin = real.iterations[0], policy.prober.begin
    pattern = policy.prober.runner.pattern
    parts = zip(pattern.split(first.prediction), pattern.split(first.sample), strict=True)
    steps = [first_order(real.scheduler, begin, p, x, {}) for p, x in parts]
    if any(step is None for step in steps):
        return None
    s0, s1 = real.sigmas[0], real.sigmas[1]
    x = first.sample.float() / policy.coords.scale(s0).item()
    v = policy.coords.velocity(first.prediction.float(), x, s0)
    stepped = (x + v * (s1 - s0).item()) * policy.coords.scale(s1).item()
    return relative(stepped, pattern.join(steps).float())
