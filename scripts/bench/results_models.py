"""The part of docs/results.md about the embedded models beside shapes-sd3."""

from __future__ import annotations

import statistics

import cells
from cells import Cell
from gains import Runs, gain, learns, over_seeds, scores_of, seconds

from flowrl.report.tables import markdown as table


def models_table(done: Runs, others: Runs) -> str:
    """Runs of claims on another model, the largest gain of each model first, beside what the same
    method gained on shapes-sd3 (`done`); "": none."""
    head = [
        "model",
        "method",
        "rate",
        "budget",
        "gain",
        "over seeds [95%]",
        "learns",
        "over texts [95%]",
        "before",
    ]
    head += ["after, by seed", "gain on shapes-sd3", "iterations", "minutes", "alone"]
    ranked = sorted(others.values(), key=lambda runs: (model_of(runs[0]), -gain(runs).mean))
    rows = [_row(runs, done.get(runs[0]["method"])) for runs in ranked]
    return table(head, rows) if rows else ""


def model_of(c: Cell) -> str:
    """The name of the model that a cell trains: the last that its settings state."""
    return _last(c, "model=")


def _last(c: Cell, key: str) -> str:
    """The value of the last of a cell's settings with a key."""
    return [word for word in c["settings"] if word.startswith(key)][-1].removeprefix(key)


def _rate(c: Cell) -> str:
    """The learning rate of a cell, and whether its claim sets it."""
    own = any(word.startswith("optimizer.lr=") for word in cells.CLAIMS[c["claim"]].words)
    return f"{_last(c, 'optimizer.lr=')}, {'by hand' if own else 'tuned'}"


def _row(runs: list[Cell], known: list[Cell] | None) -> list[str]:
    over, pace = gain(runs), seconds(runs[0]["claim"])
    alone = statistics.mean(pace * c["curve"][-1]["calls"] / 60 for c in runs)
    return [
        model_of(runs[0]),
        runs[0]["method"],
        _rate(runs[0]),
        f"{runs[0]['budget']:,}",
        f"{over.mean:+.3f}",
        over_seeds(runs),
        learns(runs, over),
        f"[{over.low:+.3f}, {over.high:+.3f}]",
        f"{cells.score(runs[0], 'before'):.3f}",
        scores_of(runs),
        f"{gain(known).mean:+.3f}" if known else "",
        f"{statistics.mean(c['curve'][-1]['iteration'] for c in runs):.0f}",
        f"{statistics.mean(c['spent']['seconds'] for c in runs) / 60:.1f}",
        f"{alone:.1f}" if alone else "",
    ]
