"""Extrapolate small rehearsals to large runs: latents of two small sizes tell the real ones, and
two numbers of prompts tell all of them. Bytes, rows and seconds are affine in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from flowrl.config.schema import Config
from flowrl.training.budget.call_shapes import CallShapes
from flowrl.training.budget.line import at, on_line
from flowrl.training.budget.phases import PHASES, Phase
from flowrl.training.budget.rehearsal import WINNERS, Event, PolicyCall, Rehearsal, Rehearsed

EXACT = 1 << 21  # most numbers in all latents of an iteration that is rehearsed at full size
ENOUGH = 40  # fewest samples of a rehearsal from which larger ones are extrapolated
SMALL = (4, 8)  # sides of latents that stand in for larger ones


def enough(cfg: Config) -> tuple[int, ...]:
    """Choose the numbers of prompts to rehearse: the config's own, or two smaller ones.

    Prompts are alike, so rows, FLOPs, seconds and bytes lie on a line once an update fills its
    micro-batches and policy/winner_gain has its 16 rows of the better half; micro-batches of a few
    rows would make a rehearsal of all prompts long. Compiled blocks pad the last micro-batch of an
    update, so the two numbers differ by whole micro-batches, which are padded in the same way.
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
    """Rows and phases of a run of any size, as rehearsals tell them."""

    first: dict[str, int]  # metric -> network rows of the first iteration
    rows: dict[str, int]  # metric -> network rows of a usual iteration
    phases: dict[str, Phase]  # phases of a usual iteration


def for_all_prompts(cfg: Config, small: Extrapolated, large: Extrapolated) -> Extrapolated:
    """Extrapolate two rehearsals of fewer prompts (see enough) to all prompts."""
    few, more = enough(cfg)
    share = (cfg.batch.prompts - few) / (more - few)

    def rows(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
        found = {name: round(number) for name, number in at(a, b, share).items()}
        found["nfe/reference"] += b["nfe/winners"] - found["nfe/winners"]
        return found

    def phase(a: Phase, b: Phase) -> Phase:
        # each kind of moment has a line of its own; with more prompts, another kind may be highest
        lines = [at(a.moments.get(moment, gb), gb, share) for moment, gb in b.moments.items()]
        made = on_line(a, b, share, "seconds", "flops", "rows", "ledger")
        return replace(made, gb=max(b.gb, *lines, 0.0), rows=round(made.rows))

    phases = {name: phase(small.phases[name], large.phases[name]) for name in PHASES}
    # the number of the winners' rows does not depend on the number of prompts
    winners = large.phases[WINNERS]
    phases[WINNERS] = replace(winners, gb=phase(small.phases[WINNERS], winners).gb)
    return Extrapolated(
        first=rows(small.first, large.first), rows=rows(small.rows, large.rows), phases=phases
    )


def rehearsed(cfg: Config, shapes: CallShapes) -> Rehearsed:
    """Rehearse a run, with the bytes of real latents and media."""

    def run(latent: tuple[int, ...], media: tuple[int, ...]) -> Rehearsed:
        with _one_thread():
            return Rehearsal(cfg, shapes, latent, media).rehearse()

    numbers, media = torch.Size(shapes.latent).numel(), torch.Size(shapes.media).numel()
    if cfg.batch.prompts * cfg.batch.group * max(numbers, media) <= EXACT:
        return run(shapes.latent, shapes.media)
    latents = [smaller(shapes.latent, side) for side in SMALL]
    sizes = [torch.Size(latent).numel() for latent in latents]
    small, large = (
        run(latent, _media(shapes, size / numbers))
        for latent, size in zip(latents, sizes, strict=True)
    )
    return replace(
        large,
        events=at_size(small.events, large.events, sizes, numbers),
        states=large.states * (numbers / sizes[1]),
    )


def tried(cfg: Config, shapes: CallShapes) -> list[PolicyCall]:
    """List the policy's calls in the trial of a run's rewards; none depends on a size."""
    latent = smaller(shapes.latent, SMALL[0])
    factor = torch.Size(latent).numel() / torch.Size(shapes.latent).numel()
    with _one_thread():
        return Rehearsal(cfg, shapes, latent, _media(shapes, factor)).trial()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, torch uses one thread. Tensors are small: threads would wait for each other longer
    than they compute, and many times as long if other programs use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def smaller(shape: Sequence[int], side: int) -> tuple[int, ...]:
    """Shrink the shape of latents: channels stay, and all other axes become `side` long."""
    channels, *rest = shape
    return (channels, *(side if size > side else size for size in rest))


def _media(shapes: CallShapes, factor: float) -> tuple[int, ...]:
    """Return a shape of one long row, with `factor` times the numbers of the real media."""
    *lead, height, width = shapes.media
    return (*lead, 1, max(1, round(height * width * factor)))


def at_size(
    small: list[Event], large: list[Event], sizes: Sequence[int], numbers: int
) -> list[Event]:
    """Extrapolate the events of two smaller sizes of latents to so many numbers.

    The rows for policy/winner_gain are drawn among those of positive advantage. In a tree these
    depend on log-probs, and so on the size: their events are taken from the larger size.
    """
    share = (numbers - sizes[0]) / (sizes[1] - sizes[0])
    few, more = ([e for e in events if e.phase != WINNERS] for events in (small, large))
    lines = iter([_on_line(a, b, share) for a, b in zip(few, more, strict=True)])
    return [
        _on_line(replace(e, live=0.0, since=0.0, moved=0.0), e, numbers / sizes[1])
        if e.phase == WINNERS
        else next(lines)
        for e in large
    ]


def _on_line(small: Event, large: Event, share: float) -> Event:
    """Extrapolate the bytes of an event to another size."""
    assert (small.phase, small.call, small.backward) == (large.phase, large.call, large.backward)
    return on_line(small, large, share, "live", "since", "moved")
