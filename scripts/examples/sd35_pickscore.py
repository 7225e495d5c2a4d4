"""Stable Diffusion 3.5 Medium trained with PickScore on one GPU, judged on held-out prompts.

    python scripts/examples/sd35_pickscore.py --dry-run      # what it needs; no hub, no GPU
    python scripts/examples/sd35_pickscore.py                # an 80 GB card; weights from the hub
    python scripts/examples/sd35_pickscore.py iterations=20 batch.micro=4

MixGRPO in the paper's setting for SD3.5-M, on prompts that ship with flowrl. The weights of
stabilityai/stable-diffusion-3.5-medium are given out after their licence is accepted on the hub
(`hf auth login`). At the end it prints the held-out table, before and after, and what an iteration
took. Further words are settings, as of `flowrl train`, of which this is nothing but an example.
"""

from __future__ import annotations

import argparse
import statistics

import flowrl
from flowrl.cli.common import show

WORDS = [
    "model=sd3.5-medium",
    "algorithm=mix_grpo",
    "algorithm.window.every=20",
    "algorithm.kl_weight=1e-3",
    "sampler.steps=10",
    "reward=pickscore",
    "data=ocr",
    "batch.prompts=12",
    "batch.group=24",
    "batch.updates=2",
    "batch.micro=16",
    "train.compile=blocks",
    "iterations=100",
    "eval.guidance=pipeline",  # as the policy is trained
    "eval.baseline_guidance=null",
    "eval.every=0",
    "output=runs/sd35-pickscore",
]


def plan(words: list[str], device: str) -> None:
    """Print the config and the budget of the run."""
    from flowrl.cli.budget import tables
    from flowrl.training.budget import fit, roofline
    from flowrl.training.budget.planner import Planner

    cfg = flowrl.load_config(None, words)
    show(" ".join(words), wrap=True)
    for table in tables(fit.fit(Planner(cfg, roofline.device(device)))):
        show(table)


def train(words: list[str]) -> None:
    """Train, then print the held-out table and what an iteration took."""
    from flowrl.report.terminal import evaluation_table

    cfg = flowrl.load_config(None, words)
    run = flowrl.train(cfg)
    show(evaluation_table(run.evaluation))
    lines = run.metrics[1:] or run.metrics  # the first one also compiles and checks
    seconds = statistics.median(line["time/iteration"] for line in lines)
    images = cfg.batch.prompts * cfg.batch.group
    peak = max(line["memory/peak_gb"] for line in run.metrics)
    show(
        f"{seconds:.3g} s an iteration of {images} images ({1000 * seconds / images:.0f} ms each,"
        f" PickScore included), peak memory {peak:.1f} GB; {run.path / 'report.html'}",
        wrap=True,
    )


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--dry-run", action="store_true", help="print config and budget alone")
    parser.add_argument("--device", default="h100", help="whose budget --dry-run prints")
    parser.add_argument("settings", nargs="*", help="as iterations=20")
    given = parser.parse_args(arguments)
    words = [*WORDS, *given.settings]
    if given.dry_run:
        plan(words, given.device)
    else:
        train(words)


if __name__ == "__main__":
    main()
