"""Whether the presets `memory=24gb|40gb|80gb` fit their cards, by the budget's model of an H100.

    python scripts/bench/presets.py [--model flux.1-dev] [--algorithm flow_grpo] [SETTING ...]

Prints a table of every model with every preset and fails where one needs more than its card has.
The reward is PickScore, whose weights are counted, unless a setting names others.
"""

from __future__ import annotations

import argparse

from flowrl.config.compose import options
from flowrl.config.load import load_config
from flowrl.training.budget import roofline
from flowrl.training.budget.fit import CARDS
from flowrl.training.budget.planner import Planner

MODELS = ("sd3.5-medium", "flux.1-dev", "qwen-image", "wan2.1-1.3b", "wan2.1-14b")
HEAD = "| model | preset | stays | peak | card needs | seconds an image |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=options("model"))
    parser.add_argument("--algorithm", default="flow_grpo", choices=options("algorithm"))
    parser.add_argument("settings", nargs="*", help="settings of a config, as batch.group=8")
    given = parser.parse_args()
    device, large = roofline.device("h100"), []
    print(HEAD, "|---|---|---|---|---|---|", sep="\n")
    for model in given.model or MODELS:
        shared = [f"model={model}", f"algorithm={given.algorithm}", "reward=pickscore", "data=ocr"]
        cfgs = {
            preset: load_config(None, [*shared, f"memory={preset}", *given.settings])
            for preset in options("memory")
        }
        planner = Planner(next(iter(cfgs.values())), device)
        for preset, cfg in cfgs.items():
            b = planner.budget(cfg)
            if b.needed > CARDS[int(preset.removesuffix("gb"))]:
                large.append(f"{model} with memory={preset}")
            print(
                f"| {model} | {preset} | {b.resident:.1f} GB | {b.peak:.1f} GB, {b.highest} |"
                f" {b.needed:.1f} GB | {b.seconds / b.samples:.2f} |",
                flush=True,
            )
    if large:
        raise SystemExit(f"too large for the card: {', '.join(large)}")


if __name__ == "__main__":
    main()
