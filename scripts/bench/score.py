"""How fast `flowrl score` is, and whether its memory grows with the number of files.

    python scripts/bench/score.py [--images 1000] [--reward clip --reward clip.preset=shapes ...]

Pictures of the shapes world are written as PNG files, then scored by `flowrl.rewards.core.files.score_files`
and by a plain loop: open a file, score it with each reward, next file. Both run in this process,
with the same loaded rewards, after a warm-up. Memory is the highest resident size of a process of
its own that scores a quarter, half and all of the files.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from flowrl.data.media import read_image, save
from flowrl.data.samples import Sample
from flowrl.rewards import load_set, parse_words, score
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


def plain(samples: list[Sample], rewards) -> list[float]:
    """What one writes first."""
    return [
        score(
            read_image(s.path)[None], [s.prompt], rewards, MediaContext(meta=[s.meta])
        ).total.item()
        for s in samples
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument(
        "--reward", action="append", help="as of flowrl score; default: " + " ".join(REWARDS)
    )
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    rewards = load_set(parse_words(args.reward or REWARDS))
    if args.memory:
        samples = [
            Sample(path=Path(path), prompt=prompt, meta={})
            for path, prompt in json.loads(Path(args.memory).read_text())
        ]
        score_files(samples[: args.images], rewards)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        return
    with tempfile.TemporaryDirectory() as folder:
        samples = make(Path(folder), args.images)
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
        names = Path(folder) / "names.json"
        names.write_text(json.dumps([[str(s.path), s.prompt] for s in samples]))
        for count in (args.images // 4, args.images // 2, args.images):
            command = [sys.executable, __file__, "--images", str(count), "--memory", str(names)]
            command += [word for reward in args.reward or REWARDS for word in ("--reward", reward)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"{count} files: {done.stdout.strip()} MiB at most")


if __name__ == "__main__":
    main()
