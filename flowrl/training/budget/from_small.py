"""Small rehearsals tell of large runs: latents of two small sizes of the real ones, and two numbers
of prompts of all of them. Bytes, rows and seconds are affine in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from flowrl.config.schema import Config
from flowrl.training.budget.call_shapes import CallShapes
from flowrl.training.budget.phases import PHASES, Phase
from flowrl.training.budget.rehearsal import WINNERS, Event, Rehearsal
from flowrl.training.build import keeps_reference

EXACT = 1 << 21  # numbers of all latents of an iteration up to which they are rehearsed as they are
ENOUGH = 40  # samples from which on a rehearsal tells larger ones
SMALL = (4, 8)  # sides of latents that stand in for larger ones


def enough(cfg: Config) -> tuple[int, ...]:
    """Numbers of prompts whose rehearsals tell that of the config's: its own, or two smaller ones.

    Prompts are alike, so that rows, FLOPs, seconds and bytes lie on a line once an update fills its
    micro-batches and policy/winner_gain has its 16 rows of the better half; micro-batches of a few
    rows would make a rehearsal of all prompts long. Compiled blocks pad the last micro-batch of an
    update: numbers of prompts that differ by whole micro-batches are padded alike.
    """
    b = cfg.batch
    samples = max(ENOUGH, 2 * b.micro, 2 * b.decode)
    least = b.updates * math.ceil(samples / (b.group * b.updates))
    step = least
    if cfg.train.compile == "blocks":
        whole = b.updates * b.micro // math.gcd(b.micro, b.group)
        least += (b.prompts - least) % whole
        step = whole * math.ceil(least / whole)
    plain = cfg.draw.mode == "once" and not cfg.replay.size
    return (least, least + step) if plain and b.prompts > least + step else (b.prompts,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extrapolated:
    """What is told of a run: network rows of the first iteration and of a usual one, the phases of
    that, and how many copies of the trained weights there are."""

    first: dict[str, int]
    rows: dict[str, int]
    phases: dict[str, Phase]
    views: int


def on_line(cfg: Config, small: Extrapolated, large: Extrapolated) -> Extrapolated:
    """What is told of all prompts by the two rehearsals of fewer (see enough)."""
    few, more = enough(cfg)
    share = (cfg.batch.prompts - few) / (more - few)  # of the step between the two, from the first

    def line(a: float, b: float) -> float:
        return a + share * (b - a)

    def counts(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
        found = {name: round(line(a[name], b[name])) for name in b}
        found["nfe/reference"] += b["nfe/winners"] - found["nfe/winners"]
        return found

    def phase(a: Phase, b: Phase) -> Phase:
        # each kind of moment has a line of its own, and the highest is another with many prompts
        lines = [line(a.moments.get(moment, gb), gb) for moment, gb in b.moments.items()]
        return Phase(
            gb=max(b.gb, *lines, 0.0),
            seconds=line(a.seconds, b.seconds),
            flops=line(a.flops, b.flops),
            rows=round(line(a.rows, b.rows)),
            ledger={kind: line(a.ledger.get(kind, 0.0), t) for kind, t in b.ledger.items()},
        )

    phases = {name: phase(small.phases[name], large.phases[name]) for name in PHASES}
    winners = [told.phases[WINNERS] for told in (small, large)]
    phases[WINNERS] = replace(winners[1], gb=phase(*winners).gb)
    return Extrapolated(
        first=counts(small.first, large.first),
        rows=counts(small.rows, large.rows),
        phases=phases,
        views=large.views,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """Metrics of the first iteration; events and metrics of a usual one; how many copies of the
    trained weights there are; bytes of a rollout's states."""

    first: dict[str, float]
    events: list[Event]
    metrics: dict[str, float]
    views: int
    states: float


def rehearsed(cfg: Config, shapes: CallShapes) -> Rehearsed:
    """A rehearsal, with the bytes of latents and media as they are."""
    numbers, media = torch.Size(shapes.latent).numel(), torch.Size(shapes.media).numel()
    samples = cfg.batch.prompts * cfg.batch.group
    runs, sizes = [], []
    exact = samples * max(numbers, media) <= EXACT
    for side in SMALL[:1] if exact else SMALL:
        latent = shapes.latent if exact else smaller(shapes.latent, side)
        sizes.append(torch.Size(latent).numel())
        drawn = shapes.media if exact else _media(shapes, sizes[-1] / numbers)
        with _one_thread():
            run = Rehearsal(cfg, shapes, latent, drawn)
            runs.append(run.rehearse())
    first, events, metrics, states = runs[-1]
    if len(runs) == 2:
        events = at_size(runs[0][1], events, sizes, numbers)
        states *= numbers / sizes[1]
    return Rehearsed(
        first=first,
        events=events,
        metrics=metrics,
        views=len(run.views) + keeps_reference(run.setup),
        states=states,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors are small: threads would wait for each other longer than they compute, and where
    other programs have the cores, many times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def smaller(shape: Sequence[int], side: int) -> tuple[int, ...]:
    """Latents of the same number of axes: channels as they are, other axes `side` long."""
    channels, *rest = shape
    return (channels, *(side if size > side else size for size in rest))


def _media(shapes: CallShapes, factor: float) -> tuple[int, ...]:
    """Media with `factor` times the numbers of the real ones, in one long row."""
    *lead, height, width = shapes.media
    return (*lead, 1, max(1, round(height * width * factor)))


def at_size(
    small: list[Event], large: list[Event], sizes: Sequence[int], numbers: int
) -> list[Event]:
    """The events of latents of so many numbers, by those of two smaller sizes.

    The rows that policy/winner_gain looks at are drawn among those of positive advantage, which of
    a tree depends on log-probs, and so on the size: its events are those of the larger one.
    """
    slope = (numbers - sizes[0]) / (sizes[1] - sizes[0])
    few, more = ([e for e in events if e.phase != WINNERS] for events in (small, large))
    lines = iter([_extrapolated(a, b, slope) for a, b in zip(few, more, strict=True)])
    return [_scaled(e, numbers / sizes[1]) if e.phase == WINNERS else next(lines) for e in large]


def _scaled(event: Event, factor: float) -> Event:
    """The event with `factor` times the bytes."""
    return replace(
        event, live=factor * event.live, since=factor * event.since, moved=factor * event.moved
    )


def _extrapolated(small: Event, large: Event, slope: float) -> Event:
    """The event at a size that lies `slope` times the step between two others above the first."""
    assert (small.phase, small.asked, small.backward) == (large.phase, large.asked, large.backward)
    names = ("live", "since", "moved")
    line = {
        name: getattr(small, name) + slope * (getattr(large, name) - getattr(small, name))
        for name in names
    }
    return replace(large, **line)
