"""How fast `flowrl score` is, and whether its memory grows with the number of files.

    python scripts/bench/score.py [--images 1000] [--reward clip --reward clip.preset=shapes ...]

Pictures of the shapes world are written as PNG files, then scored by
`flowrl.rewards.core.files.score_files` and by a plain loop: open a file, score it with each reward,
next file. Both run in this process, with the same loaded rewards, after a warm-up. Memory is the
highest resident size of a process of its own that scores a quarter, half and all of the files.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from flowrl.data.media import read_image, save
from flowrl.data.samples import Sample
from flowrl.rewards import RewardSet, load_set, parse_words, score
from flowrl.rewards.core.files import score_files
from flowrl.shapes.prompts import eval_prompts, scene
from flowrl.shapes.scenes import render
from flowrl.types import MediaContext

REWARDS = ["clip", "clip.preset=shapes", "preference", "jpeg"]


def make(folder: Path, count: int) -> list[Sample]:
    prompts, generator = eval_prompts(), torch.Generator().manual_seed(0)
    out = []
    for i in range(count):
        prompt = prompts[i % len(prompts)]
        path = save(render(scene(prompt, generator), supersample=2), folder / f"{i:05d}.png")
        out.append(Sample(path=path, prompt=prompt["prompt"], meta={}))
    return out


def plain(samples: list[Sample], rewards: RewardSet) -> list[float]:
    """What one writes first."""
    totals = []
    for s in samples:
        found = score(read_image(s.path)[None], [s.prompt], rewards, MediaContext(meta=[s.meta]))
        totals.append(found.total.item())
    return totals


def compare(samples: list[Sample], rewards: RewardSet) -> None:
    """Print the seconds of both ways, after a warm-up."""
    score_files(samples[:32], rewards)
    plain(samples[:8], rewards)
    began = time.perf_counter()
    scored, problems = score_files(samples, rewards)
    batched = time.perf_counter() - began
    began = time.perf_counter()
    totals = plain(samples, rewards)
    one_by_one = time.perf_counter() - began
    off = max(abs(item.total - total) for item, total in zip(scored, totals, strict=True))
    print(
        f"{len(scored)} images, {len(problems)} problems, {torch.get_num_threads()} threads,"
        f" rewards {', '.join(rewards.rewards)}"
    )
    print(
        f"flowrl score {batched:.1f} s, plain loop {one_by_one:.1f} s:"
        f" {one_by_one / batched:.1f} times as fast, largest gap {off:.1e}"
    )


def print_memory(names: Path, counts: Sequence[int], words: list[str]) -> None:
    """The highest resident size of processes that score so many of the files in `names`."""
    for count in counts:
        command = [sys.executable, __file__, "--images", str(count), "--memory", str(names)]
        command += [part for word in words for part in ("--reward", word)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"{count} files: {done.stdout.strip()} MiB at most")


def measure_memory(names: Path, count: int, rewards: RewardSet) -> None:
    """Score the first files that `names` lists, and print this process' highest resident size."""
    listed = json.loads(names.read_text())[:count]
    samples = [Sample(path=Path(path), prompt=prompt, meta={}) for path, prompt in listed]
    score_files(samples, rewards)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    default = " ".join(REWARDS)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--reward", action="append", help=f"as of flowrl score; default: {default}")
    parser.add_argument("--memory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    words, n = args.reward or REWARDS, args.images
    rewards = load_set(parse_words(words))
    if args.memory:
        measure_memory(args.memory, n, rewards)
        return
    with tempfile.TemporaryDirectory() as folder:
        samples = make(Path(folder), n)
        compare(samples, rewards)
        names = Path(folder) / "names.json"
        names.write_text(json.dumps([[str(s.path), s.prompt] for s in samples]))
        print_memory(names, (n // 4, n // 2, n), words)


if __name__ == "__main__":
    main()
