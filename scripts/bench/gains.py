"""Gains of the runs of docs/results.md, with their intervals, and tables of them."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass

import cells
from cells import Cell

from flowrl.data.prompts import load_prompts
from flowrl.runtime.statistics import Paired, paired_bootstrap, paired_over_runs
from flowrl.runtime.statistics import student as student_interval

ENOUGH = 3  # seeds, for a sentence about a method
Runs = dict[str, list[Cell]]  # finished cells of each method or claim


@dataclass(frozen=True, slots=True)
class Gain:
    """A change of strict accuracy with its 95% interval."""

    mean: float  # after minus before, as a share of the pictures
    low: float  # where the interval begins
    high: float  # and ends

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def results(planned: list[Cell]) -> list[Cell]:
    """Results of those cells that were run."""
    return [r for c in planned if (r := cells.result(c))]


def seed_gain(runs: list[Cell]) -> Gain | None:
    """Mean over seeds of after - before, and Student's interval over seeds; None: one seed.

    It speaks about a method, that is about a run with another seed, on these held-out texts.
    """
    return student(gains_of(runs)) if len(runs) > 1 else None


def gains_of(runs: list[Cell]) -> list[float]:
    """after - before of each run."""
    share = [[statistics.mean(marks(c[key])) for key in ("images_before", "images")] for c in runs]
    return [after - before for before, after in share]


def student(values: list[float]) -> Gain:
    """Mean of at least two values, one a seed, and Student's 95% interval."""
    over = student_interval(values)
    return Gain(over.mean, *over.ci)


def learns(runs: list[Cell], texts: Gain) -> str:
    """Whether a method learns: yes or no with enough seeds, where the intervals over seeds and over
    texts both leave out 0. Seeds may all change the same picture, and then theirs has no width."""
    over = seed_gain(runs)
    if over is None or len(runs) < ENOUGH:
        return "open"
    low, high = min(over.low, texts.low), max(over.high, texts.high)
    if low <= 0 <= high:
        return "open"
    return "yes" if low > 0 else "no"


def seconds(name: str) -> float:
    """Seconds that a network row of a method or claim takes alone on the machine; 0: not measured.

    A row is timed and not an iteration: groups without a signal are not trained, so iterations
    differ over a run.
    """
    timed = results(cells.timing(name))
    if not timed:
        return 0.0
    (first, *_), last = timed[0]["curve"], timed[0]["curve"][-1]
    return (last["seconds"] - first["seconds"]) / (last["calls"] - first["calls"])


def over_seeds(runs: list[Cell]) -> str:
    """The interval over seeds as a table shows it; too few seeds are marked."""
    over = seed_gain(runs)
    if over is None:
        return "one seed"
    few = f", {len(runs)} seeds" if len(runs) < ENOUGH else ""
    return f"[{over.low:+.3f}, {over.high:+.3f}]{few}"


def gain(runs: list[Cell]) -> Gain:
    """Mean over seeds of after - before, and its interval over texts: it speaks of these runs."""
    before, after = ([marks(c[key]) for c in runs] for key in ("images_before", "images"))
    return _over_texts(before, after, cells.world_of(runs[0]))


def few_gain(c: Cell) -> Gain:
    """Gain of a run on few prompts; its interval is over images: it is about these texts alone."""
    return _gain(paired_bootstrap(marks(c["images_before"]), marks(c["images"])))


def _gain(change: Paired) -> Gain:
    return Gain(change.difference, *change.ci)


def _over_texts(before: list[list[float]], after: list[list[float]], world: str) -> Gain:
    """Marks of the images of each run -> the mean change over runs, and its interval over texts."""
    groups = texts_of(f"{world}:eval", len(before[0]))
    return _gain(paired_over_runs(before, after, groups=groups))


def marks(text: str) -> list[float]:
    """A missing verdict counts as wrong: the reward's own rule for what it cannot judge."""
    return [float(c == "1") for c in text]


@functools.cache
def texts_of(source: str, images: int) -> list[str]:
    """The text of each image, which is resampled: held-out data holds some texts several times."""
    prompts = load_prompts(source)
    return [prompts[i % len(prompts)]["prompt"] for i in range(images)]


def settings_of(c: Cell) -> dict[str, str]:
    """The settings that a cell's words state, the last value of each."""
    return dict(word.split("=", 1) for word in c["words"])


def scores_of(runs: list[Cell]) -> str:
    return ", ".join(f"{cells.score(c):.3f}" for c in runs)


def difference(runs: list[Cell], others: list[Cell]) -> str:
    """What the others change in strict accuracy, over the seeds that both have; "": none."""
    mine, theirs = ({c["seed"]: c for c in own} for own in (runs, others))
    seeds = sorted(mine.keys() & theirs.keys())
    if not seeds:
        return ""
    before, after = ([marks(way[s]["images"]) for s in seeds] for way in (mine, theirs))
    change = _over_texts(before, after, cells.world_of(runs[0]))
    each = [cells.score(theirs[s]) - cells.score(mine[s]) for s in seeds]
    listed = ", ".join(f"{value:+.3f}" for value in each)
    said = f"{change} over texts; by seed {listed}"
    if len(each) < 2:
        return f"{said}."
    over = student(each)
    return f"{said},\nwhich gives [{over.low:+.3f}, {over.high:+.3f}] over seeds."
