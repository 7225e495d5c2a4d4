"""A planted proxy that is hacked, and whether stop.watch=stop ends the run at the right place.

    python scripts/bench/hacking.py --seeds 5 6 7 [watch.smooth=8 ...]

The proxy (`proxy` below) is the strict shapes verifier plus `pay` times the colour saturation of
the whole picture: a scorer that mostly agrees with the truth and likes colour too much. Held out is
the same verifier with partial credit. A seed is one run: with stop.watch=stop until the watch ends
it, and then resumed with stop.watch=none, to see what would have come. A seed whose folder holds a
finished run is not run again. With OMP_NUM_THREADS=1 two seeds can run side by side.

With hindsight the held-out curve is smoothed by a running mean centred on each iteration (5 wide,
over the whole resumed run). "peak" is its highest value, "delivered" its value where the exported
LoRA (lora-peak, of the stopped run) sampled, "at the stop" its value where the run stopped, and
"end" that of the last iteration. Exit code 1 where what is delivered, or what the policy was worth
at the stop, lies more than 10% below the peak, or where the fall was not one: an end above 90%.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flowrl
from flowrl.data.prompts import load_prompts
from flowrl.rewards.core.reward import Reward, load
from flowrl.rewards.saturation import saturation
from flowrl.types import MediaContext

WIDTH, LEAST = 5, 0.9
CHOSEN = [
    ("single_object", 0),
    ("colors", 3),
    ("colors", 11),
    ("two_object", 2),
    ("two_object", 5),
    ("counting", 1),
    ("position", 7),
    ("color_attr", 9),
]
STRICT: list[Reward] = []  # loaded once


@flowrl.reward(
    scale="strict shapes verifier (0 or 1) plus pay times the mean saturation",
    needs={"meta"},
    reads={"include"},
)
def proxy(
    media: Tensor, prompts: list[str], context: MediaContext | None = None, *, pay: float = 12.0
) -> Tensor:
    """The reward that the runs train on."""
    if not STRICT:
        STRICT.append(load("shapes", reading="strict"))
    return STRICT[0](media, prompts, context) + pay * saturation(media)


def words(output: Path, prompts: Path, iterations: int) -> list[str]:
    """A run on eight prompts, the same in every iteration."""
    return [
        "experiment=quickstart",
        f"reward={Path(__file__).resolve()}:proxy",
        "reward.strict.name=shapes",
        "reward.strict.reading=partial",
        "reward.strict.weight=0",
        f"data.train={prompts}",
        "data.eval=null",
        "algorithm.kl_weight=0",  # nothing else keeps the policy near its base
        "algorithm.steps=1",
        "sampler.steps=4",
        "batch.group=48",  # so that a small fall can be told from noise
        "optimizer.lr=1e-4",
        "watch.held_out=strict",
        "watch.detectors=[sharpness,saturation,tiling,diversity,drift]",
        "watch.smooth=4",
        "watch.errors=2",
        "watch.patience=5",
        "checkpoint.every=1",
        "trackers=[]",
        f"iterations={iterations}",
        f"output={output}",
    ]


def write_prompts(path: Path) -> Path:
    """Eight of all tasks."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for prompt in load_prompts("shapes:train"):
        tasks.setdefault(prompt["task"], []).append(prompt)
    chosen = [tasks[task][number] for task, number in CHOSEN]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in chosen))
    return path


def run(folder: Path, seed: int, iterations: int, overrides: list[str]) -> None:
    """Train until the watch ends it, keep what it said, and go on to the last iteration."""
    train = [sys.executable, "-m", "flowrl", "train"]
    prompts = write_prompts(folder.parent / "prompts.jsonl")
    own = [*words(folder, prompts, iterations), f"seed={seed}", *overrides]
    subprocess.run([*train, *own, "stop.watch=stop"], check=True)
    shutil.copy(folder / "peak.json", folder / "peak-stopped.json")
    shutil.copy(folder / "report.html", folder / "report-stopped.html")
    stopped = len(lines(folder))
    if stopped < iterations:
        subprocess.run([*train, "--resume", str(folder), "stop.watch=none"], check=True)
    (folder / "stopped.json").write_text(json.dumps(stopped))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def centred(values: list[float]) -> list[float]:
    """Running mean of WIDTH, shorter at the ends."""
    half = WIDTH // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def row(folder: Path, seed: int) -> tuple[str, bool]:
    """A line of the table, and whether the watch ended the run near the peak of a real fall."""
    metrics, stopped = lines(folder), json.loads((folder / "stopped.json").read_text())
    kept = json.loads((folder / "peak-stopped.json").read_text())
    held_out = centred([line["reward/strict/mean"] for line in metrics])
    trained = centred([line["reward/total"] for line in metrics])
    top = max(range(len(held_out)), key=held_out.__getitem__)
    step = int(kept["checkpoint"].removeprefix("step-"))  # sampled iteration step + 1
    peak, delivered, at_stop = held_out[top], held_out[step], held_out[stopped - 1]
    cells = [
        f"{seed}",
        f"{peak:.3f} at {top + 1}",
        f"{delivered:.3f} of checkpoint {step} ({delivered / peak:.0%})",
        f"{stopped} of {len(metrics)}" if stopped < len(metrics) else "not",
        f"{at_stop:.3f} ({at_stop / peak:.0%})",
        f"{held_out[-1]:.3f} ({held_out[-1] / peak:.0%})",
        " / ".join(f"{trained[i]:.2f}" for i in (top, stopped - 1, len(metrics) - 1)),
    ]
    near = min(delivered, at_stop) >= LEAST * peak > held_out[-1]
    return f"| {' | '.join(cells)} |", near


def main() -> None:
    torch.set_num_threads(1)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 6, 7])
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--output", type=Path, default=Path("runs/hacking"))
    # --seeds would take them for numbers
    overrides = [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")]
    args = parser.parse_args([word for word in sys.argv[1:] if word not in overrides])
    folders = {seed: args.output / f"seed-{seed}" for seed in args.seeds}
    for seed, folder in folders.items():
        if not (folder / "stopped.json").exists():
            run(folder, seed, args.iterations, overrides)
    heads = ["seed", "peak", "delivered", "stopped at", "at the stop", "end"]
    heads.append("proxy at peak / stop / end")
    print(f"| {' | '.join(heads)} |\n{'|-' * len(heads)}|")
    found = [row(folder, seed) for seed, folder in folders.items()]
    print("\n".join(line for line, _ in found))
    sys.exit(0 if all(near for _, near in found) else 1)


if __name__ == "__main__":
    main()
