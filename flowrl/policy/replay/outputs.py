"""Infer how a loop uses its networks' outputs: which entries are the prediction, and how branches
combine. Stubbed runs with outputs of our choice show both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.policy.replay.affine import patterns, solve
from flowrl.policy.replay.arguments import Affine, CallPlan
from flowrl.policy.replay.call import Regime
from flowrl.policy.replay.errors import UnreplayableError
from flowrl.policy.replay.guidance import Guidance, fit
from flowrl.policy.replay.probe import Key, Prober
from flowrl.policy.replay.record import RecordedStep

Sample = tuple[list[Tensor], Tensor]  # (outputs of each branch (n, *L), the pipeline's prediction)
# (key, shape) -> output in place of a network, see Prober.run
Stub = Callable[[Key, tuple[int, ...]], Tensor]


@dataclass(eq=False)
class OutputProbe:
    """Stubbed runs through a regime, in which we choose what its networks return."""

    prober: Prober  # runs the pipeline
    seg: list[int]  # iterations of the regime
    steps: int  # number of steps of each run
    x: Tensor  # latents after every step, (rows, *L)

    def run(self, outputs: Stub) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Return outputs in the order of the calls, and predictions, of the regime's iterations."""
        log: list[Tensor] = []
        marks = [0]

        def answer(key: Key, size: tuple[int, ...]) -> Tensor:
            log.append(outputs(key, size))
            return log[-1]

        def stop(j: int, it: RecordedStep) -> bool:
            marks.append(len(log))
            return j == self.seg[-1]

        items = self.prober.rows(self.prober.count)
        seen = self.prober.run(
            items, self.steps, latents=lambda j: self.x, outputs=answer, stop=stop
        )
        outs = [log[marks[j] : marks[j + 1]] for j in self.seg]
        return outs, [seen[j].prediction.float().cpu() for j in self.seg]

    def equal(self, pattern: Callable[[tuple[int, ...]], Tensor]) -> list[Tensor]:
        """Return predictions from outputs that are equal in all blocks: pattern(shape of an output)
        -> (rows, repeats, ...) of one block."""

        def repeated(key: Key, size: tuple[int, ...]) -> Tensor:
            block = pattern(size).flatten(0, 1)
            return block.repeat(size[0] // len(block), *[1] * (len(size) - 1))

        return self.run(repeated)[1]


def infer_regime(
    prober: Prober, plans: list[CallPlan], seg: list[int], steps: int, size: tuple[int, ...]
) -> Regime:
    """Infer where the prediction lies in an output, from outputs that are equal in all branches;
    then how guidance combines branches, from independent ones."""
    generator = torch.Generator().manual_seed(1)
    probe = OutputProbe(prober, seg, steps, torch.randn(size, generator=generator))
    forced = prober.runner.hints.get("guidance")
    for plan in plans:
        plan.out = _out_map(probe, plan)
    if any(plan.out is None for plan in plans):
        if forced in ("linear", "norm"):
            raise UnreplayableError(
                f"guidance: the hint says {forced!r}, but what the pipeline makes of an output is"
                " no selection of its entries"
            )
        for plan in plans:
            plan.out = None
        count = sum(plan.blocks for plan in plans)
        return Regime(plans, Guidance("pipeline", (0.0,) * count, 1.0, _loudest(probe, plans)))
    drawn = _samples(probe, plans, lambda key, size: torch.randn(size, generator=generator))
    rule = fit(drawn, forced)
    if forced is None and not _holds(rule, _samples(probe, plans, _alike)):
        rule = replace(rule, rule="pipeline", entries=None)
    return Regime(plans, rule)


def _samples(probe: OutputProbe, plans: list[CallPlan], outputs: Stub) -> list[Sample]:
    """Return (outputs of each branch, prediction) of each of the regime's iterations."""
    raw, predictions = probe.run(outputs)
    samples = []
    for outs, prediction in zip(raw, predictions, strict=True):
        pieces: list[Tensor] = []
        for plan, out in zip(plans, outs, strict=True):
            pieces += plan.pieces(out, plan.blocks, tuple(probe.x.shape))
        samples.append((pieces, prediction))
    return samples


def _alike(key: Key, size: tuple[int, ...]) -> Tensor:
    """Make outputs whose blocks differ little, like those of networks, and grow with each call."""
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(size, generator=generator)
    grown = torch.linspace(1.0, 1.3, size[0]).reshape(-1, *[1] * (len(size) - 1))
    return (1 + 0.2 * key[1]) * grown * first


def _holds(rule: Guidance, samples: list[Sample]) -> bool:
    """Whether a rule that was fitted on independent outputs holds for others: some loops limit the
    effect of guidance."""
    if rule.rule == "pipeline":
        return True
    for outs, prediction in samples:
        combined = rule(outs, "pipeline")
        if not (combined - prediction).norm() <= 1e-3 * prediction.norm():
            return False
    return True


def _loudest(probe: OutputProbe, plans: list[CallPlan]) -> int:
    """Find the conditional branch: its output moves the prediction most in the direction of all
    branches together."""

    def prediction(chosen: set[int]) -> Tensor:
        generator = torch.Generator().manual_seed(3)

        def answer(key: Key, size: tuple[int, ...]) -> Tensor:
            out = torch.randn(size, generator=generator)
            if key not in firsts:
                return out
            first, blocks = firsts[key]
            parts = out.chunk(blocks)
            return torch.cat([part + ((first + k) in chosen) for k, part in enumerate(parts)])

        return probe.run(answer)[1][0].double()

    firsts: dict[Key, tuple[int, int]] = {}
    before = 0
    for i, plan in enumerate(plans):
        nth = sum(other.module == plan.module for other in plans[:i])
        firsts[(plan.module, nth)] = (before, plan.blocks)
        before += plan.blocks
    count = sum(plan.blocks for plan in plans)
    base = prediction(set())
    towards = prediction(set(range(count))) - base
    return max(range(count), key=lambda k: ((prediction({k}) - base) * towards).sum().item())


def _out_map(probe: OutputProbe, plan: CallPlan) -> Affine | None:
    """Find which entries of an output row make the prediction; equal outputs in all branches pass
    any guidance up to a sign. None if the map is not a selection of entries."""
    rows, repeats = len(probe.x), plan.slots[0].map.repeats
    noise: dict[tuple[int, ...], Tensor] = {}

    def draw(size: tuple[int, ...]) -> Tensor:
        if size[1:] not in noise:
            generator = torch.Generator().manual_seed(2)
            noise[size[1:]] = torch.randn(rows, repeats, *size[1:], generator=generator)
        return noise[size[1:]]

    prediction = probe.equal(draw)[0].reshape(rows, -1)
    one = next(iter(noise.values())).reshape(rows, -1)
    if _same_up_to_sign(prediction, one):
        return plan.out
    entry = (repeats, *next(iter(noise)))
    # patterns are added to 1, not to 0: some loops divide by the outputs' norm
    named = {key: probe.equal(_pattern(rows, entry, key))[0] for key in patterns(1, entry)}
    named = {key: value - named["zero"] for key, value in named.items()}
    try:
        found = solve(named, rows, entry, f"output of {plan.module}")
    except UnreplayableError:
        return None
    index, last = found.index, torch.Size(entry).numel() - 1
    if index is not None and index.max() == last and index.min() > 0:
        plan.ending = last + 1
    return found if _selects(found) else None


def _pattern(rows: int, entry: tuple[int, ...], key: str) -> Callable[[tuple[int, ...]], Tensor]:
    """Make outputs of one block that hold the named pattern plus 1."""
    return lambda size: patterns(rows, entry)[key] + 1


def _same_up_to_sign(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool(min((a - b).abs().max(), (a + b).abs().max()) < 1e-3 * b.abs().max())


def _selects(part: Affine) -> bool:
    """Whether a map only picks entries of a row, up to a sign."""
    if part.scale.ndim or part.const is not None or part.blocks * part.repeats != 1:
        return False
    return part.scale.abs().item() - 1 <= 1e-3 and len(part.shape) >= 1
