"""Two checkouts train alike: seeded runs of several methods are compared bit by bit.

    git worktree add ../before main
    python scripts/bench/same_runs.py ../before .

Each method runs for ten iterations in each checkout, in a process of its own on one thread. Equal
must be: every number of metrics.jsonl (without times, memory and mfu), the evaluation, and the
exported LoRA. Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

METHODS = {  # name: what it needs beside OPTIONS; a group is a multiple of the plan's leaves
    "flow_grpo": ["batch.group=8"],
    "mix_grpo": ["batch.group=12"],
    "branch_grpo": ["batch.group=16", "algorithm.tree.splits=[0,2]"],  # four splits want 20 steps
    "tree_grpo": ["batch.group=27"],
    "nft": ["batch.group=8"],
    "crd": ["batch.group=8"],
    "dpo": ["batch.group=8"],
    "reinflow": ["batch.group=8"],
    "texforce": ["batch.group=8", "sampler.guidance=none"],
    "refl": ["reward=preference", "reward.preference.rounding=false"],
}
OPTIONS = [  # what every run sets, so that ten iterations take half a minute
    "model=shapes-sd3",
    "data=shapes",
    "reward=shapes",
    "sampler.steps=8",
    "batch.prompts=4",
    "batch.micro=64",
    "eval.every=5",
    "eval.images=16",
    "eval.steps=4",
    "checkpoint.every=5",
    "trackers=[]",
]
TRAIN = """
import sys, torch, flowrl
torch.set_num_threads(1)
flowrl.train(flowrl.load_config(None, sys.argv[1:]))
"""
VARIES = ("time/", "memory/", "mfu")  # keys of metrics.jsonl that are measurements of the machine


def package_of(checkout: Path, folder: Path) -> Path:
    """A folder from which `import flowrl` gives the package of this checkout, as in a wheel."""
    tree = folder / "flowrl"
    tree.mkdir(parents=True)
    for entry in (checkout / "flowrl").iterdir():
        (tree / entry.name).symlink_to(entry)
    for name in ("samplers", "rewards", "configs"):
        (tree / name).symlink_to(checkout / name)
    return folder


def run(package: Path, method: str, iterations: int, output: Path) -> None:
    """Train in a process of its own; its output ends up in run.log beside the metrics."""
    options = [*OPTIONS, f"algorithm={method}", f"iterations={iterations}", f"output={output}"]
    options += METHODS[method]
    env = os.environ | {"PYTHONPATH": str(package), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, *options],
        env=env,
        cwd=package,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{method} of {package} failed:\n{done.stderr[-3000:]}")


def numbers(path: Path) -> list[dict[str, object]]:
    """Rows of metrics.jsonl without what varies from run to run."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(VARIES)} for row in rows]


def difference(old: Path, new: Path) -> str | None:
    """What differs first between two runs, as a sentence; None: nothing."""
    before, after = numbers(old), numbers(new)
    if len(before) != len(after):
        return f"{len(before)} and {len(after)} iterations"
    for i, (a, b) in enumerate(zip(before, after, strict=True), 1):
        wrong = [k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
        if wrong:
            first = f"{wrong[0]} {a.get(wrong[0])} -> {b.get(wrong[0])}"
            return f"iteration {i}: {first}, {len(wrong)} keys"
    if (old / "evaluation.json").read_bytes() != (new / "evaluation.json").read_bytes():
        return "evaluation.json differs"
    a, b = (load_file(run / "lora" / "pytorch_lora_weights.safetensors") for run in (old, new))
    wrong = [
        k for k in sorted(a.keys() | b.keys()) if k not in a or k not in b or not a[k].equal(b[k])
    ]
    return f"LoRA: {len(wrong)} of {len(a)} tensors differ" if wrong else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument(
        "--cache", type=Path, help="keep the old checkout's runs here, and use those that are there"
    )
    args = parser.parse_args()

    failed = 0
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        old_runs = (args.cache or work / "old_runs").resolve()
        new_runs = work / "new_runs"
        package = package_of(args.new.resolve(), work / "new")
        old_package = package_of(args.old.resolve(), work / "old")
        for method in args.methods:
            if not (old_runs / method / "lora").is_dir():
                run(old_package, method, args.iterations, old_runs / method)
            run(package, method, args.iterations, new_runs / method)
            found = difference(old_runs / method, new_runs / method)
            failed += found is not None
            print(f"{method:12} {found or 'equal'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
