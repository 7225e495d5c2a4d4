"""What each algorithm buys: the runs of docs/results.md, in a queue that can stop and go on.

    python scripts/bench/algorithms.py tune   [METHOD ...]   rate, then clip: a third of the budget
    python scripts/bench/algorithms.py run    [METHOD ...]   the best setting, three seeds
    python scripts/bench/algorithms.py claims [CLAIM ...]    runs that the papers' claims need
    python scripts/bench/algorithms.py search [SEARCH ...]   the untrained model, at inference
    python scripts/bench/algorithms.py time   [NAME ...]     seconds a row, alone on the machine
    python scripts/bench/results_page.py                     the page, from the cells that are there

All share model, prompts, reward, LoRA and budget. `time` knows methods and claims. A cell is one
run, in docs/results/cells/NAME.json; a cell that is there is not run again. The budget counts
network rows: forward of the rollout and of references 1, forward and backward of a trained row 3.
--workers 2 runs two cells side by side, one thread each. The seconds of the page are rows times the
seconds a row that `time` measured, which takes no --workers: keep the machine free for it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import at_inference
import cells
import torch
from cells import Cell

from flowrl.config.load import load_config
from flowrl.report.comparison import network_rows
from flowrl.training.loop import Trainer
from flowrl.training.outputs import evaluate
from flowrl.training.watch.guards import Dead

TIMED = 4  # iterations of a timing; the first is left out
LOGGED = (
    "reward/total",
    "policy/kl",
    "policy/winner_gain",
    "policy/grad_norm",
    "policy/clip_fraction",
    "time/overhead_fraction",
)


def train(c: Cell) -> Cell:
    """Run a cell in this process until its budget is spent, or the iterations of a timing are."""
    load = round(os.getloadavg()[0], 2)  # before the start: what else was running
    with tempfile.TemporaryDirectory() as folder:
        words = [f"output={folder}/run", f"eval.at_start={is_whole(c)}"]
        trainer = Trainer(load_config(None, [*c["settings"], *words]))
        spent, curve, dead = follow(trainer, c)
        made = c | {
            "machine": machine() | {"load": load},
            "commit": commit(),
            "spent": spent,
            "curve": curve,
            "stopped": trainer.stopped or dead,
        }
        if c["kind"] == "time":
            return made
        evaluate(trainer, "after")
        if c.get("claim", "").startswith("kl_"):
            made["rlg"] = at_inference.by_weight(trainer)
        record = json.loads((Path(folder) / "run" / "evaluation.json").read_text())
        if c.get("claim", "").startswith("specialist_"):  # a teacher of opd
            trainer.finish()
            kept = cells.FOLDER.parents[1] / "build" / "bench" / c["claim"]
            shutil.copytree(Path(folder) / "run" / "lora", kept, dirs_exist_ok=True)
    return made | read(record, c)


def is_whole(c: Cell) -> bool:
    """Evaluated before and on its way: tuning looks at the end only, a timing never."""
    return c["kind"] in ("run", "claim")


def follow(trainer: Trainer, c: Cell) -> tuple[dict[str, float], list[dict[str, float]], str]:
    """(what was spent, a point of the curve for each iteration, why a guard ended the run before
    its budget was spent: a model that is never right teaches nothing)."""
    curve: list[dict[str, float]] = []
    spent = {"calls": 0.0, "rows": 0.0, "seconds": 0.0}
    on_the_way = is_whole(c) and c.get("claim") not in cells.OTHER_MODELS | cells.MASKED
    marks = [c["budget"] * share for share in cells.MARKS if on_the_way]
    try:
        for it in trainer:
            m = it.metrics
            spent["calls"] += network_rows(m)
            spent["rows"] += m["policy/rows"]
            spent["seconds"] += m["time/iteration"]
            point = {"iteration": it.number, **{k: round(v, 1) for k, v in spent.items()}}
            point |= {k: float(f"{m[k]:.4g}") for k in LOGGED if k in m}
            if marks and spent["calls"] >= marks[0]:
                marks = [x for x in marks if x > spent["calls"]]
                point |= held_out(trainer, c)
            curve.append(point)
            timed = c["kind"] == "time"
            done = it.number == TIMED if timed else spent["calls"] >= c["budget"]
            if done or trainer.stopped:
                break
    except Dead as dead:
        return spent, curve, str(dead)
    return spent, curve, ""


def held_out(trainer: Trainer, c: Cell) -> dict[str, float]:
    """Strict accuracy, and the other reward where one is trained on."""
    means = evaluate(trainer)
    keys = {"proxy": "eval/clip", "preference": "eval/preference"}
    others = {name: means[key] for name, key in keys.items() if key in means}
    return {"strict": means[f"eval/{cells.world_of(c)}/strict"], **others}


def read(record: dict[str, Any], c: Cell) -> dict[str, Any]:
    """What a cell keeps of evaluation.json."""
    rows = {row["name"]: row for row in record["rows"]}
    after, before = rows["after"], rows["before"] if is_whole(c) else None
    return {
        "before": before["metrics"] if before else None,
        "after": after["metrics"],
        "paired": record.get("paired"),
        "tasks": after["tasks"],
        "images": marks_of(after, c),
        "images_before": marks_of(before, c) if before else None,
    }


def marks_of(row: dict[str, Any], c: Cell) -> str:
    """Right (1), wrong (0) or missing (.) of each held-out image."""
    values = row["values"][f"{cells.world_of(c)}/strict"]
    return "".join("." if v is None else str(int(v)) for v in values)


def machine() -> dict[str, Any]:
    device = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return run.stdout.strip() or "unknown"


# ---------------------------------------------------------------------------
# the queue


def start(c: Cell, threads: int) -> str:
    """Run a cell in a process of its own, on so many threads -> a line about it."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "cell", json.dumps(c)]
    root = cells.FOLDER.parents[1]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=root)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return f"{c['name']} FAILED: {said[-1] if said else done.returncode}"
    return f"{c['name']} {done.stdout.strip().splitlines()[-1]}"


def work(
    cells_of: Callable[[str], list[Cell]], names: list[str], workers: int, threads: int
) -> None:
    """Run every cell that `cells_of(name)` gives and that is missing, until there is none."""
    tried: set[str] = set()
    while True:
        known = [c for name in names for c in cells_of(name)]
        todo = [c for c in known if not cells.path_of(c).exists() and c["name"] not in tried]
        if not todo:
            if not tried:
                print(nothing_to_do(known))
            return
        tried |= {c["name"] for c in todo}
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for line in pool.map(lambda c: start(c, threads), todo):
                print(line, flush=True)


def nothing_to_do(known: list[Cell]) -> str:
    if not known:
        return "no cell can be named yet: `tune` comes first"
    path = cells.path_of(known[0])
    return f"all {len(known)} cells are there; to run one again, remove it: {path}"


def run_cell(text: str) -> None:
    """Run the cell given as JSON, write its result, and print a line about it."""
    c = json.loads(text)
    out = at_inference.searched(c) if c["kind"] == "search" else train(c)
    path = cells.path_of(c)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(out, indent=None, separators=(",", ":")) + "\n")
    if c["kind"] == "search":
        print(f"strict {out['images'].count('1') / len(out['images']):.3f}")
        return
    strict = f"strict {cells.score(out):.3f} after " if "after" in out else ""
    print(f"{strict}{len(out['curve'])} iterations, {out['spent']['seconds']:.0f} s")


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    out = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    out.add_argument("what", choices=["tune", "run", "claims", "search", "time", "cell"])
    out.add_argument("words", nargs="*")
    out.add_argument("--workers", type=int, default=1)
    out.add_argument("--threads", type=int, help="of each run; default: its share of the cores")
    out.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of `run`")
    return out


def main() -> None:
    args = parser().parse_intermixed_args()
    if args.what == "cell":
        run_cell(args.words[0])
        return
    finals = functools.partial(cells.finals, seeds=tuple(args.seeds))
    of: dict[str, Callable[[str], list[Cell]]] = {
        "tune": cells.tuning,
        "run": finals,
        "claims": cells.claims,
        "search": cells.searches,
        "time": cells.timing,
    }
    known = {
        "claims": [*cells.CLAIMS],
        "search": [*cells.SEARCHES],
        "time": [*cells.METHODS, *cells.TIMED_CLAIMS],
    }
    names = known.get(args.what, [*cells.METHODS, *cells.CLIMBING])
    if unknown := set(args.words) - set(names):
        parser().error(f"unknown {sorted(unknown)[0]}; there are {', '.join(names)}")
    workers = 1 if args.what == "time" else args.workers
    threads = args.threads or max(1, (os.cpu_count() or 1) // workers)
    work(of[args.what], args.words or names, workers, threads)


if __name__ == "__main__":
    main()
