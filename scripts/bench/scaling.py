"""How the seconds of an iteration grow: exponents fitted over prompts, group, steps, resolution,
LoRA rank and processes.

    python scripts/bench/scaling.py [--only steps rank] [--repeats 5] [--threads 1]

The embedded model and flow_grpo with random rewards; one thing changes at a time. Each round runs
one iteration of every value, in alternating order. The exponent is the slope of log seconds over
log value, by least squares over all rounds, with its 95% interval. Resolution is in pixels of a
picture. Processes talk by gloo and share the same prompts, on one thread each: with as many cores,
-1 is ideal. Keep the machine free. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import processes
import torch

import flowrl
from flowrl.runtime.statistics import student_quantile
from flowrl.training.budget.rehearsal import scores
from flowrl.training.loop import Trainer

SHARED = [
    "model=shapes-sd3",
    "algorithm=flow_grpo",
    "algorithm.kl_weight=0",
    "reward=jpeg",
    "data=shapes",
    "data.eval=null",
    "batch.prompts=2",
    "batch.group=8",
    "batch.updates=1",
    "batch.micro=64",
    "sampler.steps=6",
    "sampler.guidance=none",
    "train.lora.rank=16",
    "model.self_check=false",
    "guard.check_rewards=false",
    "eval.baseline_guidance=null",
    "trackers=[]",
]
AXES: dict[str, tuple[int, ...]] = {
    "prompts": (1, 2, 4, 8),
    "group": (4, 8, 16, 32),
    "steps": (3, 6, 12, 24),
    "resolution": (32, 64, 96, 128),
    "rank": (4, 16, 64, 128),
    "processes": (1, 2),
}
WORDS: dict[str, Callable[[int], list[str]]] = {
    "prompts": lambda n: [f"batch.prompts={n}"],
    "group": lambda n: [f"batch.group={n}"],
    "steps": lambda n: [f"sampler.steps={n}"],
    "resolution": lambda n: [f"model.pipeline.height={n}", f"model.pipeline.width={n}"],
    "rank": lambda n: [f"train.lora.rank={n}"],
    "processes": lambda n: ["batch.prompts=4"],
}


def trainer_of(words: list[str], folder: Path) -> Trainer:
    """A run of the embedded model with random rewards."""
    cfg = flowrl.load_config(None, [*SHARED, *words, f"output={folder}"])
    return Trainer(cfg, rewards={"random": scores("random")})


def of_one_process(axis: str, values: tuple[int, ...], rounds: int) -> list[tuple[int, float]]:
    """(value, seconds of an iteration) of every round."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        made = {n: trainer_of(WORDS[axis](n), Path(folder) / str(n)) for n in values}
        for k in range(rounds + 1):  # the first one warms up
            order = values if k % 2 else values[::-1]
            for n in order:
                seconds = made[n].iterate(k).metrics["time/iteration"]
                if k:
                    found.append((n, seconds))
    return found


def of_processes(values: tuple[int, ...], rounds: int) -> list[tuple[int, float]]:
    """The same of the number of processes: the slowest one counts."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for n in values:
            place = Path(folder) / str(n)
            ranks = processes.on(n, lambda place=place: _iterate(place, rounds))
            found += [(n, max(each)) for each in zip(*ranks, strict=True)]
    return found


def _iterate(folder: Path, rounds: int) -> list[float]:
    """Seconds of each iteration after the first one, in this process."""
    trainer = trainer_of(WORDS["processes"](0), folder)
    out = []
    for k in range(rounds + 1):
        began = time.perf_counter()
        trainer.iterate(k)
        out.append(time.perf_counter() - began)
    return out[1:]


def exponent(found: list[tuple[int, float]]) -> tuple[float, float]:
    """Slope of log seconds over log value, and the half of its 95% interval."""
    x, y = (np.log([pair[k] for pair in found]) for k in (0, 1))
    x = x - x.mean()
    slope = float(x @ y / (x @ x))
    rest = y - y.mean() - slope * x
    error = math.sqrt(float(rest @ rest) / max(1, len(x) - 2) / float(x @ x))
    return slope, student_quantile(len(x) - 2) * error


def row(axis: str, found: list[tuple[int, float]]) -> str:
    """A line of the table; resolution by pixels."""
    pairs = [(n * n, s) for n, s in found] if axis == "resolution" else found
    slope, half = exponent(pairs)
    values = sorted({n for n, _ in found})
    middle = [statistics.median(s for n, s in found if n == value) for value in values]
    seconds = ", ".join(f"{s:.3g}" for s in middle)
    told = ", ".join(map(str, values))
    return f"| {axis} | {told} | {seconds} | {slope:.2f} [{slope - half:.2f}, {slope + half:.2f}] |"


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", nargs="+", default=list(AXES), choices=AXES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    if given.repeats < 3:
        parser.error("--repeats should be at least 3: an interval needs more than a line")
    lines: dict[str, Any] = {}
    for axis in ("processes", *AXES):  # processes first: they fork, and threads are not started yet
        if axis not in given.only or axis in lines:
            continue
        torch.set_num_threads(1 if axis == "processes" else given.threads)
        if axis == "processes":
            lines[axis] = row(axis, of_processes(AXES[axis], given.repeats))
        else:
            lines[axis] = row(axis, of_one_process(axis, AXES[axis], given.repeats))
        print(lines[axis], flush=True)
    print(f"\n{given.threads} threads, torch {torch.__version__}\n")
    print("| over | values | seconds of an iteration | exponent [95%] |\n|-|-|-|-|")
    print(*(lines[axis] for axis in AXES if axis in lines), sep="\n")


if __name__ == "__main__":
    main()
