"""A long run leaks nothing: memory, open files, threads and children over many tiny iterations.

    python scripts/bench/long_run.py                       # 1,000 iterations, on quiet cores
    python scripts/bench/long_run.py --iterations 200 batch.overlap=1

The run is a whole one, with evaluations, checkpoints, samples and a tracker, in this process. Every
10 iterations /proc is read. After the warm-up a line is fitted to each column: the median of the
slopes of all pairs of points (Theil-Sen), with the 95% interval of Sen, and how much that is over
the iterations fitted. Exit code 1 where memory grows: the whole interval is above 0, and the growth
is more than one arena of the allocator (1 MiB); or where open files, threads or children are more
at the end than after the warm-up.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

EVERY = 10  # iterations between two readings
WARM_UP = 0.2  # of the iterations: caches fill, the allocator finds its size
ARENA = 1024.0  # KiB
OPTIONS = [
    "algorithm=flow_grpo",
    "model=shapes-sd3",
    "reward=shapes",
    "batch.prompts=2",
    "batch.group=2",
    "sampler.steps=4",
    "eval.images=4",
    "eval.steps=2",
    "eval.every=50",
    "checkpoint.every=20",
    "trackers=[tensorboard]",
    "guard.stop_after=null",
]
GROWS = ("files", "threads", "children")  # counts that must not be higher at the end


def reading() -> dict[str, float]:
    """Count KiB in memory or swapped out, open files, threads and children of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    children = [task.joinpath("children").read_text() for task in Path("/proc/self/task").iterdir()]
    return {
        "memory": float(sum(int(status[name].split()[0]) for name in ("VmRSS", "VmSwap"))),
        "files": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(status["Threads"]),
        "children": float(sum(len(text.split()) for text in children)),
    }


def slope(x: list[float], y: list[float]) -> tuple[float, float, float]:
    """Theil-Sen slope of at least 3 points, and its 95% interval (Sen 1968, without ties)."""
    pairs = itertools.combinations(zip(x, y, strict=True), 2)
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)
    n, count = len(x), len(slopes)
    width = 1.96 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(0, round((count - width) / 2))
    high = min(count - 1, round((count + width) / 2))
    return statistics.median(slopes), slopes[low], slopes[high]


def measured(words: list[str], iterations: int) -> dict[str, list[float]]:
    """Readings of a run, and the iterations at which they were taken."""
    import torch

    import flowrl

    torch.set_num_threads(1)
    columns: dict[str, list[float]] = {"iteration": []}
    with tempfile.TemporaryDirectory() as folder:
        all_words = [*OPTIONS, *words, f"iterations={iterations}", f"output={folder}/run"]
        trainer = flowrl.Trainer(flowrl.load_config(None, all_words))
        for it in trainer:
            if it.number % EVERY == 0:
                for name, value in {"iteration": float(it.number), **reading()}.items():
                    columns.setdefault(name, []).append(value)
                print(f"{it.number:6}", *(f"{columns[n][-1]:g}" for n in columns), file=sys.stderr)
    return columns


def report(columns: dict[str, list[float]]) -> bool:
    """Print a row for each column -> whether none of them grows."""
    x = columns["iteration"]
    first = min(int(len(x) * WARM_UP), len(x) - 3)
    fitted, well = x[first:], True
    print(f"{'':10}{'first':>12}{'last':>12}{'slope':>12}  95% interval, an iteration")
    for name, values in columns.items():
        if name == "iteration":
            continue
        y = values[first:]
        middle, low, high = slope(fitted, y)
        grown = middle * (fitted[-1] - fitted[0])
        grows = y[-1] > y[0] if name in GROWS else low > 0 and grown > ARENA
        well &= not grows
        unit = " KiB" if name == "memory" else ""
        print(
            f"{name:10}{y[0]:12g}{y[-1]:12g}{middle:12.4g}  [{low:.4g}, {high:.4g}]{unit}"
            f"{'  GROWS' if grows else ''}"
        )
    return well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=1000, help="at least 40")
    parser.add_argument("words", nargs="*", help="settings, as of flowrl train")
    args = parser.parse_args()
    if args.iterations < 4 * EVERY:
        parser.error(f"--iterations={args.iterations}: a line needs at least {4 * EVERY}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(0 if report(measured(args.words, args.iterations)) else 1)


if __name__ == "__main__":
    main()
