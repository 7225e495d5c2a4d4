"""The quickstart for several seeds: the figures that README and docs/quickstart.md show.

    python scripts/bench/quickstart_seeds.py --seeds 0 1 2 [optimizer.lr=5e-4 ...]

A seed whose run folder already holds a finished run is not run again. Each line: held-out strict
accuracy before, before with guidance, and after; the paired difference with its 95% interval;
seconds of the whole command; share of an iteration that is not network, VAE or reward. A second
table has the same accuracy for each task, as the mean of the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path


def run(seed: int, folder: Path, overrides: list[str]) -> float:
    """Train one seed in a process of its own -> seconds."""
    began = time.perf_counter()
    words = ["experiment=quickstart", f"seed={seed}", f"output={folder}", *overrides]
    subprocess.run([sys.executable, "-m", "flowrl", "train", *words], check=True)
    seconds = time.perf_counter() - began
    (folder / "seconds.json").write_text(json.dumps(seconds))
    return seconds


def row(seed: int, folder: Path) -> str:
    record = json.loads((folder / "evaluation.json").read_text())
    strict = {r["name"]: r["metrics"]["shapes/strict"]["mean"] for r in record["rows"]}
    paired = record["paired"]["shapes/strict"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    overhead = statistics.median(line["time/overhead_fraction"] for line in lines)
    seconds = json.loads((folder / "seconds.json").read_text())
    # fewer than two prompts have no interval
    interval = f" [{paired['ci'][0]:+.3f}, {paired['ci'][1]:+.3f}]" if paired["ci"] else ""
    return (
        f"| {seed} | {strict['before']:.3f} | {strict['before, guided']:.3f} |"
        f" {strict['after']:.3f} | {paired['difference']:+.3f}{interval} |"
        f" {seconds:.0f} | {overhead:.1%} |"
    )


def tasks(folders: list[Path]) -> list[str]:
    """Lines of a table: strict accuracy of each task, the mean over runs."""
    found: dict[str, dict[str, list[float]]] = {}
    for folder in folders:
        for r in json.loads((folder / "evaluation.json").read_text())["rows"]:
            for task, value in r["tasks"]["shapes/strict"].items():
                found.setdefault(task, {}).setdefault(r["name"], []).append(value)
    names = list(next(iter(found.values())))
    lines = [f"| task | {' | '.join(names)} |", "|-" * (len(names) + 1) + "|"]
    for task, by_name in found.items():
        means = (f"{statistics.mean(by_name[name]):.2f}" for name in names)
        lines.append(f"| {task} | {' | '.join(means)} |")
    return lines


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("runs"))
    # --seeds would take them for numbers
    overrides = [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")]
    args = parser.parse_args([word for word in sys.argv[1:] if word not in overrides])
    folders = {seed: args.output / f"quickstart-seed-{seed}" for seed in args.seeds}
    for seed, folder in folders.items():
        if not (folder / "seconds.json").exists():
            run(seed, folder, overrides)
    columns = ["seed", "before", "before, guided", "after", "difference [95% interval]"]
    columns += ["seconds", "overhead"]
    print(f"| {' | '.join(columns)} |\n{'|-' * len(columns)}|")
    for seed, folder in folders.items():
        print(row(seed, folder))
    print()
    print("\n".join(tasks(list(folders.values()))))


if __name__ == "__main__":
    main()
