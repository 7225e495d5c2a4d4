"""How long `flowrl budget` takes for every named config, each in a process of its own.

    python scripts/bench/budget_seconds.py [--algorithm flow_grpo] [--device h100] [--gpus 8]

Prints Markdown; exit code 1 where one takes more than a minute. It wants a free machine.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"
MOST = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="nft")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--gpus", type=int, default=1)
    given = parser.parse_args()
    slow = []
    print("| model | seconds |\n|---|---|")
    for model in sorted(path.stem for path in MODELS.glob("*.yaml")):
        words = [f"model={model}", f"algorithm={given.algorithm}", "--device", given.device]
        words += ["data=ocr", "reward=pickscore", "--gpus", str(given.gpus)]
        began = time.perf_counter()
        command = [sys.executable, "-m", "flowrl", "budget", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if b"fit" not in done.stdout:  # the exit code is 1, too, where the run does not fit
            raise SystemExit(f"{shlex.join(command)} failed")
        took = time.perf_counter() - began
        print(f"| {model} | {took:.1f} |", flush=True)
        if took > MOST:
            slow.append(model)
    if slow:
        raise SystemExit(f"more than {MOST:.0f} s: {', '.join(slow)}")


if __name__ == "__main__":
    main()
