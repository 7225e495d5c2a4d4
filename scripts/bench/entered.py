"""Files and functions of flowrl that one iteration and one start-up enter, by the profiler.

    python scripts/bench/entered.py            # figures
    python scripts/bench/entered.py --names    # and every function

The iteration is the second of a flow_grpo run on shapes-sd3; the start-up is `Trainer(cfg)`, which
builds and checks all that the run is made of. Comprehensions and lambdas belong to their function.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

OPTIONS = [
    "model=shapes-sd3",
    "algorithm=flow_grpo",
    "reward=shapes",
    "batch.prompts=2",
    "batch.group=4",
    "sampler.steps=4",
    "eval.images=4",
    "eval.steps=2",
    "eval.every=0",
    "trackers=[]",
]


class Entered:
    """Code objects of flowrl that ran inside `with`."""

    def __init__(self, package: Path) -> None:
        self.roots = [str(path) for path in package_folders(package)]
        self.codes: set[CodeType] = set()

    def __enter__(self) -> Entered:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self.codes.add(frame.f_code)

    def functions(self) -> dict[str, dict[str, int]]:
        """File -> {function: its lines}, without the bodies of modules and classes."""
        out: dict[str, dict[str, int]] = defaultdict(dict)
        for code in self.codes:
            if not any(code.co_filename.startswith(root) for root in self.roots):
                continue
            if code.co_name.startswith("<"):
                continue
            lines = [line for _, _, line in code.co_lines() if line is not None]
            if not code.co_flags & 0x2:  # a class body, which has no locals of its own
                continue
            name = f"{code.co_qualname}"
            out[code.co_filename][name] = max(lines) - code.co_firstlineno + 1
        return out


def package_folders(package: Path) -> list[Path]:
    """Where the source files of flowrl lie, as code objects name them."""
    import flowrl.rewards
    import flowrl.samplers

    found = [package, *map(Path, flowrl.rewards.__path__), *map(Path, flowrl.samplers.__path__)]
    return [path.resolve() for path in found] + found


def report(title: str, entered: Entered, names: bool) -> None:
    found = entered.functions()
    functions = sum(map(len, found.values()))
    lines = sum(sum(f.values()) for f in found.values())
    print(f"{title:10} {len(found)} files, {functions} functions, {lines} lines of them")
    if names:
        for path in sorted(found):
            print(f"  {Path(path).parent.name}/{Path(path).name}: {', '.join(sorted(found[path]))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="print every function too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    import flowrl

    package = Path(next(iter(flowrl.__path__)))
    start_up, iteration = Entered(package), Entered(package)
    with tempfile.TemporaryDirectory() as folder:
        cfg = flowrl.load_config(None, [*OPTIONS, "iterations=2", f"output={folder}/run"])
        with start_up:
            trainer = flowrl.Trainer(cfg)
        iterate = trainer.iterate

        def watched(number: int) -> Any:
            if number == 0:  # the first one also fills caches and tests the ratio
                return iterate(number)
            with iteration:
                return iterate(number)

        trainer.iterate = watched  # type: ignore[method-assign]
        for _ in trainer:
            pass
    report("iteration", iteration, args.names)
    report("start-up", start_up, args.names)


if __name__ == "__main__":
    main()
