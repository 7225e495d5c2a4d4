"""What a run takes against loops of published research code, in pairs, on a free machine.

    python scripts/bench/against_reference.py [--threads 2] [--only tree_grpo] [--pairs 7]
    python scripts/bench/against_reference.py --arch middle --prompts 1 --only tree_grpo

tree_grpo: against chains whose steps in the same window are trained. mix_grpo: against chains of
which all steps but the last are trained. Both save rows; `counted` is the ratio of trained network
rows. The reference loop's own seconds a row predict what ours should take; `reached` is that over
what it took, in rollout and update. nft: against a loop written by hand that makes the same
forwards, but for the few of policy/winner_gain; `reached` is our seconds over its. rollout: a
network call of our engine against one of the pipeline's own loop (scripts/bench/sampler.py), for 16
pictures and, held to nothing, for 4: bookkeeping takes the same time at any size.
Decoding and rewards are left out. Every loop runs at its own best micro-batch, each comparison in a
process of its own. Pairs take turns in alternating order; figures are medians over pairs with a 95%
bootstrap interval. Both sides keep the memory that they free: which of them returns pages to the
system, and takes them again, depends on what was allocated before, and would be measured too.
Prints Markdown; exit code 1 beyond a limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import random_pipeline
import sampler
import torch
from throughput import config, guidance_of, numbered, reference_of, trainer_of

from flowrl.config.schema import Config
from flowrl.training.loop import Trainer

Metrics = dict[str, float]
Iterate = Callable[[], Metrics]
SETTINGS = {
    "tree_grpo": ["algorithm.window.schedule=frozen"],
    "mix_grpo": ["algorithm.window.schedule=frozen", "sampler.steps=8", "batch.group=24"],
    "nft": ["batch.group=24"],
}
WINDOW = {"tree_grpo": (0, 1, 2)}  # trained steps of the reference; others: all but the last
MICRO = (16, 32, 48, 64)  # network rows in a forward that are tried
LIMITS = {"tree_grpo": 0.97, "mix_grpo": 0.97, "nft": 1.05, "rollout": 1.02}
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_MMAP_THRESHOLD_": str(4 << 30)}  # of glibc
HEAD = "| what | counted | measured | reached [95%] | must be |\n|-|-|-|-|-|"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A row of the table: what one comparison found."""

    what: str  # method and part of its iteration
    counted: str  # the saving that the numbers of network rows promise, as text
    measured: str  # the saving that the seconds show, as text
    reached: list[float]  # share of what was promised, or ratio of seconds; one a pair
    held: bool = True  # False: printed, and held to no limit

    def row(self, most: bool, limit: float) -> str:
        low, high = interval(self.reached)
        must = f"{'at most' if most else 'at least'} {limit}" if self.held else ""
        return (
            f"| {self.what} | {self.counted} | {self.measured} |"
            f" {statistics.median(self.reached):.3f} [{low:.3f}, {high:.3f}] | {must} |"
        )


def interval(values: list[float]) -> tuple[float, float]:
    """95% bootstrap interval of the median."""
    drawn = np.random.default_rng(0).choice(np.array(values), (2000, len(values)))
    low, high = np.quantile(np.median(drawn, 1), [0.025, 0.975])
    return float(low), float(high)


def took(line: Metrics) -> float:
    """Seconds of rollout and update, with all that belongs to them."""
    left_out = sum(line.get(f"time/{name}", 0.0) for name in ("decode", "reward", "encode"))
    return line["time/iteration"] - left_out


def ours(method: str, arch: str, cfg: Config, folder: Path) -> tuple[Trainer, Iterate]:
    """flowrl's loop at its best micro-batch, warm."""
    pipe = random_pipeline.build(arch, torch.device("cpu"), torch.float32)
    trainer = trainer_of(cfg, pipe, folder, 0)
    iterate = numbered(trainer)
    iterate()
    tried = {}
    for rows in MICRO:
        set_micro(trainer, rows)
        tried[rows] = min(took(iterate()) for _ in range(2))
    best = min(tried, key=tried.__getitem__)
    print(f"{method}: flowrl {_told(tried)}", flush=True)
    set_micro(trainer, best)
    return trainer, iterate


def set_micro(trainer: Trainer, rows: int) -> None:
    """At most `rows` network rows in a forward from now on."""
    cfg = trainer.cfg
    cfg = cfg.model_copy(update={"batch": cfg.batch.model_copy(update={"micro": rows})})
    trainer.source = replace(trainer.source, cfg=cfg)
    branches = trainer.policy.branches(trainer.source.guidance)
    trainer.learner.micro = max(1, rows // branches)


def theirs(method: str, arch: str, cfg: Config) -> Iterate:
    """The reference loop at its best micro-batch, warm."""
    pipe = random_pipeline.build(arch, torch.device("cpu"), torch.float32)
    loop = reference_of(cfg, method, pipe, micro=1, trained=WINDOW.get(method))
    branches = 2 if guidance_of(cfg, method) > 1 else 1
    loop.set_micro(16)
    loop.iterate(decode=False)
    tried = {}
    for rows in MICRO:
        loop.set_micro(max(1, rows // branches))
        tried[rows] = min(took(loop.iterate(decode=False)) for _ in range(2))
    print(f"{method}: reference {_told(tried)}", flush=True)
    loop.set_micro(max(1, min(tried, key=tried.__getitem__) // branches))
    return lambda: loop.iterate(decode=False)


def _told(tried: dict[int, float]) -> str:
    each = ", ".join(f"{rows}: {seconds:.2f} s" for rows, seconds in tried.items())
    return f"by network rows in a forward {each}"


def paired(one: Iterate, other: Iterate, pairs: int) -> list[tuple[Metrics, Metrics]]:
    """Both, in alternating order."""
    out = []
    for k in range(pairs):
        if k % 2:
            second = other()
            out.append((one(), second))
        else:
            out.append((one(), other()))
    return out


def predicted(a: Metrics, b: Metrics) -> float:
    """Seconds that our rows (a) would take at the reference's (b) seconds a row: forwards without a
    gradient at those of its rollout, trained rows at those of its update."""
    forward = b["time/rollout"] / b["nfe/rollout"]
    trained = b["time/update"] / b["nfe/update"]
    free = a["nfe/rollout"] + a.get("nfe/reference", 0.0)
    return forward * free + trained * a["nfe/update"]


def saving(method: str, pairs: list[tuple[Metrics, Metrics]]) -> list[Found]:
    """Compare rollout and update together, and the update alone. Its forwards for
    policy/winner_gain, which the reference loops do not log, are left out."""
    (a, b), key = pairs[0], "time/update"
    rows = b["nfe/update"] / a["nfe/update"]
    whole = statistics.median(took(b) / predicted(a, b) for a, b in pairs)
    return [
        Found(
            what=f"{method}, iteration",
            counted=f"{whole:.2f}x",
            measured=f"{statistics.median(took(b) / took(a) for a, b in pairs):.2f}x",
            reached=[predicted(a, b) / took(a) for a, b in pairs],
        ),
        Found(
            what=f"{method}, update",
            counted=f"{rows:.2f}x",
            measured=f"{statistics.median(b[key] / a[key] for a, b in pairs):.2f}x",
            reached=[b[key] / a[key] / rows for a, b in pairs],
        ),
    ]


def by_hand(method: str, pairs: list[tuple[Metrics, Metrics]]) -> list[Found]:
    """nft: the same forwards."""
    counts = [
        sum(line[f"nfe/{p}"] for p in ("rollout", "reference", "update")) for line in pairs[0]
    ]
    ratios = [took(a) / took(b) for a, b in pairs]
    rows = f"{counts[0]:.0f} and {counts[1]:.0f} rows"
    middle = f"{statistics.median(ratios):.3f}x its seconds"
    return [Found(what=f"{method}, iteration", counted=rows, measured=middle, reached=ratios)]


def rollout(pairs: int, pictures: int, *, held: bool) -> Found:
    """Our engine's network call against the pipeline's own loop."""
    policy = sampler.load_policy(sampler.random_sd3(4), max_sequence_length=12)
    policy.pipe.set_progress_bar_config(disable=True)
    prompts = sampler.PROMPTS * (pictures // len(sampler.PROMPTS))
    timed = sampler.timed_pairs(policy, 10, prompts, pairs)
    ratios = [cost[sampler.ours] / cost[sampler.theirs] for cost in timed]
    ms = [
        1e3 * statistics.median(cost[fn] for cost in timed) for fn in (sampler.ours, sampler.theirs)
    ]
    told = f"{ms[0]:.2f} against {ms[1]:.2f} ms a call"
    what = f"rollout of {pictures} pictures"
    return Found(what=what, counted="1x", measured=told, reached=ratios, held=held)


def compared(what: str, arch: str, prompts: int, pairs: int, threads: int) -> list[Found]:
    """The figures of one of LIMITS."""
    torch.set_num_threads(threads)
    if what == "rollout":
        sizes = {16: True, 4: False}  # pictures, and whether they are held to the limit
        return [rollout(4 * pairs, n, held=held) for n, held in sizes.items()]
    cfg = config(arch, what, [*SETTINGS[what], f"batch.prompts={prompts}"])
    with tempfile.TemporaryDirectory() as folder:
        _, own = ours(what, arch, cfg, Path(folder) / "run")
        found = paired(own, theirs(what, arch, cfg), pairs)
    return by_hand(what, found) if what == "nft" else saving(what, found)


def main() -> None:
    if not KEPT.items() <= os.environ.items():  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEPT})
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=7)
    archs = ("shapes-sd3", "middle")
    parser.add_argument("--arch", default=archs[0], choices=archs)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=list(LIMITS), choices=LIMITS)
    given = parser.parse_args()
    rows, failed = [], False
    for what in given.only:
        most = what in ("nft", "rollout")
        asked = (what, given.arch, given.prompts, given.pairs, given.threads)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found = process.submit(compared, *asked).result()
        for entry in found:
            rows.append(entry.row(most, LIMITS[what]))
            middle = statistics.median(entry.reached)
            missed = middle > LIMITS[what] if most else middle < LIMITS[what]
            failed |= entry.held and missed
    print(
        f"\n{given.arch}, {given.threads} threads, torch {torch.__version__}, {given.pairs} pairs\n"
    )
    print(HEAD, *rows, sep="\n")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
