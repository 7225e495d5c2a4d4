"""Two commits compared: counted work exactly, seconds in pairs. For a nightly job.

    python scripts/bench/two_commits.py main HEAD [--share 0.05] [--pairs 9] [--methods nft]

Both commits are checked out into a temporary folder, and a process of each runs the embedded model
with random rewards on one thread; they take turns, iteration by iteration. Counted, of the third
iteration: network calls and rows, FLOPs, operators, storages and bytes made, and numbers that the
host read off tensors. Exit code 1 where a count grew, or where seconds did by more than --share
(with a 95% bootstrap interval of the median of pairs that lies above it). Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("flow_grpo", "mix_grpo", "tree_grpo", "nft")
WORDS = [
    "model=shapes-sd3",
    "reward=jpeg",
    "data=shapes",
    "data.eval=null",
    "batch.prompts=2",
    "batch.updates=1",
    "batch.micro=32",
    "sampler.steps=6",
    "sampler.init_noise=sample",
    "model.self_check=false",
    "guard.check_rewards=false",
    "eval.baseline_guidance=null",
    "trackers=[]",
]
GROUP = {"tree_grpo": 27, "mix_grpo": 12}
READS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "equal", "is_nonzero")
WARM = 2  # iterations before anything is counted or timed


def measure(method: str, output: str) -> None:
    """The child: answers each line of its input, "count" or "time", with a line of JSON."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import flowrl

    class Counted(TorchDispatchMode):
        """Counts operators, what they make, and what the host reads."""

        def __init__(self) -> None:
            super().__init__()
            self.count: Counter[str] = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.count["operators"] += 1
            self.count["reads of the host"] += func.overloadpacket.__name__ in READS
            fresh = all(r.alias_info is None for r in func._schema.returns)
            for made in out if isinstance(out, list | tuple) else [out]:
                if fresh and isinstance(made, torch.Tensor):
                    self.count["storages"] += 1
                    self.count["bytes"] += made.untyped_storage().nbytes()
            return out

    seen = 0

    def score(media: torch.Tensor, *_: Any) -> torch.Tensor:
        nonlocal seen
        seen += len(media)
        return torch.rand(len(media), generator=torch.Generator().manual_seed(seen))

    torch.set_num_threads(1)
    group = [f"batch.group={GROUP.get(method, 8)}"]
    words = [*WORDS, *group, f"algorithm={method}", f"output={output}"]
    cfg = flowrl.load_config(None, words)
    trainer = flowrl.Trainer(cfg, rewards={"random": score})
    # counted by hooks: an operator does not say whose it is
    calls = Counter[str]()
    for name, network in trainer.policy.networks.items():
        network.register_forward_pre_hook(lambda *_, name=name: calls.update([f"calls of {name}"]))
    # caches and lazily made state are not what a commit changed
    for i in range(WARM):
        trainer.iterate(i)
    for i, asked in enumerate(sys.stdin, WARM):
        calls.clear()
        counter = Counted() if asked.strip() == "count" else None
        with counter or contextlib.nullcontext():
            metrics = trainer.iterate(i).metrics
        answer = {"seconds": metrics["time/iteration"]}
        if counter is not None:
            counted = {k: v for k, v in metrics.items() if k.startswith(("nfe/", "flops/"))}
            answer = {**counter.count, **calls, **counted}
        print(json.dumps(answer), flush=True)


class Child:
    """A process that runs a commit."""

    def __init__(self, package: Path, method: str, output: Path) -> None:
        env = os.environ | {"PYTHONPATH": str(package), "HF_HUB_OFFLINE": "1"}
        env |= {"OMP_NUM_THREADS": "1"}
        self.log = output.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--child", method, str(output)],
                env=env,
                cwd=package,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def ask(self, what: str) -> dict[str, float]:
        """One iteration of it, counted or timed."""
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.process.args[2:]} ended:\n{self.log.read_text()[-3000:]}")

    def close(self) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(60)


def compare(method: str, children: list[Child], pairs: int, share: float) -> bool:
    """Print the rows of a method, whose children run the old commit and the new one -> whether
    nothing grew."""
    from against_reference import interval

    before, after = (child.ask("count") for child in children)
    fine = True
    for name in sorted(before.keys() | after.keys()):
        a, b = before.get(name, 0), after.get(name, 0)
        if a != b:
            fine &= b < a
            print(f"| {method} | {name} | {a:.12g} | {b:.12g} | {'grew' if b > a else 'fell'} |")
    seconds: list[tuple[float, float]] = []
    for k in range(pairs):
        took = {}
        for place in (0, 1) if k % 2 else (1, 0):
            took[place] = children[place].ask("time")["seconds"]
        seconds.append((took[0], took[1]))
    ratios = [b / a for a, b in seconds]
    low, high = interval(ratios)
    grew = low > 1 + share
    middles = [statistics.median(column) for column in zip(*seconds, strict=True)]
    told = f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]{' grew' if grew else ''}"
    print(f"| {method} | seconds | {middles[0]:.3f} | {middles[1]:.3f} | {told} |", flush=True)
    return fine and not grew


def compared(packages: tuple[Path, Path], method: str, folder: Path, *how: Any) -> bool:
    """`compare` of a process of each package."""
    children = [
        Child(package, method, folder / f"{method}-{k}") for k, package in enumerate(packages)
    ]
    try:
        return compare(method, children, *how)
    finally:
        for child in children:
            child.close()


def checked_out(commit: str, folder: Path) -> Path:
    """A folder from which `import flowrl` gives the package of a commit; a path is taken as a
    checkout."""
    from same_runs import package_of

    place = folder / "tree"
    if Path(commit).is_dir():
        place = Path(commit).resolve()
    else:
        git = ["git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach"]
        subprocess.run([*git, str(place), commit], check=True)
    return package_of(place, folder / "package")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        measure(*sys.argv[2:4])
        return
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("old", help="a commit, or a folder with a checkout")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--share", type=float, default=0.05, help="by which seconds may grow")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        try:
            old, new = (checked_out(getattr(given, k), folder / k) for k in ("old", "new"))
            print("| method | what | old | new | |\n|-|-|-|-|-|")
            how = folder, given.pairs, given.share
            fine = [compared((old, new), method, *how) for method in given.methods]
        finally:
            for side in ("old", "new"):
                if (tree := folder / side / "tree").is_dir():
                    remove = ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)]
                    subprocess.run(remove, check=False)
    raise SystemExit(not all(fine))


if __name__ == "__main__":
    main()
